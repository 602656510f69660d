"""Recipes of linear algebra against numpy.linalg."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.recipes import matrices as mx
from weft.ir.recipes.combinators import Permute, Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.recipes.recipe import Recipe

RNG = np.random.default_rng(7)
A = RNG.standard_normal((6, 4)).astype(np.float32)
SQUARES = RNG.standard_normal((3, 4, 4))
READER = MemoryReader({"a": A, "squares": SQUARES, "ones": np.ones((3, 3)), "v": np.arange(4.0)})
a, squares = Source("a"), Source("squares")


def test_products_are_summed_in_float64_and_rounded_once() -> None:
    product = mx.MatMul(a, Permute(a, (1, 0)))
    exact = A.astype(np.float64) @ A.T.astype(np.float64)
    np.testing.assert_array_equal(product.evaluate(READER), exact.astype(np.float32))
    np.testing.assert_array_equal(mx.MatMul(a, Source("v")).read(READER, 2, 4), (A.astype(float) @ np.arange(4))[2:4])


def test_inverses_of_a_stack() -> None:
    inverses = mx.Inverse(squares)
    np.testing.assert_allclose(inverses.read(READER, 1, 3) @ SQUARES[1:], [np.eye(4)] * 2, atol=1e-12)
    with pytest.raises(WeftError, match=r"cannot invert ones .*: a matrix in it is singular"):
        mx.Inverse(Source("ones")).evaluate(READER)


@pytest.mark.parametrize("axis", [0, 1])
def test_centred_axes_sum_to_zero(axis: int) -> None:
    centred = mx.Centre(a, axis)
    np.testing.assert_allclose(centred.evaluate(READER).sum(axis), 0, atol=1e-14)
    np.testing.assert_allclose(np.diff(centred.evaluate(READER), axis=axis), np.diff(A, axis=axis), atol=1e-6)
    assert centred.needs_full_read == (axis == 0)


@pytest.mark.parametrize("axis", [0, 1])
def test_norms_along_an_axis(axis: int) -> None:
    np.testing.assert_allclose(mx.Norms(a, axis).evaluate(READER), np.linalg.norm(A, axis=1 - axis), rtol=1e-6)
    np.testing.assert_array_equal(mx.Norms(a, axis).read(READER, 1, 3), mx.Norms(a, axis).evaluate(READER)[1:3])


def test_row_norm_has_unit_variance() -> None:
    rows = mx.RowNorm(a, "layer", 0.0).evaluate(READER)
    np.testing.assert_allclose([rows.mean(1), rows.std(1)], [[0] * 6, [1] * 6], atol=1e-12)
    rms = mx.RowNorm(a, "rms", 0.0, weight=Source("v")).evaluate(READER)
    np.testing.assert_allclose(rms, A / np.sqrt((A.astype(float) ** 2).mean(1, keepdims=True)) * np.arange(4))


@pytest.mark.parametrize("size", [1, 6, 8])
def test_random_orthogonal_rows_are_orthonormal(size: int) -> None:
    q = mx.RandomOrthogonal(size, seed=3).evaluate(READER)
    np.testing.assert_allclose(q @ q.T, mx.Identity(size).evaluate(READER), atol=1e-14)
    np.testing.assert_array_equal(mx.Identity(size).read(READER, size - 1, size), np.eye(size)[-1:])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (mx.MatMul(a, a), r"cannot multiply a \[6, 4\] by a \[6, 4\]"),
        (mx.Centre(a, 2), r"cannot centre axis 2 of a \[6, 4\]"),
        (mx.RowNorm(a, "rms", 0.1, bias=a), r"the norm weight or bias a \[6, 4\] must be \[4\]"),
        (mx.Norms(a, 2), r"cannot take norms along axis 2 of a \[6, 4\]"),
        (mx.Inverse(a), r"cannot invert a \[6, 4\]: a matrix must be square"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(recipe: Recipe, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        recipe.shape(READER)
