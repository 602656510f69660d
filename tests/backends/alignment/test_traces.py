"""Traces: layouts in which arrays correspond, errors, dependencies."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.backends.alignment.traces import Operation, ValueTrace, arrange, compute_error, is_distinctive


def operation(makes: str, *reads: str) -> Operation:
    return Operation("op", makes, reads, (makes,), {}, lambda operands, attrs: [])


@pytest.mark.parametrize("shape", [(1, 4, 6, 8), (6, 1, 4, 8), (24, 8), (1, 6, 32)])
def test_permuted_and_merged_axes_are_arranged(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(1, 6, 4, 8))
    moved = x.transpose(0, 2, 1, 3) if shape == (1, 4, 6, 8) else x.reshape(shape)
    for a, b in ((x, moved), (moved, x)):
        pair = arrange(a, b)
        assert pair is not None and np.array_equal(*pair)


def test_the_order_of_features_is_not_taken_for_a_layout() -> None:
    """Interleaved halves of heads are not another layout of [tokens, features], although a permutation gives them."""
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 8))
    interleaved = x.reshape(6, 2, 2, 4).swapaxes(2, 3).reshape(1, 6, 16)
    pair = arrange(x, interleaved + 0.1)
    assert pair is not None and np.array_equal(pair[0], x.reshape(1, 6, 16))


def test_last_rows_and_first_features_are_compared() -> None:
    x = np.arange(24.0).reshape(1, 4, 6)
    for a, b, want in ((x, x[:, -1:], x[0, -1:]), (x, x[:, -2:], x[0, -2:]), (x[..., :5], x, x[0, :, :5])):
        pair = arrange(a, b)
        assert pair is not None and np.array_equal(pair[0], want) and np.array_equal(pair[1], want)
    assert arrange(x, np.arange(15.0).reshape(3, 5)) is None


def test_errors_of_all_elements_and_of_rows() -> None:
    want, got = np.array([[100.0, 0.0], [1.0, 0.0]]), np.array([[100.0, 0.0], [1.0, 0.5]])
    assert compute_error(got, want) == 0.005
    assert compute_error(got, want, by_row=True) == 0.5
    assert compute_error(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0])) == 0
    assert math.isnan(compute_error(np.array([np.nan]), np.array([1.0])))


def test_distinctive_contents() -> None:
    x = np.arange(9.0)
    assert is_distinctive(x)
    assert not any(map(is_distinctive, (x[:4], np.ones(9), np.arange(9), np.append(x, np.inf))))


def test_ancestors_stop_at_given_values_and_constants_load_once() -> None:
    loads: list[int] = []
    constants = {"w": ((2,), lambda: loads.append(1) or np.ones(2))}
    values = {name: np.ones(2) for name in "abcd"}
    trace = ValueTrace([operation("b", "a", "w"), operation("c", "b"), operation("d", "c", "a")], values, constants)
    assert trace.find_ancestors(["d"]) == {"a", "b", "c", "d"}
    assert trace.find_ancestors(["d"], {"c"}) == {"a", "c", "d"}
    assert trace.makers["c"].reads == ("b",)
    assert trace.load("w") is trace.load("w") and loads == [1]
    assert trace.load("nothing") is None
