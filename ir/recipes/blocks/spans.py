"""Groups of numbers, and the codes nearest to them with given scales and zero points."""

from __future__ import annotations

import numpy as np

from ...types.block_layouts import BlockLayout
from ..readers import Array


def grouped(rows: Array, group: int) -> Array:
    """`rows` [..., width] as [..., groups, group], the last group filled up with zeros."""
    rows = rows.astype(np.float32, copy=False)
    if short := -rows.shape[-1] % group:
        rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], short), np.float32)], -1)
    return rows.reshape(*rows.shape[:-1], -1, group)


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
