"""collapse-linears: products of linears, adapters and tables become one."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EXACT

from ...models import BATCH, SEQ, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

HIDDEN = TensorType(dtypes.f32, (BATCH, SEQ, 8))


def start(name: str) -> tuple[Graph, Value]:
    g = Graph(name)
    return g, g.add_input("x", HIDDEN)


def mapped(g: Graph, x: Value, name: str, rows: int, bias: bool = False) -> Value:
    return ops.linear(
        x, weight(g, f"{name}.weight", rows, x.width), weight(g, f"{name}.bias", rows) if bias else None, name=name
    )


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("biases", ["", "a", "b", "c", "a b c"])
def test_a_chain_becomes_one_product(biases: str) -> None:
    g, x = start("chain")
    y = mapped(g, x, "a", 9, "a" in biases)
    y = ops.affine(mapped(g, y, "b", 7, "b" in biases), by=0.3)
    g.add_output("y", mapped(g, y, "c", 6, "c" in biases))
    after = applied("collapse-linears", g)
    assert [n.op.name for n in after.nodes] == ["linear"] and worst(g, after) <= EXACT
    assert "c.weight" in after.params and len(after.params) == 1 + bool(biases)
    assert compute_cost(after).flops < compute_cost(g).flops


def test_a_narrow_middle_stays_narrow() -> None:
    g, x = start("bottleneck")
    g.add_output("y", mapped(g, mapped(g, x, "a", 2), "b", 8))
    trace = Trace()
    assert str(applied("collapse-linears", g, trace)) == str(g)
    assert trace.refusals[0].reason == "one product takes 64 multiplications a row, not 32"


def test_other_readers_and_activations_prevent_collapsing() -> None:
    g, x = start("read")
    inner = mapped(g, x, "a", 9)
    g.add_output("y", mapped(g, inner, "b", 8))
    g.add_output("inner", inner)
    trace = Trace()
    assert str(applied("collapse-linears", g, trace)) == str(g) and "%a has other readers" in trace.refusals[0].reason
    g, x = start("bent")
    g.add_output("y", mapped(g, ops.relu(mapped(g, x, "a", 9)), "b", 8))
    assert str(applied("collapse-linears", g)) == str(g)
    wrong, x = start("straight")
    wrong.add_output("y", mapped(wrong, mapped(wrong, x, "a", 9), "b", 8))
    assert worst(g, wrong) > 0.1
    g, x = start("shifted")  # a number that is added is no factor
    g.add_output("y", mapped(g, ops.affine(mapped(g, x, "a", 9), by=2.0, plus=1.0), "b", 8))
    assert str(applied("collapse-linears", g)) == str(g)


def adapted(base: str, layers: int = 1) -> Graph:
    """Attention whose queries and values have low-rank adapters; `base` spells the passes that ran before."""
    g, x = start("adapted")
    params: dict[str, object] = {}

    def shared(name: str, *shape: int) -> object:
        if name not in params:
            params[name] = weight(g, name, *shape)
        return params[name]

    for _ in range(layers):
        q, k, v = (ops.linear(x, shared(n, 8, 8), shared(f"{n}.bias", 8), name=n) for n in "qkv")
        low = {n: ops.linear(ops.linear(x, shared(f"{n}.a", 2, 8)), shared(f"{n}.b", 8, 2)) for n in "qv"}
        q, v = ops.add(q, ops.affine(low["q"], by=1.7)), ops.add(low["v"], v)
        x = ops.add(x, ops.linear(ops.attention(q, k, v, heads=2, kv_heads=2, causal=True), shared("o", 8, 8)))
    g.add_output("y", x)
    return run_passes(g, base)


@pytest.mark.parametrize("base", ["", "unpack, dce"])
@pytest.mark.parametrize("layers", [1, 2])
def test_low_rank_adapters_are_merged(base: str, layers: int) -> None:
    before = adapted(base, layers)
    after = applied("collapse-linears", before)
    assert count(after, "linear") == 4 * layers and worst(before, after) <= EXACT
    assert sorted(after.params) == sorted(["q", "q.bias", "k", "k.bias", "v", "v.bias", "o"])
    numbers = {n: p.recipe.evaluate(before.reader) for n, p in before.params.items()}
    merged = after.params["q"].recipe.evaluate(after.reader)
    np.testing.assert_allclose(merged, numbers["q"] + 1.7 * numbers["q.b"] @ numbers["q.a"], rtol=1e-5, atol=1e-6)


def test_adapter_next_to_a_packed_linear_collapses() -> None:
    g, x = start("packed")
    q, k = ops.split.emit(ops.linear(x, weight(g, "qk", 16, 8), weight(g, "bias", 16)), sizes=(8, 8))
    low = mapped(g, mapped(g, x, "a", 2), "b", 8)
    g.add_output("q", ops.add(q, low))
    g.add_output("k", k)
    after = applied("collapse-linears", g)
    assert [n.op.name for n in after.nodes] == ["linear", "linear"] and worst(g, after) <= EXACT


def test_adapter_with_an_activation_is_not_merged() -> None:
    g, x = start("bent")
    low = mapped(g, ops.swish(mapped(g, x, "a", 2)), "b", 8)
    g.add_output("y", ops.add(mapped(g, x, "q", 8), low))
    assert str(applied("collapse-linears", g)) == str(g)
    g, x = start("low")  # two low-rank maps are less work than what they add up to
    low = [mapped(g, mapped(g, x, f"{n}.a", 1), f"{n}.b", 8) for n in "pq"]
    g.add_output("y", ops.add(*low))
    trace = Trace()
    assert str(applied("collapse-linears", g, trace)) == str(g)
    assert "64 multiplications a row, not 32" in trace.refusals[0].reason


def looked_up(tied: bool = False, norm: bool = False, bias: bool = True) -> Graph:
    g = Graph("factorized")
    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    table = weight(g, "embed.weight", 11, 3)
    x = ops.embedding(ids, table, name="embed")
    x = ops.rms_norm(x, weight(g, "norm", 3)) if norm else x
    y = mapped(g, x, "wide", 8, bias)
    narrow = mapped(g, ops.relu(y), "narrow", 3)
    g.add_output("logits", ops.linear(narrow, table if tied else weight(g, "head", 11, 3)))
    return g


@pytest.mark.parametrize("bias", [True, False])
def test_a_factorized_embedding_becomes_one_table(bias: bool) -> None:
    before = looked_up(bias=bias)
    after = applied("collapse-linears", before)
    assert after.params["embed.weight"].shape == (11, 8) and "wide.weight" not in after.params
    assert worst(before, after) <= EXACT and compute_cost(after).flops < compute_cost(before).flops


def test_tables_that_are_tied_or_normed_stay() -> None:
    before, trace = looked_up(tied=True), Trace()
    assert str(applied("collapse-linears", before, trace)) == str(before)
    assert trace.refusals[0].reason == "%embed.weight, or the result of its lookup, is also read by linear (%linear)"
    normed = looked_up(norm=True)
    assert str(applied("collapse-linears", normed)) == str(normed)
    assert worst(normed, looked_up()) > 0.1  # what collapsing over the norm would make of it
    albert = ZOO["family/albert"]()
    assert str(applied("collapse-linears", albert)) == str(albert)
