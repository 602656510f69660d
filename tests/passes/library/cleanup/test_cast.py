"""cast: dtypes change, positions stay f32, nothing else happens."""

from __future__ import annotations

import pytest

from weft.ir import Graph, TensorType, Value, WeftError, ops
from weft.ir.types import dtypes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck
from weft.passes.library.cleanup.cast import CastDtype

from ...models import BATCH, SEQ, Tiny, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("before", ["dce", "pack-qkv, fuse-residual-norm, kv-cache, last-token-logits"])
def test_decoders_compute_in_the_dtype(name: str, before: str) -> None:
    graph = applied(before, Tiny(bias="q k v").graph())
    after = applied(f"cast{{dtype={name}}}", graph)
    wanted = dtypes.parse(name)
    floats = {v.type.dtype for n in after.nodes for v in n.outputs if v.type.dtype.is_float}
    floats |= {v.type.dtype for v in after.inputs.values() if v.type.dtype.is_float}
    assert floats == {wanted}
    assert {p.name for p in after.params.values() if p.type.dtype != wanted} <= {
        "rope.frequencies",
        "logits_from_end",
        "last_token.zero",
    }
    assert after.params["rope.frequencies"].type.dtype == dtypes.f32
    assert list(after.params) == list(graph.params) and len(after) == len(graph)
    assert worst(graph, after) <= EXACT
    CastDtype(wanted).check(graph, after, EquivalenceCheck())


def test_casting_back_and_to_the_same() -> None:
    g = Tiny().graph()
    assert applied("cast{dtype=f16}, cast{dtype=f32}", g) == g
    assert applied("cast{dtype=f32}", g) == g


def test_position_math_stays_f32_until_it_meets_activations() -> None:
    before = Tiny(rope=False, alibi=True, layers=2).graph()
    after = applied("cast{dtype=f16}", before)
    types = {n.output.name: str(n.output.type.dtype) for n in after.nodes}
    assert types["layers.0.attn.mul"] == types["layers.0.attn.cast"] == "f32"
    assert after.params["layers.0.attn.slopes"].type.dtype == dtypes.f32
    assert count(after, "cast") == 2 + 2 and types["layers.0.attn.attention"] == "f16"
    assert worst(before, after) <= EXACT


def test_parameter_of_position_math_and_activations_is_copied() -> None:
    g = Graph("both")
    at = g.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ)))
    w = weight(g, "w", 1, 1)
    places = ops.sin(ops.mul(ops.cast(at, to=dtypes.f32), w))
    g.add_output("y", ops.add(ops.mul(x, w), ops.mul(places, places)))
    after = applied("cast{dtype=bf16}", g)
    assert {n: str(p.type.dtype) for n, p in after.params.items()} == {"w": "bf16", "w.f32": "f32"}
    assert after.params["w"].recipe == after.params["w.f32"].recipe
    assert after.outputs["y"].type.dtype == dtypes.bf16
    assert worst(g, after) <= EXACT


def test_one_lowering_cast_serves_all_readers() -> None:
    g = Graph("readers")
    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    hot = ops.one_hot(ids, depth=6)
    outs: list[Value] = [ops.linear(hot, weight(g, f"w{i}", 5, 6)) for i in range(3)]
    g.add_output("y", ops.concat(*outs, axis=2))
    after = applied("cast{dtype=f16}", g)
    assert count(after, "cast") == 1 and worst(g, after) <= EXACT


@pytest.mark.parametrize("name", ["i64", "f8e4m3", "q4_k"])
def test_no_model_computes_in_these(name: str) -> None:
    with pytest.raises(WeftError, match=f"dtype={name} must be f16"):
        applied(f"cast{{dtype={name}}}", Tiny().graph())
