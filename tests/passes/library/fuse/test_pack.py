"""pack-qkv and pack-gate-up: linears of one value become one linear and a split."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, MemoryReader, TensorType, Value, ops
from weft.ir.recipes import Concat, Full, Scale, Slice, Source
from weft.ir.types import dtypes
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT

from ...models import Tiny, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from .hidden import HIDDEN, N


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        Tiny(bias="q k v gate up"),
        Tiny(bias="q v up", qk_norm=True, tied=True),
        Tiny(bias="k", kv_heads=6, window=3),
        Tiny(norm="layer", rope=False, alibi=True),
        Tiny(kv_heads=1, layers=3, hidden=7),
    ],
    ids=str,
)
def test_packed_decoders_keep_their_outputs(tiny: Tiny) -> None:
    before = tiny.graph()
    after = applied("pack-qkv, pack-gate-up, fuse-residual-norm", before)
    assert count(after, "linear") == tiny.layers * 4 + 1
    assert count(after, "split") == tiny.layers * 2
    assert count(after, "add_norm") == tiny.layers * 2
    assert count(after, "add") == 0
    assert worst(before, after) <= EXACT
    kept = {n for n in after.params if ".q." in n or ".k." in n or ".v." in n or ".gate." in n or ".up." in n}
    assert not kept


def test_packed_parameters_and_names() -> None:
    after = applied("pack-qkv, pack-gate-up", Tiny(layers=1, bias="q up").graph())
    weights = after.params["layers.0.attn.qkv.weight"]
    assert isinstance(weights.recipe, Concat) and weights.shape == (40, 18)
    assert [p.stream for p in weights.recipe.items] == [f"layers.0.attn.{n}.weight" for n in "qkv"]  # type: ignore[attr-defined]  # Normal
    bias = after.params["layers.0.attn.qkv.bias"].recipe
    assert isinstance(bias, Concat) and bias.items[1:] == (Full(0.0, (8,)), Full(0.0, (8,)))
    assert isinstance(up := after.params["layers.0.mlp.gate_up.bias"].recipe, Concat)
    assert up.items[0] == Full(0.0, (23,))
    split = next(n for n in after.nodes if n.op is ops.split)
    assert [v.name for v in split.outputs] == [f"layers.0.attn.{n}" for n in "qkv"]
    assert split.scope == "layers.0.attn"


def attention(q: Value, k: Value, v: Value) -> Value:
    return ops.attention(q, k, v, heads=2, kv_heads=2)


def test_cross_attention_packs_only_keys_and_values() -> None:
    g = Graph("cross")
    x, memory = g.add_input("x", HIDDEN), g.add_input("memory", TensorType(dtypes.f32, (N, 7, 10)))
    q = ops.linear(x, weight(g, "q.weight", 8, 10))
    k, v = (ops.linear(memory, weight(g, f"{n}.weight", 8, 10)) for n in "kv")
    g.add_output("y", attention(q, k, v))
    after = applied("pack-qkv", g)
    assert list(after.params) == ["q.weight", "kv.weight"] and worst(g, after) <= EXACT


def test_a_shared_key_value_projection_is_packed_once() -> None:
    g = Graph("shared")
    x = g.add_input("x", HIDDEN)
    q, kv = (ops.linear(x, weight(g, f"{n}.weight", 8, 10), name=n) for n in ("q", "kv"))
    g.add_output("y", attention(q, kv, kv))
    after = applied("pack-qkv", g)
    assert count(after, "linear") == 1 and after.params["qk.weight"].shape == (16, 10)
    assert worst(g, after) <= EXACT


def test_tied_weights_stay_tied_and_right() -> None:
    reader = MemoryReader({k: np.zeros((8, 10), np.float32) for k in "qkv"})
    g = Graph("looped", reader)
    x = g.add_input("x", HIDDEN)
    q, k, v = (weight(g, f"{n}.weight", 8, 10, recipe=Source(n)) for n in "qkv")
    b = weight(g, "q.bias", 8, recipe=Full(0.0, (8,)))
    out = weight(g, "o.weight", 10, 8)
    for _ in range(3):  # one layer three times
        y = attention(ops.linear(x, q, b), ops.linear(x, k), ops.linear(x, v))
        x = ops.add(x, ops.linear(y, out))
    g.add_output("probe", ops.linear(x, q))
    g.add_output("y", x)
    after = applied("pack-qkv", g)
    assert list(after.params) == ["q.weight", "o.weight", "qkv.weight", "qkv.bias"]
    assert count(after, "linear") == 7 and worst(g, after) <= EXACT


def test_equal_initial_values_do_not_tie_layers() -> None:
    g = Graph("fresh")
    x = g.add_input("x", HIDDEN)
    for i in range(2):
        with g.scope(f"layers.{i}"):
            weights = [weight(g, f"{n}.weight", 10, 10) for n in "qkv"]
            biases = [weight(g, f"{n}.bias", 10, recipe=Full(0.0, (10,))) for n in "qkv"]
            x = attention(*(ops.linear(x, w, b) for w, b in zip(weights, biases, strict=True)))
    g.add_output("y", x)
    after = applied("cse, pack-qkv", g)
    assert list(after.params) == [f"layers.{i}.qkv.{n}" for i in range(2) for n in ("weight", "bias")]


def test_linear_with_other_readers_is_packed_for_all_of_them() -> None:
    g = Graph("read")
    x = g.add_input("x", HIDDEN)
    q, k, v = (ops.linear(x, weight(g, f"{n}.weight", 8, 10), name=n) for n in "qkv")
    g.add_output("q", q)
    g.add_output("y", attention(ops.mul(q, ops.sigmoid(v)), k, v))
    after = applied("pack-qkv", g)
    assert count(after, "linear") == 1 and worst(g, after) <= EXACT


def test_computed_weights_are_not_packed_and_noted() -> None:
    g = Graph("computed")
    x = g.add_input("x", HIDDEN)
    q, k, v = (ops.linear(x, ops.square(weight(g, f"{n}.weight", 8, 10)), name=n) for n in "qkv")
    g.add_output("y", attention(q, k, v))
    trace = Trace()
    applied("pack-qkv", g, trace)
    assert not trace.rewrites and "is not a parameter" in trace.lines[0]
    g = Graph("none")
    x = g.add_input("x", HIDDEN)
    g.add_output("y", attention(x, x, x))
    trace = Trace()
    applied("pack-qkv", g, trace)
    assert trace.lines == ["pack-qkv: no attention has q, k or v from several linears of the same value"]


def test_a_gate_read_elsewhere_is_a_near_miss() -> None:
    g = Graph("gate")
    x = g.add_input("x", HIDDEN)
    gate, up = (ops.linear(x, weight(g, f"{n}.weight", 6, 10), name=n) for n in ("gate", "up"))
    g.add_output("y", ops.glu(gate, up, activation="gelu"))
    trace = Trace()
    after = applied("pack-gate-up", g, trace)
    assert trace.rewrites.total() == 1 and worst(g, after) <= EXACT
    g.add_output("gate", gate)
    trace = Trace()
    applied("pack-gate-up", g, trace)
    assert trace.lines == [
        "pack-gate-up: fired 0 times; nearest miss at glu (%glu): %gate, made by linear, is an output of the graph"
    ]


MODELS = {
    "plain": Tiny(),
    "biases": Tiny(bias="q v gate"),
    "qk-norm": Tiny(qk_norm=True),
    "layer norm": Tiny(norm="layer", rope=False, bias="q k v gate up"),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_unpack_undoes_packing(model: Tiny) -> None:
    graph = model.graph()
    packed = applied("pack-qkv, pack-gate-up", graph)
    apart = applied("unpack", packed)
    assert count(packed, "linear") < count(apart, "linear") == count(graph, "linear")
    assert worst(graph, apart) == 0
    assert count(apart, "split") == 0
    named = {p.name: p.recipe for p in apart.params.values()}
    for i in range(2):
        assert named[f"layers.{i}.attn.k.weight"] == graph.params[f"layers.{i}.attn.k.weight"].recipe
    assert applied("unpack", apart) == apart


def test_repeated_packing_keeps_recipes_short() -> None:
    graph = applied("pack-qkv, unpack, pack-qkv, unpack, pack-qkv", Tiny().graph())
    recipe = graph.params["layers.0.attn.qkv.weight"].recipe
    assert len(recipe.parts) == 3 and not recipe.has(Slice)
    assert not recipe.has(Source, Scale, Full)
