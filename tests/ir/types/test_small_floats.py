"""Floats of 4 bits and their scales, with the values of the OCP Microscaling and NVFP4 formats."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.types.small_floats import (
    E2M1,
    decode_scales,
    encode_scales,
    fit_e4m3_scales,
    fit_power_scales,
    round_to_e2m1,
)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_e2m1_codes_are_the_nearest_with_ties_to_even() -> None:
    values = f32(0, 0.2, 0.25, 0.75, 1.25, 2.5, 3.5, 5, 5.1, 100, -0.6, -6, -np.inf)
    assert round_to_e2m1(values).tolist() == [0, 0, 0, 2, 2, 4, 6, 6, 7, 7, 9, 15, 15]
    np.testing.assert_array_equal(round_to_e2m1(E2M1)[1:8], np.arange(1, 8))


def test_power_scales_put_the_largest_into_the_range_of_e2m1() -> None:
    assert fit_power_scales(f32(4, 6, 7.9, 8, 1)).tolist() == [1, 1, 1, 2, 0.25]
    assert fit_power_scales(f32(0))[0] == np.float32(2.0**-127)


def test_e4m3_scales_stay_in_their_range() -> None:
    assert fit_e4m3_scales(f32(6, 12, 0), np.float32(1)).tolist() == [1, 2, 0]
    assert fit_e4m3_scales(f32(1e9, 1e-9), np.float32(1)).tolist() == [448, 2.0**-9]
    assert fit_e4m3_scales(f32(12), np.float32(4)).tolist() == [0.5]


@pytest.mark.parametrize("tensor_scale", [None, 0.5])
def test_scales_of_e4m3_are_decoded_again(tensor_scale: float | None) -> None:
    factor = None if tensor_scale is None else np.float32(tensor_scale)
    scales = f32(0, 1, 0.5, 224)
    raw = encode_scales(scales, powers=False, tensor_scale=factor)
    assert raw.dtype == np.uint8 and (raw[1] == 0x38) == (factor is None)  # 1 has the exponent 7
    np.testing.assert_array_equal(decode_scales(raw, powers=False, tensor_scale=factor), scales)


def test_scales_of_e8m0_are_biased_exponents() -> None:
    raw = encode_scales(f32(1, 2, 0.25), powers=True)
    assert raw.tolist() == [127, 128, 125]
    assert decode_scales(raw, powers=True).tolist() == [1, 2, 0.25]
    assert np.isnan(decode_scales(np.array([255], np.uint8), powers=True)).all()
