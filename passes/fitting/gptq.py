"""Rounding a matrix to blocks so that what it makes of a text changes least: the linear algebra, without a graph.

GPTQ (Frantar 2022, arXiv 2210.17323) in the form of LDLQ (Chee 2023, arXiv 2307.13304), which is the same algorithm.
With the second moment H = E[x xᵀ] of the activations, factored as H = (U + I) D (U + I)ᵀ with U strictly upper
triangular,

    E[|W x − Ŵ x|²] = Σ_k D_k |ŵ_k − w_k − Σ_{j<k} (w_j − ŵ_j) U_jk|²,

so column k is rounded after the errors of the columns before it, weighed by U, are added to it; D_k is what remains of
the variance of input k once all later ones are known. Rows of W do not depend on each other. Groups of columns come in
the order of their largest inputs, and so do the columns of a group: what matters most is rounded while there are others
to make up for it.

What x is has changed already, where weights before this one are rounded. `correction` moves W some way towards the
matrix that makes of the changed x what W makes of the original one (GPTAQ, Li 2025, arXiv 2504.02692, goes all the way,
which fits few tokens too closely).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.ir.recipes.blocks.spans import reciprocal, spanned
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import BlockLayout, Blocks

RIDGE = 0.01  # added to the moment, relative to its mean: directions that the text hardly has keep a weight
SHRINK = tuple(1 - 0.03 * i for i in range(12))  # of the range of a group, tried for its scale
AIM = 0.25  # of the way to outputs of the original model, which corrects the layers before and overfits beyond
COLUMNS = 512  # of a moment that are factored at once
WIDE = 4096  # inputs from which on moments are factored in f32, to save memory


@dataclass(frozen=True)
class Feedback:
    """The factors of a moment whose inputs are in another `order` [in]: `unit` is U f32 [in, in], `left` D f32 [in],
    `diagonal` that of H, all regularized."""

    order: Array
    unit: Array
    left: Array
    diagonal: Array


def feedback(moment: Array, group: int, ridge: float = RIDGE) -> Feedback:
    """Factor `moment` [in, in], with the inputs filled up to a multiple of `group` by some that are always 0."""
    width = len(moment)
    count = width + -width % group
    mean = float(np.trace(moment)) / width or 1.0
    full = np.pad(moment, (0, count - width)) if count > width else moment
    order = _by_size(full.diagonal(), group)
    full = full[np.ix_(order, order)].astype(np.float32 if count > WIDE else np.float64, copy=False)
    full[np.diag_indices(count)] += ridge * mean
    diagonal = full.diagonal().astype(np.float32)
    factor(full)
    scale: Array = np.ascontiguousarray(full.diagonal())
    full /= scale
    full[np.diag_indices(count)] = 0
    return Feedback(order, full.astype(np.float32, copy=False), np.square(scale).astype(np.float32), diagonal)


def factor(moment: Array) -> None:
    """Replace the positive definite `moment` [n, n] by R, upper triangular, with R Rᵀ = `moment`."""
    for last in range(len(moment), 0, -COLUMNS):
        first = max(0, last - COLUMNS)
        # The Cholesky factor of a block with its axes reversed, reversed again.
        corner: Array = np.linalg.cholesky(moment[first:last, first:last][::-1, ::-1])[::-1, ::-1]
        moment[first:last, first:last] = corner
        moment[first:last, :first] = 0
        above = moment[:first, first:last]
        above[...] = np.linalg.solve(corner, above.T).T
        for start in range(0, first, COLUMNS):
            stop = min(first, start + COLUMNS)
            moment[:stop, start:stop] -= above[:stop] @ above[start:stop].T


def _by_size(sizes: Array, group: int) -> Array:
    """The order of inputs: groups by their largest, and within a group the largest first."""
    by_group = sizes.reshape(-1, group)
    groups = np.argsort(-by_group.max(1), kind="stable")
    inside = np.argsort(-by_group, 1, kind="stable")
    order: Array = (groups[:, None] * group + inside[groups]).reshape(-1)
    return order


def correction(moment: Array, crossed: Array, ridge: float = RIDGE) -> Array:
    """The matrix [in, in] that moves a weight, from its right, by `AIM` of the way towards the least-squares fit of
    what it makes of the original inputs x₀ on the changed inputs x: `moment` is Σ x xᵀ, `crossed` Σ x₀ xᵀ."""
    mean = float(np.trace(moment)) / len(moment) or 1.0
    unit = np.eye(len(moment), dtype=np.float32)
    away = np.linalg.solve(moment + np.float32(ridge * mean) * unit, (crossed - moment).T).T
    moved: Array = unit + np.float32(AIM) * away
    return moved


def gptq(weight: Array, factors: Feedback, layout: BlockLayout) -> Blocks:
    """Some rows of a `weight`, f32 [out, in], as blocks of `layout`."""
    rows, group = len(weight), layout.group
    turned = np.zeros((len(factors.unit), rows), np.float32)  # columns of the weight are contiguous
    turned[: weight.shape[1]] = weight.T
    turned = turned[factors.order]
    groups = len(turned) // group
    errors = np.zeros_like(turned)
    codes = np.empty((len(turned), rows), np.uint8)
    scales = np.empty((groups, rows), np.float32)
    zeros = np.empty((groups, rows), np.uint8) if layout.has_zeros else None
    unit, top = factors.unit, np.float32(2**layout.bits - 1)
    for g in range(groups):
        first, last = g * group, (g + 1) * group
        base: Array = turned[first:last]
        if first:
            base = base + unit[:first, first:last].T @ errors[:first]
        scale, points = searched(base, factors.diagonal[first:last], layout)
        scales[factors.order[first] // group] = scale
        if zeros is not None and points is not None:
            zeros[factors.order[first] // group] = points
        inverse = reciprocal(scale)
        centre = np.float32(layout.middle) if points is None else points.astype(np.float32)
        for k in range(group):
            at = first + k
            wanted = base[k] if not k else base[k] + unit[first:at, at] @ errors[first:at]
            steps = np.clip(np.rint(wanted * inverse) + centre, 0, top)
            codes[factors.order[at]] = steps
            errors[at] = turned[at] - (steps - centre) * scale
    points = None if zeros is None else np.ascontiguousarray(zeros.T)
    by_row = np.ascontiguousarray(codes.T).reshape(rows, groups, group)
    return Blocks(by_row, np.ascontiguousarray(scales.T), None, points)


def searched(groups: Array, weights: Array, layout: BlockLayout) -> tuple[Array, Array | None]:
    """Scales and zero points [out] of one group [group, out] whose squared rounding errors, times `weights` [group],
    are least among the ranges of `SHRINK`."""
    low, high = groups.min(0), groups.max(0)
    scales, zeros = spanned(low, high, layout)
    least = weights @ _squared_errors(groups, scales, zeros, layout)
    for share in SHRINK[1:]:
        narrower, points = spanned(low * np.float32(share), high * np.float32(share), layout)
        found = weights @ _squared_errors(groups, narrower, points, layout)
        better = found < least
        least, scales = np.where(better, found, least), np.where(better, narrower, scales)
        if zeros is not None and points is not None:
            zeros = np.where(better, points, zeros)
    return scales, zeros


def _squared_errors(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """The squared distances of `groups` [group, out] to what their nearest codes stand for."""
    centre = np.float32(layout.middle) if zeros is None else zeros.astype(np.float32)
    errors: Array = groups * reciprocal(scales)
    np.rint(errors, out=errors)
    np.clip(errors, -centre, np.float32(2**layout.bits - 1) - centre, out=errors)
    errors *= scales
    errors -= groups
    np.square(errors, out=errors)
    return errors
