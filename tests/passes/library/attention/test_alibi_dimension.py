"""alibi-as-dimension: ALiBi becomes one more feature of queries and keys."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime as ort
import pytest

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, interpret, ops
from weft.ir.types import dtypes
from weft.passes import Trace, legalize, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck

from ...models import BATCH, SEQ, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "name", ["family/bloom", "family/mpt", "family/falcon-sequential", "variant/ALiBi, biases", "variant/ALiBi"]
)
def test_slopes_become_a_dimension(name: str) -> None:
    before = ZOO[name]()
    after = applied("alibi-as-dimension", before)
    assert not any(n.operand("bias") for n in after.nodes if n.op is ops.attention) and not count(after, "alibi")
    assert worst(before, after) <= EXACT and str(applied("alibi-as-dimension", after)) == str(after)
    run_passes(after, "kv-cache", verify=True)  # caches hold the longer keys


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
def test_result_equals_the_dimension_written_by_hand(kind: str) -> None:
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
def test_slopes_that_cannot_become_a_dimension_are_refused(kind: str) -> None:
    graph, trace = biased(kind), Trace()
    assert str(applied("alibi-as-dimension", graph, trace)) == str(graph)
    assert SLOPES[kind] in trace.refusals[0].reason
    if kind != "computed":
        assert worst(graph, biased(kind, dimension=True)) > 1e-3


def test_graphs_with_caches_are_unchanged() -> None:
    trace = Trace()
    cached = applied("kv-cache", ZOO["variant/ALiBi"]())
    assert str(applied("alibi-as-dimension", cached, trace)) == str(cached)
    assert all("run alibi-as-dimension before kv-cache" in r.reason for r in trace.refusals) and trace.refusals


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_onnx_runtime_needs_no_bias(target: str) -> None:
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
