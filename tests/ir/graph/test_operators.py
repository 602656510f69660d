"""Operators of values, numbers among operands, operands by name, and what ops of several results return."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, Value, WeftError, interpret, ops, verify
from weft.ir.op import OPS
from weft.ir.schema.signature import results_class_name
from weft.ir.types import TensorType, dtypes

X = np.array([[0.5, 2.0, 3.0], [1.0, 0.25, 4.0]])
Y = np.array([[1.5, -2.0, 3.0], [1.0, 7.0, -0.5]])
WHOLE = np.array([[0, 1, 2], [3, 4, 5]])


def graph() -> tuple[Graph, Value, Value, Value]:
    g = Graph()
    floats = (g.add_input(name, TensorType(dtypes.f32, (2, 3))) for name in "xy")
    return g, *floats, g.add_input("i", TensorType(dtypes.i64, (2, 3)))


def computed(fn: Callable[[Value, Value, Value], Value]) -> np.ndarray[Any, Any]:
    g, x, y, i = graph()
    g.add_output("out", fn(x, y, i))
    verify(g)
    (out,) = interpret(g, {"x": X, "y": Y, "i": WHOLE}).values()
    return out


ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("op", ARITHMETIC + COMPARISONS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("number", [2, 0.5, np.float32(3), -1.0])
def test_values_and_numbers_on_either_side(op: Callable[[Any, Any], Any], number: float) -> None:
    np.testing.assert_allclose(computed(lambda x, y, i: op(x, y)), op(X, Y), rtol=1e-15)
    np.testing.assert_allclose(computed(lambda x, y, i: op(x, number)), op(X, number), rtol=1e-15)
    np.testing.assert_allclose(computed(lambda x, y, i: op(number, x)), op(number, X), rtol=1e-15)


@pytest.mark.parametrize("op", [operator.floordiv, operator.mod], ids=lambda op: op.__name__)
def test_whole_numbers_divide(op: Callable[[Any, Any], Any]) -> None:
    np.testing.assert_array_equal(computed(lambda x, y, i: op(i, 2)), op(WHOLE, 2))
    np.testing.assert_array_equal(computed(lambda x, y, i: op(7, i + 1)), op(7, WHOLE + 1))


@pytest.mark.parametrize("power", [-3, -1, -0.5, 0, 0.5, 1, 2, 3, 7, 1.75])
def test_powers(power: float) -> None:
    np.testing.assert_allclose(computed(lambda x, y, i: x**power), X**power, rtol=1e-14)


def test_whole_powers_of_negative_numbers_are_products() -> None:
    np.testing.assert_allclose(computed(lambda x, y, i: y**3), Y**3, rtol=1e-14)
    np.testing.assert_allclose(computed(lambda x, y, i: 2**y), 2**Y, rtol=1e-14)
    np.testing.assert_allclose(computed(lambda x, y, i: x**y), X**Y, rtol=1e-14)


def test_products_signs_and_conditions() -> None:
    np.testing.assert_allclose(computed(lambda x, y, i: x @ ops.transpose(y, axes=(1, 0))), X @ Y.T)
    np.testing.assert_array_equal(computed(lambda x, y, i: abs(-y)), abs(Y))
    band = computed(lambda x, y, i: (i > 1) & ~(i >= 4) | (i < 1))
    np.testing.assert_array_equal(band, (WHOLE > 1) & ~(WHOLE >= 4) | (WHOLE < 1))


def test_ops_take_numbers() -> None:
    np.testing.assert_array_equal(computed(lambda x, y, i: ops.maximum(y, 0)), np.maximum(Y, 0))
    np.testing.assert_array_equal(computed(lambda x, y, i: ops.minimum(1.5, y)), np.minimum(Y, 1.5))
    np.testing.assert_array_equal(computed(lambda x, y, i: ops.equal(i, 4)), WHOLE == 4)
    np.testing.assert_array_equal(
        computed(lambda x, y, i: ops.where(i < 2, y, -np.inf)), np.where(WHOLE < 2, Y, -np.inf)
    )
    np.testing.assert_array_equal(computed(lambda x, y, i: ops.where(i < 2, 0, -1e4)), np.where(WHOLE < 2, 0, -1e4))


def test_a_number_beside_a_value_that_is_not_finite_is_that_number() -> None:
    def masked(x: Value, y: Value, i: Value) -> Value:
        scores = ops.where(i < 1, -np.inf, x)
        return ops.where(scores < -1e9, 5.0, scores)

    np.testing.assert_allclose(computed(masked), np.where(WHOLE < 1, 5.0, X))


def test_sums_and_products_with_a_number_are_one_op() -> None:
    g, x, _, _ = graph()
    assert (1 - x * 2).type == x.type
    assert [node.op.name for node in g.nodes] == ["affine", "affine"]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, y, i: x if x < y else y, r"cannot decide an if, and, or or not .* `is None`"),
        (lambda x, y, i: 0 < x < 3, "cannot decide an if"),
        (lambda x, y, i: i / 2, r"div: %i.* has integer elements; divide with //"),
        (lambda x, y, i: x / 0, "div: .* is divided by 0"),
        (lambda x, y, i: i % 0, "mod: .* is divided by 0"),
        (lambda x, y, i: x + i, "operands have dtypes f32 and i64; cast one of them"),
        (lambda x, y, i: i + 0.5, "must be integers"),
        (lambda x, y, i: (-2) ** x, "the base -2.0 must be positive"),
        (lambda x, y, i: ops.linear(x, 3), "op linear: operand weight is a number"),
        (lambda x, y, i: ops.add(1, 2), "op add: all operands are numbers"),
        (lambda x, y, i: ops.linear(x, "w"), "op linear: operand weight must be a value of a graph, not str"),
        (lambda x, y, i: ops.where(True, x, y), "where: the condition is the number True"),
        (lambda x, y, i: ops.mul(x, float("nan")), "%x.* is combined with NaN"),
        (lambda x, y, i: ops.linear(x, y, x=y), "op linear: operand x is passed twice"),
        (lambda x, y, i: ops.linear(x, wieght=y), "op linear has no attribute 'wieght'|op linear needs operand weight"),
    ],
)
def test_refusals(fn: Callable[[Value, Value, Value], Value], message: str) -> None:
    _, x, y, i = graph()
    with pytest.raises(WeftError, match=message):
        fn(x, y, i)


UNSUPPORTED = r"unsupported operand|not supported|not support ufuncs"


@pytest.mark.parametrize("other", ["a", None, [1], np.ones(3), object()], ids=lambda v: type(v).__name__)
def test_other_types_are_refused_by_python(other: object) -> None:
    _, x, _, _ = graph()
    with pytest.raises(TypeError, match=UNSUPPORTED):
        _ = x + other
    with pytest.raises(TypeError, match=UNSUPPORTED):
        _ = other < x


def test_sizes_stay_sizes() -> None:
    from weft.ir.types import sizes

    x = Graph().add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), 4)))
    assert str(2 * x.shape[0] + 1) == "2*batch + 1"
    for mixed in (lambda: x * x.shape[0], lambda: x.shape[0] * x):
        with pytest.raises(TypeError, match="unsupported operand"):
            mixed()


def test_equality_is_identity() -> None:
    _, x, y, _ = graph()
    assert x == x and x != y and len({x, y, x}) == 2
    assert x  # present


def test_operands_have_names() -> None:
    g, x, y, _ = graph()
    weight = g.add_input("w", TensorType(dtypes.f32, (3,)))
    named = ops.layer_norm(bias=weight, x=x)
    assert named.producer is not None and named.producer.inputs == (x, None, weight)
    assert ops.sub(y=x, x=y).producer.inputs == (y, x)  # type: ignore[union-attr]  # an op made it


def test_several_results_are_a_tuple_with_names() -> None:
    _, x, y, _ = graph()
    best = ops.top_k(x, k=2)
    values, indices = best
    assert best._fields == ("values", "indices") and (best.values, best.indices) == (values, indices)
    assert type(best).__name__ == "TopKResults"
    assert ops.add_norm(x, y).sum.type == x.type
    a, b = ops.split(x, sizes=(1, 2))
    assert (a.shape, b.shape) == ((2, 1), (2, 2))
    (whole,) = ops.split(x, sizes=(3,))
    assert whole.type == x.type


def test_states_come_back_where_they_are_given() -> None:
    g = Graph()
    x, taps = (g.add_input(n, TensorType(dtypes.f32, s)) for n, s in (("x", (1, 5, 4)), ("taps", (4, 3))))
    assert isinstance(ops.causal_conv(x, taps), Value)
    y, present = ops.causal_conv(x, taps, past=g.add_input("past", TensorType(dtypes.f32, (1, 2, 4))))
    assert y.shape == (1, 5, 4) and present.shape == (1, 2, 4)


@pytest.mark.parametrize("name", sorted(OPS))
def test_names_of_results_follow_from_the_operands(name: str) -> None:
    from weft.ir.testing import build_node_graph

    op = OPS[name]
    for case in op.cases:
        (node,) = build_node_graph(op, case)[0].nodes
        expected = len(op.result_names(node.inputs)) if op.output_names else 1
        assert op.returns_tuple or len(node.outputs) == expected


def test_names_of_tuples() -> None:
    assert results_class_name("gated_linear_attention") == "GatedLinearAttentionResults"


def test_patterns_are_written_with_operators() -> None:
    from weft.passes.edits.pattern import Match, Pattern

    def scaled(x: Value, y: Value) -> Value:
        return ops.sigmoid(x * y) * 2.0 + 1

    _, x, y, _ = graph()
    out = ops.affine(ops.affine(ops.sigmoid(ops.mul(x, y)), by=2.0), plus=1.0)
    assert isinstance(Pattern(scaled).match(out.producer), Match)  # type: ignore[arg-type]  # an op made it
