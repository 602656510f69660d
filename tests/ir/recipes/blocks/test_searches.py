"""Searches for scales and zero points of groups."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.recipes.blocks.searches import MINIMA, SEARCHES, fit_by_range, fit_by_squares
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, build_integer_layout, build_offset_layout

ZEROS, SIGNED = (build_integer_layout(4, 32, zeros, dtypes.f32) for zeros in (True, False))


def weighted_error(groups: Array, scales: Array, zeros: Array | None, layout: BlockLayout) -> Array:
    """Return the squared error of each group, weighted as GGML's k-quants do."""
    zero = layout.middle if zeros is None else zeros[..., None].astype(np.float64)
    codes = np.clip(np.rint(groups / scales[..., None]) + zero, 0, 15)
    weights = np.sqrt(np.square(groups).mean(-1, keepdims=True)) + np.abs(groups)
    error: Array = (weights * np.square((codes - zero) * scales[..., None] - groups)).sum(-1)
    return error


def test_range_covers_the_least_and_the_greatest_value() -> None:
    groups = np.linspace(-3, 12, 32, dtype=np.float32)[None]
    scales, zeros = fit_by_range(groups, ZEROS)
    assert zeros is not None and (scales.item(), zeros.item()) == (1.0, 3)
    scales, zeros = fit_by_range(groups, SIGNED)
    assert zeros is None and scales.item() == -1.5  # the code −8 represents 12


@pytest.mark.parametrize("layout", [ZEROS, SIGNED])
def test_squares_lose_less_than_the_range(layout: BlockLayout, rng: np.random.Generator) -> None:
    groups = rng.standard_t(4, (16, 32)).astype(np.float32)
    before, after = (weighted_error(groups, *fit(groups, layout), layout) for fit in (fit_by_range, fit_by_squares))
    assert (after <= before * (1 + 1e-5)).all() and after.sum() < 0.97 * before.sum()


def test_squares_find_the_codes_that_made_the_values(rng: np.random.Generator) -> None:
    codes = rng.integers(0, 16, (4, 32))
    codes[:, :2] = 0, 15
    groups = ((codes - 5) * 0.25).astype(np.float32)
    scales, zeros = SEARCHES["kquant"](groups, ZEROS)
    assert zeros is not None
    np.testing.assert_allclose(scales, 0.25, rtol=1e-6)
    assert (zeros == 5).all()


def test_groups_of_zeros_and_of_one_value_stay_exact() -> None:
    groups = np.stack([np.zeros(32), np.full(32, 0.3)]).astype(np.float32)
    scales, offsets = MINIMA["hqq"](groups, build_offset_layout(4, 32))
    assert (scales.tolist(), offsets.tolist()) == ([0, 0], groups[:, 0].tolist())
    assert fit_by_squares(groups[:1], ZEROS)[0].item() == 0
