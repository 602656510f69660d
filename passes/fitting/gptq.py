"""Rounding a matrix to blocks so that what it makes of a text changes least: the linear algebra, without a graph.

GPTQ (Frantar 2022, arXiv 2210.17323) in the form of LDLQ (Chee 2023, arXiv 2307.13304), which is the same algorithm.
With the second moment H = E[x xᵀ] of the activations, factored as H = (U + I) D (U + I)ᵀ with U strictly upper
triangular,

    E[|W x − Ŵ x|²] = Σ_k D_k |ŵ_k − w_k − Σ_{j<k} (w_j − ŵ_j) U_jk|²,

so column k is rounded after the errors of the columns before it, weighed by U, are added to it; D_k is what remains of
the variance of input k once all later ones are known. Rows of W do not depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.ir.recipes.blocks.quantize import reciprocal, spanned
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import BlockLayout, Blocks

RIDGE = 0.01  # added to the moment, relative to its mean: directions that the text hardly has keep a weight
SHRINK = tuple(1 - 0.03 * i for i in range(12))  # of the range of a group, tried for its scale
WIDE = 4096  # inputs from which on moments are factored in f32, to save memory


@dataclass(frozen=True)
class Feedback:
    """The factors of a moment: `unit` is U f32 [in, in], `left` D f32 [in], `diagonal` that of H, all regularized."""

    unit: Array
    left: Array
    diagonal: Array


def feedback(moment: Array, group: int, ridge: float = RIDGE) -> Feedback:
    """Factor `moment` [in, in], with the inputs filled up to a multiple of `group` by some that are always 0."""
    width = len(moment)
    count = width + -width % group
    precision: Any = np.float32 if count > WIDE else np.float64
    full: Array = np.zeros((count, count), precision)
    full[:width, :width] = moment
    mean = float(np.trace(full)) / width or 1.0
    full[np.diag_indices(count)] += ridge * mean
    diagonal = full.diagonal().astype(np.float32)
    # H = R Rᵀ with R upper triangular: the Cholesky factor of H with its axes reversed, reversed again.
    root: Array = np.linalg.cholesky(full[::-1, ::-1])[::-1, ::-1]
    scale: Array = np.ascontiguousarray(root.diagonal())
    unit: Array = (root / scale).astype(np.float32)
    unit[np.diag_indices(count)] = 0
    return Feedback(unit, np.square(scale).astype(np.float32), diagonal)


def gptq(weight: Array, factors: Feedback, layout: BlockLayout) -> Blocks:
    """Some rows of a `weight`, f32 [out, in], as blocks of `layout`."""
    rows, group = len(weight), layout.group
    turned = np.zeros((len(factors.unit), rows), np.float32)  # columns of the weight are contiguous
    turned[: weight.shape[1]] = weight.T
    groups = len(turned) // group
    errors = np.zeros_like(turned)
    codes = np.empty((groups, group, rows), np.uint8)
    scales = np.empty((groups, rows), np.float32)
    zeros = np.empty((groups, rows), np.uint8) if layout.has_zeros else None
    unit, top = factors.unit, np.float32(2**layout.bits - 1)
    for g in range(groups):
        first, last = g * group, (g + 1) * group
        base: Array = turned[first:last]
        if first:
            base = base + unit[:first, first:last].T @ errors[:first]
        scales[g], points = searched(base, factors.diagonal[first:last], layout)
        if zeros is not None and points is not None:
            zeros[g] = points
        inverse = reciprocal(scales[g])
        centre = np.float32(layout.middle) if points is None else points.astype(np.float32)
        for k in range(group):
            at = first + k
            wanted = base[k] if not k else base[k] + unit[first:at, at] @ errors[first:at]
            steps = np.clip(np.rint(wanted * inverse) + centre, 0, top)
            codes[g, k] = steps
            errors[at] = turned[at] - (steps - centre) * scales[g]
    points = None if zeros is None else np.ascontiguousarray(zeros.T)
    return Blocks(np.ascontiguousarray(codes.transpose(2, 0, 1)), np.ascontiguousarray(scales.T), None, points)


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
