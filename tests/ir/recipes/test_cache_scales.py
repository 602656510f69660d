"""Scales of quantized KV caches."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.recipes.cache_scales import FittedScales, HeadScales
from weft.ir.recipes.combinators import Source
from weft.ir.recipes.readers import MemoryReader

READER = MemoryReader(
    {
        "w": np.array([[3, 4], [0, 0], [1, 0], [0, 1], [0, 0], [0, 0]], np.float32),
        "gain": np.array([2, 0.5], np.float32),
        "bias": np.array([0, 0, 2, 0, 0, 6], np.float32),
    }
)


def test_head_scales_are_root_mean_squares_per_head() -> None:
    plain = HeadScales(Source("w"), heads=3, width=2)
    np.testing.assert_allclose(plain.evaluate(READER), np.sqrt([25 / 2, 2 / 2, 1]))  # a head of zeros has scale 1
    full = HeadScales(Source("w"), 3, 2, (Source("gain"),), (Source("bias"),))
    squares = [(6**2 + 2**2 + 0) / 2, (2**2 + 0.5**2 + 2**2) / 2, 6**2 / 2]
    np.testing.assert_allclose(full.evaluate(READER), np.sqrt(squares), rtol=1e-6)
    np.testing.assert_array_equal(full.read(READER, 1, 3), full.evaluate(READER)[1:])


def test_rows_of_one_head_serve_all() -> None:
    scales = HeadScales(Source("w"), heads=4, width=6).evaluate(READER)
    np.testing.assert_allclose(scales, np.full(4, np.sqrt(27 / 6)), rtol=1e-6)
    assert scales.dtype == np.float32


def test_rows_that_do_not_fit_the_heads_are_refused() -> None:
    with pytest.raises(WeftError, match="w has 6 rows, but must have 2 or 4, for 2 heads of 2"):
        HeadScales(Source("w"), 2, 2).shape(READER)


def test_scales_are_never_trained() -> None:
    fitted = FittedScales(Source("gain"))
    assert fitted.is_constant and HeadScales(Source("w"), 3, 2).is_constant and not Source("gain").is_constant
    np.testing.assert_array_equal(fitted.evaluate(READER), READER.arrays["gain"])
