"""pad-vocab: tables and heads get rows of zeros, logits stay."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import WeftError, ops
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck

from ...models import applied, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from ..decoders import decoder


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [{}, {"head_bias": True}, {"logit_scale": 0.3, "logit_softcap": 2.0}], ids=str)
def test_padded_tables_give_the_same_logits(tied: bool, settings: dict[str, object]) -> None:
    before = decoder(tie_embeddings=tied, **settings)
    after = applied("pad-vocab{multiple=8}", before)
    assert worst(before, after) <= EXACT
    rows = {n: p.shape[0] for n, p in after.params.items() if p.shape[0] in (37, 40)}
    names = (
        {"embed.weight"}
        | (set() if tied else {"lm_head.weight"})
        | ({"lm_head.bias"} if "head_bias" in settings else set())
    )
    assert rows == dict.fromkeys(names, 40)
    assert str(applied("pad-vocab{multiple=8}", after)) == str(after)
    assert str(applied("pad-vocab{multiple=37}", before)) == str(before)


def test_slice_removes_logits_of_padding() -> None:
    before = decoder()
    after = applied("pad-vocab{multiple=8}", before)
    cut = next(n for n in after.nodes if n.op is ops.slice_)
    after.outputs["logits"] = cut.inputs[0]
    inputs = EquivalenceCheck().make_inputs(before)
    logits = EquivalenceCheck().run(after, inputs)["logits"]
    assert logits.shape[-1] == 40 and not logits[..., 37:].any()
    power = np.exp(logits)
    assert (power[..., 37:].sum(-1) / power.sum(-1) > 0.02).all()  # the probability they would take


def test_after_the_logits_of_the_last_token_only() -> None:
    run_passes(decoder(tie_embeddings=True), "default, pad-vocab{multiple=16}", verify=True)


def test_heads_that_cannot_be_padded() -> None:
    with pytest.raises(WeftError, match="has no output logits computed by a linear"):
        applied("pad-vocab", ZOO["family/bert"]())
    with pytest.raises(WeftError, match="multiple=0 must be from 1 to 65536"):
        applied("pad-vocab{multiple=0}", decoder())
    g = decoder()
    other = next(n for n in g.nodes if n.output.name == "final_norm").output
    g.add_output("other", ops.linear(other, g.params["lm_head.weight"], name="other"))
    trace = Trace()
    assert str(applied("pad-vocab", g, trace)) == str(g)
    assert trace.refusals[0].reason == "%lm_head.weight is also read by linear (%other)"
