"""Groups of elements and the codes nearest to them."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.recipes.blocks.spans import (
    find_extremes,
    fit_range,
    invert_scales,
    quantize_with_offsets,
    round_scales,
    round_to_centred_codes,
    round_to_codes,
    scale_error,
    split_groups,
)
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import build_integer_layout, build_offset_layout

ZEROS, SIGNED = (build_integer_layout(4, 4, zeros, dtypes.f32) for zeros in (True, False))


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_last_group_is_padded_with_zeros() -> None:
    rows = np.arange(12, dtype=np.float64).reshape(2, 6)
    groups = split_groups(rows, 4)
    assert groups.shape == (2, 2, 4) and groups.dtype == np.float32
    assert groups[1].tolist() == [[6, 7, 8, 9], [10, 11, 0, 0]]
    assert split_groups(rows[:, :4], 4).shape == (2, 1, 4)


def test_extremes_are_those_of_each_group(rng: np.random.Generator) -> None:
    groups = rng.standard_normal((3, 5, 8)).astype(np.float32)
    low, high = find_extremes(groups)
    np.testing.assert_array_equal(low, groups.min(-1))
    np.testing.assert_array_equal(high, groups.max(-1))


def test_ranges_include_zero() -> None:
    scales, zeros = fit_range(f32(3, -15, -5), f32(15, -3, 10), ZEROS)
    assert zeros is not None
    assert (scales.tolist(), zeros.tolist()) == ([1, 1, 1], [0, 15, 5])
    scales, zeros = fit_range(f32(-8, -1), f32(2, 16), SIGNED)
    assert zeros is None and scales.tolist() == [1, -2]  # the larger magnitude becomes code −8


def test_codes_are_nearest_and_clipped() -> None:
    groups, zeros = f32(-9, -1.4, 1.6, 40)[None], np.array([3], np.uint8)
    assert round_to_codes(groups, f32(2), zeros, ZEROS).tolist() == [[0, 2, 4, 15]]
    assert round_to_centred_codes(groups, f32(2), zeros, ZEROS).tolist() == [[-3, -1, 1, 12]]
    assert round_to_codes(groups, f32(2), None, SIGNED).tolist() == [[4, 7, 9, 15]]
    assert round_to_codes(groups, f32(0), None, SIGNED).tolist() == [[8] * 4]


def test_scales_are_inverted_and_rounded() -> None:
    assert invert_scales(f32(0, 4)).tolist() == [0, 0.25]
    half = build_integer_layout(4, 4, True, dtypes.f16)
    assert round_scales(f32(1 + 2.0**-12, 1e6), half).tolist() == [1, np.inf]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e6, "a weight of w exceeds the range of scales in f16, with 1e+06: it cannot be quantized (the argument"),
        (np.inf, "a weight of w is not finite: it cannot be quantized"),
    ],
)
def test_scale_errors_name_the_largest_weight(value: float, message: str) -> None:
    assert str(scale_error(f32(0, -value), ["w"], "f16")).startswith(message)


def test_quantization_with_offsets_stays_within_a_step(rng: np.random.Generator) -> None:
    layout = build_offset_layout(4, 32)
    values = rng.standard_normal((2, 4, 32)).astype(np.float32)
    low, high = find_extremes(values)
    scales = (high - low) / np.float32(15)
    blocks = quantize_with_offsets(values, scales, low + 8 * scales, layout)
    assert blocks.codes.shape == (2, 5, 32)  # four groups, and one of offsets
    error = np.abs(layout.dequantize(blocks)[..., :128].reshape(values.shape) - values)
    assert (error <= scales[..., None] + scales.max() / 100).all()
    assert error.mean() < 0.3 * scales.mean()
