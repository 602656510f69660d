"""concat-caches: calls that return longer caches, and obey any mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.op import Growth
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.analysis.states import find_state_inputs
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.library.cache.concat_caches import ConcatCaches

from ...models import BATCH, SEQ, Tiny, weight
from ...rewrites import Rewrite, rewrites
from .cached import DECODERS, chosen, position_biased


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


GRAPHS = [
    *(decoder.graph() for decoder in DECODERS),
    position_biased(chosen),
    Tiny(window=3, kv_heads=1).graph(),
]


COUNTS_SLOTS = GRAPHS[DECODERS.index(Tiny(rope=False, alibi=True))]


@pytest.mark.halved
@pytest.mark.parametrize("graph", GRAPHS, ids=range(len(GRAPHS)))
@pytest.mark.parametrize("passes", ["kv-cache, concat-caches", "kv-cache, last-token-logits, concat-caches"])
def test_growing_caches_equal_caches_with_slots_by_position(graph: Graph, passes: str) -> None:
    after = run_passes(graph, passes, verify=True)
    assert {spec.growth for spec, _, _ in find_state_inputs(after)} == {Growth.APPEND}
    assert str(after.inputs["attention_mask"].type) == "i64[batch, past + seq]"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("graph", GRAPHS, ids=range(len(GRAPHS)))
def test_padding_anywhere_changes_no_row(graph: Graph, last: bool) -> None:
    passes = "kv-cache, last-token-logits, concat-caches" if last else "kv-cache, concat-caches"
    after, full, check = run_passes(graph, passes), graph, EquivalenceCheck()
    masks = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]])
    if graph is COUNTS_SLOTS:
        masks[2] = 1
    ids = np.random.default_rng(0).integers(0, 31, masks.shape)
    inputs = _empty_inputs(after, 3) | {"input_ids": ids, "attention_mask": masks}
    inputs["position_ids"] = np.maximum(masks.cumsum(1) - 1, 0)
    got = check.run(after, inputs)["logits"]
    for row, mask in enumerate(masks.astype(bool)):
        alone = {"input_ids": ids[row][mask][None], "position_ids": np.arange(mask.sum())[None]}
        want = check.run(full, {k: v for k, v in alone.items() if k in full.inputs})["logits"][0]
        ours, theirs = (got[row, 0], want[-1]) if last else (got[row][mask], want)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def shaw() -> Graph:
    g = Graph("shaw")
    g.meta["kind"] = "decoder"
    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    x = ops.embedding(ids, weight(g, "embed", 31, 12))
    y = ops.relative_attention(x, x, x, weight(g, "distances", 5, 4), heads=3, causal=True)
    g.add_output("logits", ops.linear(y, weight(g, "head", 31, 12)))
    return g


def _empty_inputs(graph: Graph, batch: int) -> dict[str, Any]:
    sizes = {"batch": batch, "past": 0}
    return {name: np.zeros(graph.inputs[name].type.concrete(sizes)) for _, name, _ in find_state_inputs(graph)}


def test_bias_that_counts_slots_is_reported() -> None:
    trace = Trace()
    ConcatCaches().run(run_passes(COUNTS_SLOTS, "kv-cache"), trace)
    assert any("counts slots, so padding must not be between tokens" in note for note in trace.lines)


def test_rolling_caches_become_full_ones() -> None:
    graph = run_passes(Tiny(window=3).graph(), "kv-cache, rolling-buffer, concat-caches", verify=True)
    assert not any(n.attrs.get("rolling") for n in graph.nodes)


def test_second_run_changes_nothing() -> None:
    once = run_passes(Tiny().graph(), "kv-cache, concat-caches")
    assert run_passes(once, "concat-caches") == once


def test_relative_attention_keeps_slots_by_position() -> None:
    graph = shaw()
    with pytest.raises(WeftError, match="relative_attention in shaw needs caches with slots by position"):
        run_passes(graph, "kv-cache, concat-caches")


def test_graph_without_caches_is_refused() -> None:
    with pytest.raises(WeftError, match="concat-caches: graph tiny has no cache; run kv-cache before it"):
        run_passes(Tiny().graph(), "concat-caches")
