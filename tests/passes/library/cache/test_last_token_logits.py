"""last-token-logits: logits of the last token of each row only."""

from __future__ import annotations

import re

import numpy as np
import pytest

from weft.ir import TensorType, WeftError, ops
from weft.ir.types import dtypes, sizes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference
from weft.passes.library.cache.last_token_logits import LastTokenLogits

from ...models import BATCH, SEQ, Tiny, applied, count
from ...rewrites import Rewrite, rewrites
from .cached import DECODERS


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("tiny", DECODERS, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_last_logits_are_rows_of_the_full_logits(tiny: Tiny, fused: bool) -> None:
    text = "pack-qkv, pack-gate-up, fuse-residual-norm, kv-cache" if fused else "kv-cache"
    before = applied(text, tiny.graph())
    after = applied("last-token-logits", before)
    assert str(after.outputs["logits"].type) == "f32[batch, 1, 37]"
    for seed in range(3):
        equivalence = EquivalenceCheck(seed)
        inputs = equivalence.make_inputs(before)
        valid = inputs["attention_mask"].sum(1) - inputs["position_ids"][:, 0]
        assert len(set(valid)) > 1 and valid.max() == 5  # rows of different lengths
        full, last = equivalence.run(before, inputs), equivalence.run(after, inputs)
        assert last["logits"].shape == (3, 1, 37)
        for b, n in enumerate(valid):
            assert measure_difference(full["logits"][b, n - 1], last["logits"][b, 0]) <= EXACT
        for name in full.keys() - {"logits"}:
            assert measure_difference(full[name], last[name]) == 0


def test_a_mask_of_zeros_takes_the_first_row() -> None:
    before = applied("kv-cache", Tiny(layers=1).graph())
    after = applied("last-token-logits", before)
    equivalence = EquivalenceCheck()
    inputs = equivalence.make_inputs(before)
    inputs["attention_mask"] = np.zeros_like(inputs["attention_mask"])
    assert np.isfinite(equivalence.run(after, inputs)["logits"]).all()


def test_a_head_without_layers_reads_gathered_ids() -> None:
    g = Tiny(layers=0).graph()
    for name, size in (("attention_mask", "total"), ("position_ids", "seq")):
        if name not in g.inputs:
            g.add_input(name, TensorType(dtypes.i64, (BATCH, sizes.sym(size))))
    after = applied("last-token-logits", g)
    assert count(after, "gather_rows") == 1
    LastTokenLogits().check(g, after, EquivalenceCheck())


def test_logits_that_mix_tokens_are_gathered_as_they_are() -> None:
    before = applied("kv-cache", Tiny(layers=1).graph())
    logits = before.outputs["logits"]
    before.outputs["logits"] = ops.cumsum(logits, axis=1)
    after = applied("last-token-logits", before)
    LastTokenLogits().check(before, after, EquivalenceCheck())
    assert list(after.nodes)[-1].op is ops.gather_rows


def test_check_notices_a_wrong_row() -> None:
    before = applied("kv-cache", Tiny(layers=1).graph())
    after = applied("last-token-logits", before)
    node = next(n for n in after.nodes if n.output.name == "last_token.index")
    node.output.replace_uses(after.params["last_token.zero"])
    with pytest.raises(WeftError):
        LastTokenLogits().check(before, after, EquivalenceCheck())


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("dce", "logits", "has no input attention_mask; run kv-cache before it"),
        ("kv-cache", "scores", "has no output logits [batch, seq, vocab]"),
        ("kv-cache, last-token-logits", "logits", "has no output logits [batch, seq, vocab]"),
    ],
)
def test_graphs_without_caches_or_logits_are_refused(text: str, output: str, message: str) -> None:
    g = Tiny().graph()
    g.outputs[output] = g.outputs.pop("logits")
    with pytest.raises(WeftError, match=re.escape(message)):
        applied(f"{text}, last-token-logits", g)


def test_nodes_after_the_last_attention_compute_one_row() -> None:
    after = applied("kv-cache, last-token-logits", Tiny(layers=3).graph())
    nodes = list(after.nodes)
    last = max(i for i, n in enumerate(nodes) if n.op is ops.attention)
    assert count(after, "gather_rows") == 2
    assert all(n.output.shape[1] == 1 for n in nodes[last + 1 :])
    assert all(n.output.shape[1] == SEQ for n in nodes[:last] if n.scope != "last_token")
    assert next(n for n in nodes if n.scope == "layers.2.mlp").output.name == "layers.2.mlp.gate"
