"""norm-across-rope and alibi-as-dimension: what softmax and rotations do not notice, and what they do."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime as ort
import pytest

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, Value, interpret, ops
from weft.ir.recipes import Full, Literal
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes
from weft.passes import Trace, legalize, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import BATCH, SEQ, applied, count, weight, worst
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
def test_what_does_not_commute(kind: str, to: str) -> None:
    graph, other, trace = turned(kind, behind=to == "before"), turned(kind, behind=to == "behind"), Trace()
    assert str(applied(f"norm-across-rope{{to={to}}}", graph, trace)) == str(graph)
    assert REASONS[kind] in trace.refusals[0].reason
    inputs = {**EquivalenceCheck().make_inputs(graph), "at": np.arange(15).reshape(3, 5)}
    assert (
        measure_difference(EquivalenceCheck().run(graph, inputs)["y"], EquivalenceCheck().run(other, inputs)["y"])
        > 0.01
    )


def test_what_others_read_stays() -> None:
    for to, behind, name in (("behind", False, "norm"), ("before", True, "norm")):
        trace = Trace()
        graph = turned("read", behind)
        assert str(applied(f"norm-across-rope{{to={to}}}", graph, trace)) == str(graph)
        assert trace.refusals[0].reason == f"%{name} is read by others too"


def test_norms_of_a_model() -> None:
    before = ZOO["variant/norms of q and k, no weights"]()
    after = run_passes(before, "norm-across-rope, pack-qkv, kv-cache", verify=True)
    assert count(after, "rms_norm") == count(before, "rms_norm")
    weighted, trace = ZOO["family/qwen3-gqa"](), Trace()
    assert str(applied("norm-across-rope", weighted, trace)) == str(weighted) and len(trace.refusals) == 6


@pytest.mark.parametrize(
    "name", ["family/bloom", "family/mpt", "family/falcon-sequential", "variant/ALiBi, biases", "variant/ALiBi"]
)
def test_slopes_become_a_dimension(name: str) -> None:
    before = ZOO[name]()
    after = applied("alibi-as-dimension", before)
    assert not any(n.operand("bias") for n in after.nodes if n.op is ops.attention) and not count(after, "alibi")
    assert worst(before, after) <= EXACT and str(applied("alibi-as-dimension", after)) == str(after)
    run_passes(after, "default", verify=True)  # caches hold the longer keys


def biased(kind: str = "", dimension: bool = False) -> Graph:
    """ALiBi in attention of one kind; with `dimension` instead as one, written by hand."""
    g = Graph("one")
    q, k, v = (g.add_input(n, TensorType(dtypes.f32, (BATCH, SEQ, w))) for n, w in (("q", 8), ("k", 4), ("v", 4)))
    at = ops.unsqueeze(ops.iota(q, axis=1), axes=(0,))
    slopes = weight(g, "slopes", 4)
    given = ops.square(slopes) if kind == "computed" else slopes
    attrs = {"softcap": 0.5} if kind == "softcap" else {"causal": False} if kind == "symmetric" else {}
    attrs |= {"window": 3} if kind == "window" else {"scale": 0.3} if kind == "scale" else {}
    attrs |= {"scale": 0.0} if kind == "no scale" else {}
    attrs = {"heads": 4, "kv_heads": 2, "causal": True, **attrs}
    sinks = weight(g, "sinks", 4) if kind == "sinks" else None
    bias = None
    if dimension:
        scale = attrs.setdefault("scale", 1 / math.sqrt(2)) or 1.0
        numbers = ops.cast(ops.unsqueeze(at, axes=(2, 3)), to=dtypes.f32)
        more = ops.reshape(ops.affine(given, by=1 / scale), shape=(1, 1, 4, 1))
        sides = []
        for x, heads, last in ((q, 4, more), (k, 2, numbers)):
            apart = ops.reshape(x, shape=(BATCH, SEQ, heads, 2))
            joined = ops.concat(apart, ops.expand(last, shape=(BATCH, SEQ, heads, 1)), axis=3)
            sides.append(ops.reshape(joined, shape=(BATCH, SEQ, heads * 3)))
        q, k = sides
    else:
        bias = ops.alibi(given, at, at, symmetric=kind == "symmetric")
    g.add_output("y", ops.attention(q, k, v, bias, None, sinks, **attrs))
    return g


@pytest.mark.parametrize("kind", ["", "window", "scale"])
def test_it_is_what_one_writes_by_hand(kind: str) -> None:
    graph = biased(kind)
    after = applied("alibi-as-dimension", graph)
    assert worst(graph, after) <= EXACT and worst(graph, biased(kind, dimension=True)) <= EXACT


SLOPES = {
    "symmetric": "its bias by |i − j| is not a product",
    "softcap": "its soft cap applies to the scores before the bias",
    "sinks": "its sinks are not shifted",
    "no scale": "its scale is 0",
    "computed": "its slopes are computed",
}


@pytest.mark.parametrize("kind", SLOPES)
def test_slopes_that_are_felt(kind: str) -> None:
    graph, trace = biased(kind), Trace()
    assert str(applied("alibi-as-dimension", graph, trace)) == str(graph)
    assert SLOPES[kind] in trace.refusals[0].reason
    if kind != "computed":
        assert worst(graph, biased(kind, dimension=True)) > 1e-3


def test_caches_are_left() -> None:
    trace = Trace()
    cached = applied("kv-cache", ZOO["variant/ALiBi"]())
    assert str(applied("alibi-as-dimension", cached, trace)) == str(cached)
    assert all("run alibi-as-dimension before kv-cache" in r.reason for r in trace.refusals) and trace.refusals


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_runtimes_need_no_bias(target: str) -> None:
    graph = run_passes(biased(), "alibi-as-dimension")
    inputs = EquivalenceCheck().make_inputs(graph, seq=40)
    wanted = interpret(EquivalenceCheck().randomize_weights(biased()), inputs)["y"]
    place, staged = TARGETS[target], EquivalenceCheck().randomize_weights(graph)
    legalize(staged, lambda node: list_refusals(node, place))
    session = ort.InferenceSession(
        serialize_model(build_model(staged, place, max_length=64)), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {name: x.astype(np.float32) for name, x in inputs.items()})[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_a_table_of_distances_is_computed_once_by_cse() -> None:
    """T5's bias, where every layer asks for it anew: nothing is left for a pass of its own."""
    g = Graph("shared")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    table = weight(g, "table", 8, 3)
    y = x
    for _ in range(3):
        at = ops.unsqueeze(ops.iota(x, axis=1), axes=(0,))
        y = ops.attention(y, y, y, ops.relative_position_bias(table, at, at), heads=3, kv_heads=3)
    g.add_output("y", y)
    after = applied("cse", g)
    assert count(g, "relative_position_bias") == 3 and count(after, "relative_position_bias") == 1
    assert worst(g, after) == 0
