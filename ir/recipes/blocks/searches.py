"""Searches for the scales and zero points of groups from their weights only, without calibration.

Each function of `SEARCHES` maps groups f32 [..., group] and a layout of integer codes to scales f32 [...], rounded to
the dtype of the layout, and zero points u8 [...] (None if the layout has none). The functions of `MINIMA` return
scales and offsets, f32 [...].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...types.block_layouts import BlockLayout
from ..readers import Array
from .spans import find_extremes, fit_range, invert_scales, round_scales, round_to_centred_codes

Scaling = tuple[Array, Array | None]

NORM, PENALTY, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20  # of half_quadratic, as its authors chose them
STEPS = np.linspace(-1, 1, 21, dtype=np.float32)  # added to the number of codes that the range of a group covers


def fit_by_range(groups: Array, layout: BlockLayout) -> Scaling:
    """Return scales and zero points that cover the values of each group (and 0), without a search."""
    return fit_range(*find_extremes(groups), layout)


def fit_by_squares(groups: Array, layout: BlockLayout) -> Scaling:
    """Return scales and zero points with small squared errors, weighted by √(mean square) + |value|, as GGML's
    k-quants.

    For each of 21 widths of the range of codes, values are rounded and the scale (and minimum, with zero points) is
    fitted to the codes in closed form. The fit with the least error is returned. The zero point is rounded to the
    nearest integer.
    """
    weights = np.sqrt(np.square(groups).mean(-1, keepdims=True)) + np.abs(groups)
    scales, zeros = fit_by_range(groups, layout)
    least = _sum_squared_errors(groups, weights, scales, zeros, layout)
    low, high = find_extremes(groups)
    for step in STEPS:
        fit = _refit(groups, weights, low, high, step, layout)
        error = _sum_squared_errors(groups, weights, *fit, layout)
        better = error < least
        least, scales = np.where(better, error, least), np.where(better, fit[0], scales)
        if zeros is not None and fit[1] is not None:
            zeros = np.where(better, fit[1], zeros)
    return scales, zeros


def _refit(groups: Array, weights: Array, low: Array, high: Array, step: np.float32, layout: BlockLayout) -> Scaling:
    """Return scales and zero points fitted to the codes that result if `low` to `high` covers `step` more codes."""
    top = np.float32(2**layout.bits - 1)
    if not layout.has_zeros:
        most = np.where(high > -low, high, low) / np.float32(-layout.middle)
        steps = most * np.float32(layout.middle) / (np.float32(layout.middle) + step)
        codes: Array = np.rint(groups * invert_scales(steps)[..., None])
        np.clip(codes, -layout.middle, layout.middle - 1, out=codes)
        weighted = (weights * codes * codes).sum(-1)
        return round_scales((weights * codes * groups).sum(-1) * invert_scales(weighted), layout), None
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    inverse = (top + step) * invert_scales(high - low)
    codes = np.clip(np.rint((groups - low[..., None]) * inverse[..., None]), 0, top)
    # The weighted regression of values on their codes: value ≈ scale · code + minimum.
    total, first, second = weights.sum(-1), (weights * codes).sum(-1), (weights * codes * codes).sum(-1)
    weighted, mixed = (weights * groups).sum(-1), (weights * groups * codes).sum(-1)
    spread = invert_scales(total * second - first * first)
    scale = round_scales(np.maximum(0, (total * mixed - first * weighted) * spread), layout)
    minimum = np.minimum(0, (weighted - scale * first) * invert_scales(total))
    with np.errstate(invalid="ignore"):  # the caller checks for NaN
        return scale, np.rint(-minimum * invert_scales(scale)).clip(0, top).astype(np.uint8)


def fit_half_quadratic(groups: Array, layout: BlockLayout) -> tuple[Array, Array]:
    """Return scales that cover the range of each group, and offsets with a small p-norm of its errors, p = 0.7: large
    errors count less than in squares, so that outliers have little influence on other values.

    This is HQQ (Badri and Shaji 2023, mobiusml.github.io/hqq_blog). In units of the scale, a rounding error e is split
    into an outlier r and a rest, which alone is minimized. Two updates alternate: r = sign(e) · max(0, |e| − |e|^{p−1}
    / β), and the real zero point z becomes the mean of code − value + r. β grows. The z with the least error of all
    rounds is used. (The authors measure errors in the unit of the weights, so that β has a different effect on small
    weights than on large ones.)
    """
    low, high = find_extremes(groups)
    top = np.float32(2**layout.bits - 1)
    scales = (high - low) / top
    scaled = groups * invert_scales(scales)[..., None]
    zeros = -low * invert_scales(scales)
    least, best, penalty = np.full_like(zeros, np.inf), zeros, np.float32(PENALTY)
    for _ in range(ROUNDS):
        codes = np.clip(np.rint(scaled + zeros[..., None]), 0, top)
        codes -= scaled
        errors = zeros[..., None] - codes  # value − (code − zero point)
        sizes = np.abs(errors)
        loss = (sizes**NORM).mean(-1)
        least, best = np.where(loss < least, loss, least), np.where(loss < least, zeros, best)
        with np.errstate(divide="ignore"):
            sizes -= sizes ** np.float32(NORM - 1) / penalty
        np.maximum(sizes, 0, out=sizes)
        codes += np.copysign(sizes, errors)
        zeros, penalty = codes.mean(-1), penalty * np.float32(GROWTH)
    return scales, np.where(scales > 0, (layout.middle - best) * scales, low)


def _sum_squared_errors(
    groups: Array, weights: Array, scales: Array, zeros: Array | None, layout: BlockLayout
) -> Array:
    codes = round_to_centred_codes(groups, scales, zeros, layout)
    codes *= scales[..., None]
    codes -= groups
    return np.asarray((weights * np.square(codes, out=codes)).sum(-1))


SEARCHES: dict[str, Callable[[Array, BlockLayout], Scaling]] = {"": fit_by_range, "kquant": fit_by_squares}
MINIMA: dict[str, Callable[[Array, BlockLayout], tuple[Array, Array]]] = {"hqq": fit_half_quadratic}
