"""cse: equal nodes and parameters are computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.recipes import Full, Source
from weft.ir.types import dtypes

from ...models import BATCH, SEQ, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from .inputs import N, graph


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_cse_merges_equal_nodes_in_one_walk() -> None:
    g, x = graph()
    y = g.add_input("y", TensorType(dtypes.f32, (N, 8)))
    first = ops.exp(ops.add(x, y), name="kept")
    second = ops.exp(ops.add(y, x))
    g.add_output("z", ops.sub(first, second, name="z"))
    after = applied("cse", g)
    assert [n.op.name for n in after.nodes] == ["add", "exp", "sub"]
    assert [v.name for n in after.nodes for v in n.outputs] == ["add", "kept", "z"]
    assert worst(g, after) == 0


@pytest.mark.parametrize(
    "two",
    [
        lambda x: (ops.sub(x, ops.exp(x)), ops.sub(ops.exp(x), x)),
        lambda x: (ops.affine(x, by=0.0), ops.affine(x, by=-0.0)),
        lambda x: (ops.swish(x, beta=1.0), ops.swish(x, beta=1.5)),
        lambda x: (ops.exp(x), ops.neg(x)),
        lambda x: (ops.mul(x, x), ops.add(x, x)),
    ],
)
def test_cse_leaves_different_nodes_apart(two: Callable[[Value], tuple[Value, Value]]) -> None:
    g, x = graph()
    for i, v in enumerate(two(x)):
        g.add_output(f"y{i}", v)
    after = applied("dce, cse", g)
    assert after.outputs["y0"] is not after.outputs["y1"]
    assert worst(g, after) == 0


def test_cse_ties_parameters_of_one_recipe() -> None:
    g, x = graph("a", "b")
    ws = [weight(g, name, 6, 8, recipe=Source(key)) for name, key in (("one", "a"), ("two", "a"), ("three", "b"))]
    half = g.add_param("half", ws[0].type.with_dtype(dtypes.f16), Source("a"))
    for i, w in enumerate(ws):
        g.add_output(f"y{i}", ops.linear(x, w))
    g.add_output("half", ops.neg(half))
    after = applied("cse", g)
    assert list(after.params) == ["one", "three", "half"]
    assert count(after, "linear") == 2 and worst(g, after) == 0


def test_cse_keeps_initial_values_of_different_weights_apart() -> None:
    g, x = graph()
    for i in range(2):
        x = ops.rms_norm(x, weight(g, f"norm{i}", 8, recipe=Full(1.0, (8,))))
    g.add_output("y", x)
    assert list(applied("cse", g).params) == ["norm0", "norm1"]


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
