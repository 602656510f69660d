"""precompute-first-layer: projections of the first layer become a table of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Attention, Block, Decoder, LayerNorm, LearnedPositions, RMSNorm
from weft.ir import interpret
from weft.passes import Trace, run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from ..decoders import BLOCK, decoder


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "name",
    [
        "family/llama-gqa-tied",
        "packed/family llama-mha-biases",
        "family/gemma2",
        "family/olmo2-gqa",
        "family/bloom",
        "family/deepseek-v3",
        "packed/variant latent queries",
        "cached/family mistral-gqa",
    ],
)
def test_first_projections_are_looked_up(name: str) -> None:
    before = ZOO[name]()
    after = applied("precompute-first-layer", before)
    assert worst(before, after) <= EXACT
    assert count(after, "linear") < count(before, "linear") and count(after, "embedding") > count(before, "embedding")
    assert compute_cost(after).flops < compute_cost(before).flops and len(after) < len(before)
    assert not any(n.startswith("layers.0.attn.q.") for n in after.params)


def test_parallel_blocks_look_up_their_feed_forward_too() -> None:
    model = Decoder(37, 16, 2, replace(BLOCK, arrangement="parallel"))
    after = run_passes(model.graph(), "precompute-first-layer", verify=True)
    table = after.params["layers.0.attn.by_token.weight"]
    assert table.shape == (37, 16 + 8 + 8 + 9 + 9) and count(after, "linear") == 2 + 7 + 1
    inputs = EquivalenceCheck().make_inputs(after)  # and in a model as it is, from float32 weights
    a, b = (interpret(g, inputs)["logits"] for g in (model.graph(), after))
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("settings", [{"positions": LearnedPositions(19)}, {}], ids=["learned", "none"])
def test_added_positions_prevent_the_table(settings: dict[str, LearnedPositions]) -> None:
    block = Block(Attention(4), MLP(9), LayerNorm())
    before, trace = Decoder(37, 16, 2, block, **settings).graph(), Trace()
    after = applied("precompute-first-layer", before, trace)
    assert (str(after) == str(before)) == bool(settings)
    if settings:
        assert "add (%positions_added) combines it with more than the token" in trace.refusals[0].reason
        wrong = applied("precompute-first-layer", Decoder(37, 16, 2, block).graph())
        assert (
            measure_difference(
                *(
                    EquivalenceCheck().run(
                        g,
                        EquivalenceCheck().make_inputs(before)
                        if g is before
                        else EquivalenceCheck().make_inputs(wrong),
                    )["logits"]
                    for g in (before, wrong)
                )
            )
            > 0.1
        )


def test_the_second_layer_depends_on_more_than_the_token() -> None:
    before = decoder()
    after = applied("precompute-first-layer", before)
    assert {n for n in before.params if n not in after.params} == {
        "layers.0.attn_norm.weight",
        *(f"layers.0.attn.{p}.{kind}" for p in "qkv" for kind in ("weight", "bias")),
    }
    assert str(applied("precompute-first-layer", after)) == str(after)


def test_norms_alone_are_not_worth_a_table() -> None:
    model = Decoder(37, 16, 1, Block(None, MLP(9, "relu")), embed_norm=RMSNorm())
    after = run_passes(model.graph(), "precompute-first-layer", verify=True)
    assert [n.op.name for n in after.nodes].count("embedding") == 2  # up of tokens, and the embedding with its norm
    assert count(after, "rms_norm") == 2
