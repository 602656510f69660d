"""Python numbers as operands of arithmetic, comparisons and `where`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, WeftError, interpret, ops
from weft.ir.types import dtypes

X, N, MASK = np.array([0.5, 1.0, 2.0, 4.0]), np.array([-7, -1, 4, 9]), np.array([True, False, True, False])


def run(fn: Callable[[Value], Value], array: np.ndarray = X) -> tuple[np.ndarray, list[str]]:
    """Return the values of `fn` applied to an input with the values `array`, and the names of its ops."""
    graph = Graph()
    dtype = {"f": dtypes.f32, "i": dtypes.i64, "b": dtypes.bool_}[array.dtype.kind]
    graph.add_output("y", fn(graph.add_input("x", TensorType(dtype, array.shape))))
    return interpret(graph, {"x": array})["y"], [node.op.name for node in graph.nodes]


@pytest.mark.parametrize(
    ("fn", "wanted", "names"),
    [
        (lambda x: ops.add(3, x), X + 3, ["affine"]),
        (lambda x: ops.sub(x, 3), X - 3, ["affine"]),
        (lambda x: ops.sub(3, x), 3 - X, ["affine"]),
        (lambda x: ops.mul(x, 3), X * 3, ["affine"]),
        (lambda x: ops.div(x, 4), X / 4, ["affine"]),
        (lambda x: ops.div(4, x), 4 / X, ["reciprocal", "affine"]),
        (lambda x: ops.maximum(1, x), np.maximum(X, 1), ["clip"]),
        (lambda x: ops.minimum(x, 1), np.minimum(X, 1), ["clip"]),
        (lambda x: ops.less(x, 2), X < 2, ["affine", "less"]),
        (lambda x: ops.less(2, x), X > 2, ["affine", "less"]),
        (lambda x: ops.where(ops.less(x, 2), 1, x), np.where(X < 2, 1, X), ["affine", "less", "affine", "where"]),
    ],
)
def test_numbers_become_constants_of_few_ops(
    fn: Callable[[Value], Value], wanted: np.ndarray, names: list[str]
) -> None:
    values, emitted = run(fn)
    np.testing.assert_array_equal(values, wanted)
    assert emitted == names


@pytest.mark.parametrize(
    ("power", "names"),
    [
        (0, ["affine"]),
        (1, ["affine"]),
        (2, ["square"]),
        (0.5, ["sqrt"]),
        (-0.5, ["rsqrt"]),
        (-1, ["reciprocal"]),
        (3, ["square", "mul"]),
        (-4, ["square", "square", "reciprocal"]),
        (2.5, ["affine", "pow"]),
        (65, ["affine", "pow"]),
    ],
)
def test_powers_use_the_cheapest_ops(power: float, names: list[str]) -> None:
    values, emitted = run(lambda x: ops.pow(x, power))
    np.testing.assert_allclose(values, X**power, rtol=1e-13)
    assert emitted == names


@pytest.mark.parametrize("fn", [operator.floordiv, operator.mod])
def test_integers_divide_by_floor(fn: Callable[[Any, Any], Any]) -> None:
    for divisor in (3, -2):
        np.testing.assert_array_equal(run(lambda n, d=divisor: fn(n, d), N)[0], fn(N, divisor))
    np.testing.assert_array_equal(run(lambda n: fn(11, n), N)[0], fn(11, N))


def test_where_of_two_numbers_is_f32() -> None:
    values, _ = run(lambda mask: ops.where(mask, 1, -2.5), MASK)
    assert values.tolist() == [1, -2.5, 1, -2.5]


@pytest.mark.parametrize(
    ("fn", "array", "message"),
    [
        (lambda x: ops.div(x, 0), X, "is divided by 0"),
        (lambda n: ops.div(n, 2), N, "has integer elements; divide with //"),
        (lambda n: ops.floordiv(n, 0), N, "floordiv: .* is divided by 0"),
        (lambda x: ops.pow(-2, x), X, "pow: the base -2.0 must be positive"),
        (lambda x: ops.add(x, float("nan")), X, "with NaN; use a number"),
        (lambda x: ops.where(1, x, x), X, "where: the condition is the number 1; it must be a boolean value"),
    ],
)
def test_numbers_without_a_result_are_refused(fn: Callable[[Value], Value], array: np.ndarray, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        run(fn, array)
