"""GPTQ on arrays: round a matrix to blocks with a small error of its products on calibration sequences.

GPTQ (Frantar 2022, arXiv 2210.17323) in the form of LDLQ (Chee 2023, arXiv 2307.13304), which is the same algorithm.
With the second moment H = E[x xᵀ] of the activations, factored as H = (U + I) D (U + I)ᵀ with U strictly upper
triangular,

    E[|W x − Ŵ x|²] = Σ_k D_k |ŵ_k − w_k − Σ_{j<k} (w_j − ŵ_j) U_jk|²,

so column k is rounded after the errors of the columns before it, weighted by U, are added to it; D_k is the variance of
input k that the later inputs do not explain. Rows of W are independent. Groups of columns are ordered by their largest
input variance, and so are the columns of a group: the most important columns are rounded first, while later columns can
still compensate for their errors.

If earlier weights are rounded, x has changed already. `compute_correction` returns the matrix that moves W part of the
way to the matrix whose products with the changed x are nearest to those of W with the original x. (GPTAQ, Li 2025,
arXiv 2504.02692, moves it all the way, which overfits a small number of tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.ir.recipes.blocks.spans import fit_range, invert_scales
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import BlockLayout, Blocks

RIDGE = 0.01  # added to the diagonal of moments, relative to its mean: directions that are rare keep a weight
SHRINK = tuple(1 - 0.03 * i for i in range(12))  # factors of the range of a group that are tried for its scale
CORRECTION = 0.25  # share of the way to the original outputs: corrects errors of earlier layers; more overfits
COLUMNS = 512  # columns of a moment that are factored at once
F32_INPUTS = 4096  # moments of more inputs are factored in f32, to save memory


@dataclass(frozen=True)
class MomentFactors:
    """The factors of a regularized moment H = (U + I) D (U + I)ᵀ; input i of H is input order[i] of the weight.

    `unit` is U f32 [in, in], `left` is the diagonal of D f32 [in], `diagonal` f32 [in] is the diagonal of H.
    """

    order: Array
    unit: Array
    left: Array
    diagonal: Array


def factor_moment(moment: Array, group: int, ridge: float = RIDGE) -> MomentFactors:
    """Return the factors of `moment` [n, n], padded with zeros to a multiple of `group` inputs.

    Groups and their inputs are in descending order of the diagonal, to which `ridge` times its mean is added.
    """
    width = len(moment)
    count = width + -width % group
    mean = float(np.trace(moment)) / width or 1.0
    full = np.pad(moment, (0, count - width)) if count > width else moment
    order = _order_by_size(full.diagonal(), group)
    full = full[np.ix_(order, order)].astype(np.float32 if count > F32_INPUTS else np.float64, copy=False)
    full[np.diag_indices(count)] += ridge * mean
    diagonal = full.diagonal().astype(np.float32)
    factor_cholesky(full)
    scale: Array = np.ascontiguousarray(full.diagonal())
    full /= scale
    full[np.diag_indices(count)] = 0
    return MomentFactors(order, full.astype(np.float32, copy=False), np.square(scale).astype(np.float32), diagonal)


def factor_cholesky(moment: Array) -> None:
    """Overwrite the positive definite `moment` [n, n] with its upper triangular factor R: R Rᵀ = old `moment`."""
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


def _order_by_size(sizes: Array, group: int) -> Array:
    """Return the indices [n] that order `sizes` [n]: groups by maximum, and each group by element, descending."""
    by_group = sizes.reshape(-1, group)
    groups = np.argsort(-by_group.max(1), kind="stable")
    inside = np.argsort(-by_group, 1, kind="stable")
    order: Array = (groups[:, None] * group + inside[groups]).reshape(-1)
    return order


def compute_correction(moment: Array, crossed: Array, ridge: float = RIDGE) -> Array:
    """Return the matrix C [in, in] with W C = W + `CORRECTION` · (L − W), where L minimizes the sum of |L x − W x₀|².

    x₀ are the original inputs, x the changed ones; `moment` [in, in] is Σ x xᵀ, `crossed` [in, in] is Σ x₀ xᵀ. `ridge`
    times the mean of the diagonal of `moment` is added to its diagonal.
    """
    mean = float(np.trace(moment)) / len(moment) or 1.0
    unit = np.eye(len(moment), dtype=np.float32)
    away = np.linalg.solve(moment + np.float32(ridge * mean) * unit, (crossed - moment).T).T
    moved: Array = unit + np.float32(CORRECTION) * away
    return moved


def quantize_gptq(weight: Array, factors: MomentFactors, layout: BlockLayout) -> Blocks:
    """Return `weight` f32 [out, in] as blocks of `layout`, rounded by GPTQ with the `factors` of its input moment."""
    rows, group = len(weight), layout.group
    columns = np.zeros((len(factors.unit), rows), np.float32)  # columns of the weight are contiguous
    columns[: weight.shape[1]] = weight.T
    columns = columns[factors.order]
    groups = len(columns) // group
    errors = np.zeros_like(columns)
    codes = np.empty((len(columns), rows), np.uint8)
    scales = np.empty((groups, rows), np.float32)
    zeros = np.empty((groups, rows), np.uint8) if layout.has_zeros else None
    unit, top = factors.unit, np.float32(2**layout.bits - 1)
    for g in range(groups):
        first, last = g * group, (g + 1) * group
        base: Array = columns[first:last]
        if first:
            base = base + unit[:first, first:last].T @ errors[:first]
        scale, points = search_scales(base, factors.diagonal[first:last], layout)
        scales[factors.order[first] // group] = scale
        if zeros is not None and points is not None:
            zeros[factors.order[first] // group] = points
        inverse = invert_scales(scale)
        centre = np.float32(layout.middle) if points is None else points.astype(np.float32)
        for k in range(group):
            at = first + k
            wanted = base[k] if not k else base[k] + unit[first:at, at] @ errors[first:at]
            steps = np.clip(np.rint(wanted * inverse) + centre, 0, top)
            codes[factors.order[at]] = steps
            errors[at] = columns[at] - (steps - centre) * scale
    points = None if zeros is None else np.ascontiguousarray(zeros.T)
    by_row = np.ascontiguousarray(codes.T).reshape(rows, groups, group)
    return Blocks(by_row, np.ascontiguousarray(scales.T), None, points)


def search_scales(groups: Array, weights: Array, layout: BlockLayout) -> tuple[Array, Array | None]:
    """Return the scales f32 [out] and zero points [out] (None for layouts without) of one group of columns.

    They minimize the squared rounding errors of `groups` [group, out], weighted by `weights` [group], over the range of
    each column times the factors `SHRINK`.
    """
    low, high = groups.min(0), groups.max(0)
    scales, zeros = fit_range(low, high, layout)
    least = weights @ _squared_errors(groups, scales, zeros, layout)
    for share in SHRINK[1:]:
        narrower, points = fit_range(low * np.float32(share), high * np.float32(share), layout)
        errors = weights @ _squared_errors(groups, narrower, points, layout)
        better = errors < least
        least, scales = np.where(better, errors, least), np.where(better, narrower, scales)
        if zeros is not None and points is not None:
            zeros = np.where(better, points, zeros)
    return scales, zeros


def _squared_errors(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """Return the squared rounding errors of `groups` [group, out] for `scales` and `zeros` [out] (None: symmetric)."""
    centre = np.float32(layout.middle) if zeros is None else zeros.astype(np.float32)
    errors: Array = groups * invert_scales(scales)
    np.rint(errors, out=errors)
    np.clip(errors, -centre, np.float32(2**layout.bits - 1) - centre, out=errors)
    errors *= scales
    errors -= groups
    np.square(errors, out=errors)
    return errors
