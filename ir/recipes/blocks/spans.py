"""Groups of numbers, and the codes nearest to them with given scales and zero points."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import BlockLayout, Blocks, integer_layout, largest_scales, level_scales, scale_levels
from ..readers import Array


def grouped(rows: Array, group: int) -> Array:
    """`rows` [..., width] as [..., groups, group], the last group filled up with zeros."""
    rows = rows.astype(np.float32, copy=False)
    if short := -rows.shape[-1] % group:
        rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], short), np.float32)], -1)
    return rows.reshape(*rows.shape[:-1], -1, group)


def unscaled(rows: Array, names: Iterable[str], unit: str) -> WeftError:
    """Return the error for `rows` of the tensors `names` that get no finite scales in the dtype `unit`."""
    largest = float(np.abs(rows).max())
    fault = f"exceeds what scales in {unit} reach, with {largest:g}" if np.isfinite(largest) else "is not finite"
    advice = " (the argument keep of quantize leaves it as it is)" if np.isfinite(largest) else ""
    return WeftError(f"a weight of {', '.join(names)} {fault}: it cannot be quantized{advice}")


def extremes(groups: Array) -> tuple[Array, Array]:
    """The least and the largest number of each group, of `groups` f32 [..., group]; a group is a multiple of 4."""
    # numpy is several times as fast along an axis that is not the short last one, and transposes numbers three times as
    # fast if it takes four of them for one of 16 bytes; what is left of a group is transposed once more.
    fours = np.ascontiguousarray(groups.reshape(-1, groups.shape[-1]).view(np.complex128).T).view(np.float32)
    low, high = (np.ascontiguousarray(ends.reshape(-1, 4).T) for ends in (fours.min(0), fours.max(0)))
    return low.min(0).reshape(groups.shape[:-1]), high.max(0).reshape(groups.shape[:-1])


def spanned(low: Array, high: Array, layout: BlockLayout) -> tuple[Array, Array | None]:
    """Scales f32, and zero points u8 if the layout has any, of groups whose numbers are between `low` and `high`."""
    if layout.has_zeros:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = rounded_scales((high - low) / np.float32(2**layout.bits - 1), layout)
        with np.errstate(invalid="ignore"):  # NaN is found by the caller
            zeros = np.rint(-low * reciprocal(scales)).clip(0, 2**layout.bits - 1).astype(np.uint8)
        return scales, zeros
    return rounded_scales(np.where(high > -low, high, low) / np.float32(-layout.middle), layout), None


def rounded_scales(scales: Array, layout: BlockLayout) -> Array:
    """Scales as the layout stores them, in f32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(scales.astype(layout.scale.numpy).astype(np.float32))


def reciprocal(scales: Array) -> Array:
    """1 / scales, and 0 for scales of 0: their groups are zeros."""
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def offset_codes(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """The codes nearest to `groups` [..., group] with these scales and zero points [...], less the zero points: f32."""
    centre = _centre(zeros, layout)
    codes = _float_codes(groups, scales, centre, layout)
    codes -= centre
    return codes


def nearest(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """The codes u8 nearest to `groups` [..., group] with these scales and zero points [...]."""
    return _float_codes(groups, scales, _centre(zeros, layout), layout).astype(np.uint8)


def _centre(zeros: Array | None, layout: BlockLayout) -> Array | np.float32:
    return np.float32(layout.middle) if zeros is None else zeros.astype(np.float32)[..., None]


def _float_codes(groups: Array, scales: Array, centre: Array | np.float32, layout: BlockLayout) -> Array:
    codes: Array = groups * reciprocal(scales)[..., None]
    np.rint(codes, out=codes)
    codes += centre
    # Clipped last: numpy clips to numbers ten times as fast as to arrays, and a sum that is not exact is far outside.
    return np.clip(codes, np.float32(0), np.float32(2**layout.bits - 1), out=codes)


def with_sums(numbers: Array, scales: Array, offsets: Array, layout: BlockLayout) -> Blocks:
    """`numbers` [..., groups, group] in `layout`, whose offsets are codes, with scales and offsets [..., groups] near
    to those given."""
    with np.errstate(divide="ignore", invalid="ignore"):
        points = np.rint(layout.middle - offsets / scales)
    inside = (scales > 0) & (points >= 0) & (points < 2**layout.bits)
    # Blocks that have 0 outside of what their codes reach, or no scale, are rounded anew.
    integers = integer_layout(layout.bits, layout.group, True, dtypes.f32)
    anew, zeros = spanned(*extremes(numbers), integers)
    assert zeros is not None
    points = np.where(inside, points, zeros).astype(np.uint8)
    rest = np.where(inside, offsets + scales * (points.astype(np.float32) - layout.middle), 0)
    scales = np.where(inside, scales, anew)
    largest = largest_scales(scales)
    scales = level_scales(scale_levels(scales, largest), largest)
    codes = nearest(numbers - rest[..., None], scales, points, integers)
    # What the rounding of a scale leaves off, the offset makes up for on average.
    reached = scales[..., None] * (codes.astype(np.float32) - points[..., None])
    behind = grouped((numbers - reached).mean(-1), layout.group)
    low, high = extremes(behind)
    steps, _ = spanned(low, high, integers)
    steps = level_scales(scale_levels(steps, largest), largest)
    more = np.rint(-np.minimum(low, 0) * reciprocal(steps)).clip(0, 2**layout.bits - 1).astype(np.uint8)
    return Blocks(
        np.concatenate([codes, nearest(behind, steps, more, integers)], -2),
        np.concatenate([scales, steps], -1),
        None,
        np.concatenate([points, more], -1),
    )
