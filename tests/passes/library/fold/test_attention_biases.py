"""drop-k-bias and v-bias-to-o-bias: equal where they fire, wrong where they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, interpret, ops
from weft.ir.recipes import Full, Literal, Take
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.matrices import MatMul
from weft.ir.types import dtypes, sizes
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

HEADS, KV, D, WIDTH = 4, 2, 3, 10
BATCH, SEQ, KEYS = (sizes.sym(n) for n in ("batch", "seq", "keys"))
MINE = {
    "softcap": {"softcap": 1.5},
    "window": {"window": 2},
    "window, not causal": {"window": 2, "causal": False},
    "chunks": {"pattern": "chunked", "stride": 3},
    "mask": {"causal": False},
    "causal mask": {},
    "mask and window": {"causal": False, "window": 2},
    "across": {"causal": False},
    "across, masked": {"causal": False},
    "across, window": {"causal": False, "window": 2},
}


def model(kind: str = "", moved: bool = False) -> Graph:
    """Attention with biases on q, k and v; `kind` adds one thing. `moved`: that of k left out, that of v at o."""
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, WIDTH)))
    source = g.add_input("memory", TensorType(dtypes.f32, (BATCH, KEYS, WIDTH))) if "across" in kind else x
    at = g.add_input("at", TensorType(dtypes.i64, (BATCH, SEQ)))

    def projected(value: Value, rows: int, name: str, bias: bool = True) -> Value:
        b = weight(g, f"{name}.bias", rows) if bias else None
        return ops.linear(value, weight(g, f"{name}.weight", rows, WIDTH), b, name=name)

    q = projected(x, HEADS * D, "q")
    k, v = (projected(source, KV * D, name, not moved) for name in "kv")
    if kind == "rope":
        table = weight(g, "frequencies", 1, recipe=RopeFrequencies(2))
        q, k = (ops.rope(y, at, table, heads=n) for y, n in ((q, HEADS), (k, KV)))
    if kind == "norm":
        k = ops.rms_norm(k, weight(g, "k_norm.weight", KV * D))
    if kind == "clip":
        k, v = (ops.clip(y, low=-0.4, high=0.4) for y in (k, v))
    mask = g.add_input("key_mask", TensorType(dtypes.i64, (BATCH, source.shape[1]))) if "mask" in kind else None
    sinks = weight(g, "sinks", HEADS) if kind == "sinks" else None
    bias = None
    if kind == "alibi":
        bias = ops.alibi(weight(g, "slopes", HEADS), at, at)
    if kind == "written bias":
        bias = weight(g, "bias", 1, 4, 1, 1, recipe=Literal((0.0, -np.inf, 0.0, 0.0), (1, 4, 1, 1)))
    if kind == "bias":
        bias = g.add_input("bias", TensorType(dtypes.f32, (1, 1, SEQ, SEQ)))
    attrs: dict[str, Any] = {"causal": True, **MINE.get(kind, {})}
    y = ops.attention(q, k, v, bias, mask, sinks, heads=HEADS, kv_heads=KV, **attrs)
    out = weight(g, "o.weight", 7, HEADS * D)
    if not moved:
        g.add_output("y", ops.linear(y, out, weight(g, "o.bias", 7), name="o"))
        return g
    bias_of_v = weight(Graph("other"), "v.bias", KV * D).recipe
    repeated = Take(bias_of_v, tuple(h // 2 * D + i for h in range(HEADS) for i in range(D)))
    y = ops.add(ops.linear(y, out, weight(g, "o.bias", 7)), weight(g, "more", 7, recipe=MatMul(out.recipe, repeated)))
    g.add_output("y", y)
    return g


def feeds(graph: Graph) -> dict[str, np.ndarray]:
    """Random inputs; of three texts the second has padding before, the third behind it."""
    inputs = EquivalenceCheck().make_inputs(graph, keys=3)
    inputs["at"] = np.tile(np.arange(5), (3, 1))
    if "key_mask" in inputs:
        inputs["key_mask"] = np.ones_like(inputs["key_mask"])
        inputs["key_mask"][1, :2] = inputs["key_mask"][2, 1:] = 0
    if "bias" in inputs:
        inputs["bias"][:, :, 3] = -np.inf
    return inputs


def error(before: Graph, after: Graph, **given: np.ndarray) -> float:
    """The largest difference, in terms of the largest number."""
    equivalence, inputs = EquivalenceCheck(), feeds(before) | given
    return measure_difference(equivalence.run(before, inputs)["y"], equivalence.run(after, inputs)["y"])


FINE = ("", "window", "window, not causal", "chunks", "mask", "across", "across, masked", "alibi")


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("kind", FINE)
@pytest.mark.parametrize("pack", ["", "pack-qkv, "])
def test_both_biases_are_folded(pack: str, kind: str) -> None:
    before, trace = model(kind), Trace()
    after = applied(pack + "drop-k-bias, v-bias-to-o-bias", before, trace)
    assert not trace.refusals and error(before, after) <= EXACT
    assert error(before, model(kind, moved=True)) <= EXACT  # what they must come to, built by hand
    kept = {"q.bias", "o.bias", "qkv.bias", "kv.bias"}
    assert {name for name in after.params if name.endswith("bias")} <= kept
    assert str(applied("drop-k-bias, v-bias-to-o-bias", after)) == str(after)


def test_packing_before_or_after_is_the_same() -> None:
    passes = "drop-k-bias, v-bias-to-o-bias"
    one, other = (applied(text, model()) for text in (f"pack-qkv, {passes}", f"{passes}, pack-qkv"))
    assert one.params["qkv.bias"].recipe.evaluate(one.reader).tolist() == (
        other.params["qkv.bias"].recipe.evaluate(other.reader).tolist()
    )
    assert one.params["o.bias"].recipe == other.params["o.bias"].recipe and worst(one, other) <= EXACT


K_REASONS = {
    "rope": "RoPE rotates the bias with the position of its key",
    "softcap": "its soft cap is not invariant to a shift",
    "sinks": "its sinks are not shifted",
    "norm": "rms_norm (%rms_norm) is between the bias and the scores",
    "clip": "clip (%clip) is between the bias and the scores",
}


@pytest.mark.parametrize("kind", K_REASONS)
def test_key_bias_that_changes_scores_stays(kind: str) -> None:
    before, trace = model(kind), Trace()
    after = applied("drop-k-bias", before, trace)
    assert str(after) == str(before)
    (refused,) = trace.refusals
    assert K_REASONS[kind] in refused.reason
    (linear,) = (n for n in after.nodes if n.output.name == "k")
    linear.set_input(2, None)
    assert error(before, after) > 0.01  # what dropping it would have done


V_REASONS = {
    "sinks": "its sinks take a part of the attention",
    "clip": "clip (%clip_2) is between the bias and the values",
    "causal mask": "queries of padding may see no key",
    "mask and window": "queries of padding may see no key",
    "across, window": "queries and keys differ in number",
    "bias": "its bias %bias may mask all keys of a query",
    "written bias": "its bias %bias may mask all keys of a query",
}


@pytest.mark.parametrize("kind", V_REASONS)
def test_value_bias_that_does_not_reach_every_row_stays(kind: str) -> None:
    before, trace = model(kind), Trace()
    after = applied("v-bias-to-o-bias", before, trace)
    assert str(after) == str(before)
    (refused,) = trace.refusals
    assert V_REASONS[kind] in refused.reason
    by_hand = model(kind, moved=True)
    (linear,) = (n for n in by_hand.nodes if n.output.name == "k")
    by_hand_k = weight(by_hand, "k.bias", KV * D)  # only the bias of the values is moved
    with by_hand.inserting(before=linear):
        by_hand.replace(linear, ops.linear(linear.inputs[0], linear.inputs[1], by_hand_k))
    assert error(before, by_hand) > 0.01


def test_fully_masked_rows_are_the_documented_exception() -> None:
    """All its keys are masked: its rows are W_o 0 + b_o before, and W_o b + b_o after."""
    before = model("mask")
    after = applied("v-bias-to-o-bias", before)
    empty = np.ones((3, 5), np.int64)
    empty[1] = 0
    equivalence, inputs = EquivalenceCheck(), feeds(before) | {"key_mask": empty}
    a, b = (interpret(equivalence.randomize_weights(g), inputs)["y"] for g in (before, after))
    assert measure_difference(a[[0, 2]], b[[0, 2]]) <= EXACT and measure_difference(a[1], b[1]) > 0.1


def test_caches_gates_and_shared_keys_are_left() -> None:
    trace = Trace()
    applied("drop-k-bias, v-bias-to-o-bias", applied("kv-cache", ZOO["variant/no positions, biases"]()), trace)
    assert {r.reason for r in trace.refusals} == {
        "its cache holds keys with their bias; run drop-k-bias before kv-cache",
        "its cache holds values with their bias; run v-bias-to-o-bias before kv-cache",
    }
    trace = Trace()
    applied("v-bias-to-o-bias", ZOO["variant/gate"](), trace)
    assert {r.reason for r in trace.refusals} == {"the result is read by mul, not by one linear"}
    g = Graph("shared")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, WIDTH)))
    kv = ops.linear(x, weight(g, "kv.weight", 8, WIDTH), weight(g, "kv.bias", 8), name="kv")
    g.add_output("y", ops.attention(ops.slice_(x, axis=2, start=0, stop=8), kv, kv, heads=2, kv_heads=2))
    for name in ("drop-k-bias", "v-bias-to-o-bias"):
        trace = Trace()
        assert str(applied(name, g, trace)) == str(g) and "is read twice by attention" in trace.refusals[0].reason


def test_keys_that_are_values() -> None:
    g = Graph("latent")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 8)))
    k = ops.linear(x, weight(g, "k.weight", 4, 8), weight(g, "k.bias", 4), name="k")
    g.add_output("y", ops.attention(x, k, heads=2, kv_heads=1, value_dim=3))
    trace = Trace()
    after = applied("drop-k-bias", g, trace)
    assert trace.refusals[0].reason == "its keys are also its values"
    next(n for n in after.nodes if n.output.name == "k").set_input(2, None)
    assert worst(g, after) > 0.1


@pytest.mark.parametrize("name", ["family/albert", "family/bart", "family/qwen2-gqa-tied", "packed/family bert"])
def test_families_with_biases(name: str) -> None:
    before = ZOO[name]()
    after = applied("drop-k-bias, v-bias-to-o-bias", before)
    assert worst(before, after) <= EXACT
    shared = 1 if "albert" in name else count(after, "attention")  # its layers are one layer
    assert len(before.params) - len(after.params) in (0, shared, 2 * shared)


def test_a_bias_of_zeros_is_none() -> None:
    g = model()
    g.params["k.bias"].recipe = Full(0.0, (KV * D,))
    trace = Trace()
    assert str(applied("drop-k-bias", g, trace)) == str(g) and not trace.lines
