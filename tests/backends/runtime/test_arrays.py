"""Conversion of logits to float32, bfloat16 bits included."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from weft.backends.runtime.arrays import convert_to_float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_values_are_converted_in_place(dtype: type, rng: np.random.Generator) -> None:
    values = (100 * rng.standard_normal((3, 4))).astype(dtype)
    out = np.empty((3, 4), np.float32)
    assert convert_to_float32(values, out) is out
    np.testing.assert_array_equal(out, values.astype(np.float32))


def test_uint16_is_read_as_bfloat16(rng: np.random.Generator) -> None:
    values = np.append(100 * rng.standard_normal(20), [0.0, -0.0, np.inf, -np.inf, np.nan]).astype(ml_dtypes.bfloat16)
    found = convert_to_float32(values.view(np.uint16), np.empty(values.shape, np.float32))
    np.testing.assert_array_equal(found, values.astype(np.float32))
    assert np.signbit(found[21])
