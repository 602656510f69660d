"""Factors of channels that reduce the rounding error of a product."""

from __future__ import annotations

import numpy as np

from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import build_integer_layout
from weft.passes.library.quantize.channel_factors import fit_channel_factors


def test_even_channels_have_no_factors() -> None:
    draw = np.random.default_rng(0)
    x, weight = draw.normal(size=(300, 64)), draw.normal(size=(48, 64))
    assert fit_channel_factors(x, [weight], build_integer_layout(4, 32, True)) is None
    x[:, 7] *= 40
    found = fit_channel_factors(x, [weight], build_integer_layout(8, 32, False))
    assert found is not None and found[7] == found.max() >= 4 * np.median(found)

    def error(x: Array, weight: Array) -> float:
        """Of the products, with both sides in 8 bits, a scale for 32 numbers."""

        def rounded(rows: Array) -> Array:
            groups = rows.reshape(len(rows), -1, 32)
            scales = np.abs(groups).max(-1, keepdims=True) / 127
            return np.reshape(np.rint(groups / scales) * scales, rows.shape)

        return float(np.square(rounded(x) @ rounded(weight).T - x @ weight.T).mean())

    assert error(x / found, weight * found) < 0.3 * error(x, weight)


def test_channels_of_zeros_have_finite_factors() -> None:
    draw = np.random.default_rng(0)
    x, weight = draw.normal(size=(300, 64)), draw.normal(size=(48, 64))
    x[:, 3], weight[:, 5] = 0, 0
    x[:, 7] *= 40
    found = fit_channel_factors(x, [weight, 3 * weight], build_integer_layout(8, 32, False))
    assert found is not None and np.isfinite(found).all() and found.min() > 0
    assert fit_channel_factors(np.zeros((5, 64)), [weight], build_integer_layout(8, 32, False)) is None
