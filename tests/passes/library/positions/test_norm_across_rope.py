"""norm-across-rope: an RMSNorm of heads and a rotation change places."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.recipes import Full, Literal
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import BATCH, SEQ, applied, count, weight
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

HEADS, D = 3, 8


def turned(kind: str, behind: bool = False) -> Graph:
    """Heads of 8 numbers, 6 of them turned, normed before it or `behind` it; `kind` says how."""
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, HEADS * D)))
    at = g.add_input("at", TensorType(dtypes.i64, (BATCH, SEQ)))
    table = weight(g, "frequencies", 3, recipe=RopeFrequencies(6))
    interleaved = "interleaved" in kind
    amplitude = 1.3 if kind == "amplitude" else 1.0
    pairs = (1.0, 2.0, 3.0, 1.0, 2.0, 3.0) if not interleaved else (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    recipes = {"ones": Full(2.0, (D,)), "pairs": Literal((*pairs, 5.0, 7.0), (D,))}
    recipes |= {"pairs, interleaved": recipes["pairs"], "neighbours": Literal((1.0, 1, 2, 2, 3, 3, 5, 7), (D,))}
    gain = weight(g, "gain", D, recipe=recipes.get(kind)) if kind in recipes or kind == "weight" else None
    if kind == "full":
        gain = weight(g, "gain", HEADS * D, recipe=Literal((*pairs, 5.0, 7.0) * HEADS, (HEADS * D,)))

    def rotated(v: Value) -> Value:
        return ops.rope(v, at, table, heads=HEADS, interleaved=interleaved, amplitude=amplitude, name="turned")

    def normed(v: Value) -> Value:
        if kind in ("full", "full, plain"):
            return ops.rms_norm(v, gain, eps=0.1)
        width = 4 if kind == "halves" else D
        heads = ops.reshape(v, shape=(*v.shape[:2], HEADS * D // width, width))
        norm = ops.layer_norm(heads, eps=0.1) if kind == "layer" else ops.rms_norm(heads, gain, eps=0.1, name="norm")
        return ops.reshape(norm, shape=v.shape)

    y = normed(rotated(x)) if behind else rotated(normed(x))
    g.add_output("y", y)
    if kind == "read":
        (norm,) = (n for n in g.nodes if n.op is ops.rms_norm)
        g.add_output("norm", norm.output)
    return g


FINE = ("plain", "interleaved", "ones", "pairs", "pairs, interleaved", "full", "full, plain")


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("kind", FINE)
def test_a_norm_and_a_rotation_commute(kind: str) -> None:
    front, behind = turned(kind), turned(kind, behind=True)
    inputs = {**EquivalenceCheck().make_inputs(front), "at": np.arange(15).reshape(3, 5)}
    for graph, wanted, pipeline in (
        (front, behind, "norm-across-rope"),
        (behind, front, "norm-across-rope{to=before}"),
    ):
        trace = Trace()
        after = applied(pipeline, graph, trace)
        assert trace.rewrites.total() == 1
        assert [n.op.name for n in after.nodes] == [n.op.name for n in wanted.nodes]
        assert str(applied(pipeline, after)) == str(after)
        y, z = (EquivalenceCheck().run(g, inputs)["y"] for g in (graph, after))
        assert measure_difference(y, z) <= EXACT


REASONS = {
    "weight": "its weight %gain may differ within a rotary pair",
    "neighbours": "its weight %gain may differ within a rotary pair",
    "layer": "it is a LayerNorm",
    "amplitude": "the rotation's amplitude 1.3",
    "halves": "it normalizes 4 features, not heads of 8",
}


@pytest.mark.parametrize("to", ["behind", "before"])
@pytest.mark.parametrize("kind", REASONS)
def test_norms_that_do_not_commute_are_refused(kind: str, to: str) -> None:
    graph, other, trace = turned(kind, behind=to == "before"), turned(kind, behind=to == "behind"), Trace()
    assert str(applied(f"norm-across-rope{{to={to}}}", graph, trace)) == str(graph)
    assert REASONS[kind] in trace.refusals[0].reason
    inputs = {**EquivalenceCheck().make_inputs(graph), "at": np.arange(15).reshape(3, 5)}
    assert (
        measure_difference(EquivalenceCheck().run(graph, inputs)["y"], EquivalenceCheck().run(other, inputs)["y"])
        > 0.01
    )


def test_norms_with_other_readers_are_refused() -> None:
    for to, behind, name in (("behind", False, "norm"), ("before", True, "norm")):
        trace = Trace()
        graph = turned("read", behind)
        assert str(applied(f"norm-across-rope{{to={to}}}", graph, trace)) == str(graph)
        assert trace.refusals[0].reason == f"%{name} is read by others too"


def test_norms_of_queries_and_keys_move() -> None:
    before = ZOO["variant/norms of q and k, no weights"]()
    after = run_passes(before, "norm-across-rope, pack-qkv, kv-cache", verify=True)
    assert count(after, "rms_norm") == count(before, "rms_norm")
    weighted, trace = ZOO["family/qwen3-gqa"](), Trace()
    assert str(applied("norm-across-rope", weighted, trace)) == str(weighted) and len(trace.refusals) == 6
