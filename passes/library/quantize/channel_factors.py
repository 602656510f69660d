"""Factors of channels that minimize the rounding error of a product.

x Wᵀ = (x / s) (W · s)ᵀ for a factor s of every channel. Values of a group share a scale, so a channel that is much
larger than its neighbours reduces their precision, among activations or among weights. Factors move magnitude between
activations and weights. The best factors are found by trials on calibration activations, with both rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.ir.recipes.blocks.quantize import round_rows
from weft.ir.recipes.blocks.spans import split_groups
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import BlockLayout

# Factors are sizes of activations to the first power, divided by sizes of weights to the second: AWQ and SmoothQuant.
POWERS = ((0.25, 0.0), (0.5, 0.0), (0.75, 0.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25))
GAIN = 0.98  # share of the error without factors that factors have to reach
FARTHEST = 8  # exponent of two
ROWS = 256  # rows of activations in a trial
OUTPUTS = 1024  # rows of a weight, enough to estimate the sizes of its columns


def fit_channel_factors(x: Array, weights: Sequence[Array], layout: BlockLayout) -> Array | None:
    """Return factors s, powers of two f32 [in], for which (x / s) (W · s)ᵀ has the least error, over all `weights` W.
    x is [n, in], W [out, in]; W · s is rounded to `layout` and x / s to 8 bits. Candidates are aᵖ/bᵠ with (p, q) from
    `POWERS`, a and b root mean squares per column of x and of W. Return None if none reduces the error by over 2 %."""
    inputs = _measure_columns(x.astype(np.float64, copy=False))
    weights = [weight.astype(np.float64) for weight in weights]
    outputs = np.sqrt(np.mean([np.square(_measure_columns(weight)) for weight in weights], 0))
    x = x[np.linspace(0, len(x) - 1, min(len(x), ROWS)).astype(int)].astype(np.float64)
    exact = [x @ weight.T for weight in weights]

    def error(factors: Array) -> float:
        rounded = _round_to_8_bits(x / factors, layout.group)
        total = 0.0
        for weight, target in zip(weights, exact, strict=True):
            blocks = round_rows(weight * factors, layout)
            product = rounded @ layout.dequantize(blocks)[:, : weight.shape[1]].T
            total += float(np.square(product - target).mean()) / max(float(np.square(target).mean()), 1e-30)
        return total

    best: Array | None = None
    least = GAIN * error(np.ones(x.shape[1]))
    for by_input, by_weight in POWERS:
        exponents = by_input * np.log2(inputs) - by_weight * np.log2(outputs)
        exponents = np.clip(np.rint(exponents - exponents.mean()), -FARTHEST, FARTHEST)
        factors = np.exp2(exponents)
        if (trial := error(factors)) < least:
            best, least = factors, trial
    return None if best is None else best.astype(np.float32)


def _measure_columns(rows: Array) -> Array:
    """Return the root mean square of every column [width], but at least 2⁻⁸ of the largest, and not 0."""
    sizes = np.sqrt(np.square(rows).mean(0))
    return np.asarray(np.maximum(sizes, max(float(sizes.max()), 1e-30) * 2.0**-FARTHEST))


def _round_to_8_bits(x: Array, group: int) -> Array:
    """Return x [n, width] with every `group` values of a row rounded to −127 … 127 times a scale, as CPU kernels do."""
    groups = split_groups(x, group)
    scales = np.abs(groups).max(-1, keepdims=True) / 127
    scales[scales == 0] = 1
    rounded: Array = np.rint(groups / scales) * scales
    return rounded.reshape(len(x), -1)[:, : x.shape[1]]
