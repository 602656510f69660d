"""Groups of elements, and the codes nearest to them for given scales and zero points."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import (
    BlockLayout,
    Blocks,
    build_integer_layout,
    decode_scale_levels,
    encode_scale_levels,
    find_largest_scales,
)
from ..readers import Array


def split_groups(rows: Array, group: int) -> Array:
    """Return `rows` [..., width] as f32 [..., ⌈width / group⌉, group], the last group padded with zeros."""
    rows = rows.astype(np.float32, copy=False)
    if short := -rows.shape[-1] % group:
        rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], short), np.float32)], -1)
    return rows.reshape(*rows.shape[:-1], -1, group)


def scale_error(rows: Array, names: Iterable[str], unit: str) -> WeftError:
    """Return the error for `rows` of the tensors `names` with a scale that is not finite in the dtype `unit`."""
    largest = float(np.abs(rows).max())
    fault = f"exceeds the range of scales in {unit}, with {largest:g}" if np.isfinite(largest) else "is not finite"
    advice = " (the argument keep of quantize leaves it as it is)" if np.isfinite(largest) else ""
    return WeftError(f"a weight of {', '.join(names)} {fault}: it cannot be quantized{advice}")


def find_extremes(groups: Array) -> tuple[Array, Array]:
    """Return the least and the largest values f32 [...] of `groups` f32 [..., group]; group is a multiple of 4."""
    # numpy reduces several times as fast along an axis other than the short last one, and transposes three times as
    # fast if it moves four elements as one of 16 bytes; the four extremes per group are then transposed once more.
    fours = np.ascontiguousarray(groups.reshape(-1, groups.shape[-1]).view(np.complex128).T).view(np.float32)
    low, high = (np.ascontiguousarray(ends.reshape(-1, 4).T) for ends in (fours.min(0), fours.max(0)))
    return low.min(0).reshape(groups.shape[:-1]), high.max(0).reshape(groups.shape[:-1])


def fit_range(low: Array, high: Array, layout: BlockLayout) -> tuple[Array, Array | None]:
    """Return scales f32 and zero points u8 (None if the layout has none) for values from `low` to `high` (and 0)."""
    if layout.has_zeros:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = round_scales((high - low) / np.float32(2**layout.bits - 1), layout)
        with np.errstate(invalid="ignore"):  # the caller checks for NaN
            zeros = np.rint(-low * invert_scales(scales)).clip(0, 2**layout.bits - 1).astype(np.uint8)
        return scales, zeros
    return round_scales(np.where(high > -low, high, low) / np.float32(-layout.middle), layout), None


def round_scales(scales: Array, layout: BlockLayout) -> Array:
    """Return `scales` rounded to the scale dtype of the layout, as f32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(scales.astype(layout.scale.numpy).astype(np.float32))


def invert_scales(scales: Array) -> Array:
    """Return 1 / scales, but 0 where a scale is 0: its group has only zeros."""
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def round_to_centred_codes(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """Return code − zero point, f32, for the codes nearest to `groups` [..., group]; `scales` and `zeros` [...]. The
    zero point is the middle code if `zeros` is None."""
    centre = _get_centre(zeros, layout)
    codes = _round_to_float_codes(groups, scales, centre, layout)
    codes -= centre
    return codes


def round_to_codes(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """Return the codes nearest to `groups` [..., group], u8; `scales` and `zeros` as in `round_to_centred_codes`."""
    return _round_to_float_codes(groups, scales, _get_centre(zeros, layout), layout).astype(np.uint8)


def _get_centre(zeros: Array | None, layout: BlockLayout) -> Array | np.float32:
    return np.float32(layout.middle) if zeros is None else zeros.astype(np.float32)[..., None]


def _round_to_float_codes(groups: Array, scales: Array, centre: Array | np.float32, layout: BlockLayout) -> Array:
    codes: Array = groups * invert_scales(scales)[..., None]
    np.rint(codes, out=codes)
    codes += centre
    # Clipped last: numpy clips to scalars ten times as fast as to arrays, and inexact sums are far out of range.
    return np.clip(codes, np.float32(0), np.float32(2**layout.bits - 1), out=codes)


def quantize_with_offsets(values: Array, scales: Array, offsets: Array, layout: BlockLayout) -> Blocks:
    """Return `values` [..., groups, group] quantized to `layout`, which has `sums`. A group keeps its scale in
    `scales`, and the zero point that `offsets` [..., groups] implies; both are computed anew if the scale is ≤ 0 or no
    code is the zero point."""
    with np.errstate(divide="ignore", invalid="ignore"):
        points = np.rint(layout.middle - offsets / scales)
    inside = (scales > 0) & (points >= 0) & (points < 2**layout.bits)
    # Blocks whose codes cannot represent 0, or without a scale, get new scales from their values.
    integers = build_integer_layout(layout.bits, layout.group, True, dtypes.f32)
    fitted, zeros = fit_range(*find_extremes(values), integers)
    assert zeros is not None
    points = np.where(inside, points, zeros).astype(np.uint8)
    rest = np.where(inside, offsets + scales * (points.astype(np.float32) - layout.middle), 0)
    scales = np.where(inside, scales, fitted)
    largest = find_largest_scales(scales)
    scales = decode_scale_levels(encode_scale_levels(scales, largest), largest)
    codes = round_to_codes(values - rest[..., None], scales, points, integers)
    # Offsets compensate the mean error of rounding the scales.
    reached = scales[..., None] * (codes.astype(np.float32) - points[..., None])
    residual = split_groups((values - reached).mean(-1), layout.group)
    low, high = find_extremes(residual)
    steps, _ = fit_range(low, high, integers)
    steps = decode_scale_levels(encode_scale_levels(steps, largest), largest)
    residual_zeros = np.rint(-np.minimum(low, 0) * invert_scales(steps)).clip(0, 2**layout.bits - 1).astype(np.uint8)
    return Blocks(
        np.concatenate([codes, round_to_codes(residual, steps, residual_zeros, integers)], -2),
        np.concatenate([scales, steps], -1),
        None,
        np.concatenate([points, residual_zeros], -1),
    )
