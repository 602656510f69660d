"""Searches for the scales and zero points of groups by their weights alone, without a text.

Each takes groups f32 [..., group] and a layout of integer codes, and returns scales f32 [...], already rounded to the
layout's dtype, and zero points u8 [...] if the layout has any; those in `MINIMA` return scales and offsets, both f32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...types.block_layouts import BlockLayout
from ..readers import Array
from .spans import extremes, offset_codes, reciprocal, rounded_scales, spanned

Found = tuple[Array, Array | None]

NORM, PENALTY, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20  # of half_quadratic: its authors' numbers
STEPS = np.linspace(-1, 1, 21, dtype=np.float32)  # added to the number of codes that the range of a group covers


def by_range(groups: Array, layout: BlockLayout) -> Found:
    """Cover each group from its least to its greatest number: no search."""
    return spanned(*extremes(groups), layout)


def by_squares(groups: Array, layout: BlockLayout) -> Found:
    """Minimize the squared errors of a group, weighed by √(mean square) + |number|, as the k-quants of GGML do.

    For each of 21 ranges of codes the numbers are rounded, the scale (and minimum) is fitted to the codes in closed
    form, and the best is kept; the zero point is the nearest integer to what the fit asks for.
    """
    weights = np.sqrt(np.square(groups).mean(-1, keepdims=True)) + np.abs(groups)
    scales, zeros = by_range(groups, layout)
    least = _error(groups, weights, scales, zeros, layout)
    low, high = extremes(groups)
    for step in STEPS:
        found = _refit(groups, weights, low, high, step, layout)
        error = _error(groups, weights, *found, layout)
        better = error < least
        least, scales = np.where(better, error, least), np.where(better, found[0], scales)
        if zeros is not None and found[1] is not None:
            zeros = np.where(better, found[1], zeros)
    return scales, zeros


def _refit(groups: Array, weights: Array, low: Array, high: Array, step: np.float32, layout: BlockLayout) -> Found:
    """Scales and zero points fitted to the codes that the range of a group, less or more by `step` codes, gives."""
    top = np.float32(2**layout.bits - 1)
    if not layout.has_zeros:
        most = np.where(high > -low, high, low) / np.float32(-layout.middle)
        codes = _signed(groups, most * np.float32(layout.middle) / (np.float32(layout.middle) + step), layout)
        own = (weights * codes * codes).sum(-1)
        return rounded_scales((weights * codes * groups).sum(-1) * reciprocal(own), layout), None
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    inverse = (top + step) * reciprocal(high - low)
    codes = np.clip(np.rint((groups - low[..., None]) * inverse[..., None]), 0, top)
    # The weighted regression of the numbers on their codes: number ≈ scale · code + minimum.
    total, first, second = weights.sum(-1), (weights * codes).sum(-1), (weights * codes * codes).sum(-1)
    own, mixed = (weights * groups).sum(-1), (weights * groups * codes).sum(-1)
    spread = reciprocal(total * second - first * first)
    scale = rounded_scales(np.maximum(0, (total * mixed - first * own) * spread), layout)
    minimum = np.minimum(0, (own - scale * first) * reciprocal(total))
    with np.errstate(invalid="ignore"):  # NaN is found by the caller
        return scale, np.rint(-minimum * reciprocal(scale)).clip(0, top).astype(np.uint8)


def half_quadratic(groups: Array, layout: BlockLayout) -> tuple[Array, Array]:
    """Scales over the range of each group, and offsets for which the p-norm of its errors is least, p = 0.7: large
    errors count for less than in squares, so that outliers do not pull at the others.

    That is HQQ (Badri and Shaji 2023, mobiusml.github.io/hqq_blog). In steps of the scale, the errors e of rounding to
    codes are split into r, the part that is forgiven, and the rest; in turn r = sign(e) · max(0, |e| − |e|^{p−1} / β),
    and the zero point z, a real number, becomes the mean of code − number + r. β grows. The best z of all rounds stays.
    (Its authors measure errors in the weights' own unit, so that β has another effect on small weights than on large.)
    """
    low, high = extremes(groups)
    top = np.float32(2**layout.bits - 1)
    scales = (high - low) / top
    numbers = groups * reciprocal(scales)[..., None]
    zeros = -low * reciprocal(scales)
    least, best, penalty = np.full_like(zeros, np.inf), zeros, np.float32(PENALTY)
    for _ in range(ROUNDS):
        codes = np.clip(np.rint(numbers + zeros[..., None]), 0, top)
        codes -= numbers
        errors = zeros[..., None] - codes  # number − (code − zero point)
        sizes = np.abs(errors)
        lost = (sizes**NORM).mean(-1)
        least, best = np.where(lost < least, lost, least), np.where(lost < least, zeros, best)
        with np.errstate(divide="ignore"):
            sizes -= sizes ** np.float32(NORM - 1) / penalty
        np.maximum(sizes, 0, out=sizes)
        codes += np.copysign(sizes, errors)
        zeros, penalty = codes.mean(-1), penalty * np.float32(GROWTH)
    return scales, np.where(scales > 0, (layout.middle - best) * scales, low)


def _signed(groups: Array, scales: Array, layout: BlockLayout) -> Array:
    codes: Array = np.rint(groups * reciprocal(scales)[..., None])
    return np.clip(codes, -layout.middle, layout.middle - 1, out=codes)


def _error(groups: Array, weights: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    codes = offset_codes(groups, scales, zeros, layout)
    codes *= scales[..., None]
    codes -= groups
    error: Array = (weights * np.square(codes, out=codes)).sum(-1)
    return error


SEARCHES: dict[str, Callable[[Array, BlockLayout], Found]] = {"": by_range, "kquant": by_squares}
MINIMA: dict[str, Callable[[Array, BlockLayout], tuple[Array, Array]]] = {"hqq": half_quadratic}
