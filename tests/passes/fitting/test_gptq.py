"""GPTQ against its first formulation, and against what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.recipes.blocks.quantize import round_rows
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import BlockLayout, Blocks, build_integer_layout
from weft.passes.fitting.gptq import CORRECTION, RIDGE, compute_correction, factor_moment, quantize_gptq

LAYOUTS = [
    build_integer_layout(bits, group, zeros) for bits in (2, 3, 4, 8) for group in (16, 32) for zeros in (True, False)
]


def problem(rng: np.random.Generator, rows: int, width: int) -> tuple[Array, Array]:
    """A weight, and the second moment of activations of which few directions are large."""
    mixing = rng.standard_normal((width, width)) * np.exp(-np.arange(width) / (width / 6))[:, None]
    x = rng.standard_normal((3 * width, width)) @ mixing
    return rng.standard_normal((rows, width)).astype(np.float32), (x.T @ x / len(x)).astype(np.float32)


def loss(weight: Array, rounded: Array, moment: Array) -> float:
    error = (weight - rounded).astype(np.float64)
    return float(np.trace(error @ moment @ error.T))


def inverse_form(weight: Array, moment: Array, order: Array, blocks: Blocks, layout: BlockLayout) -> Array:
    """The codes that Frantar's algorithm chooses with the scales of `blocks`: by the inverse of H, column by column in
    this order."""
    width = weight.shape[1]
    regular = moment.astype(np.float64) + RIDGE * np.trace(moment) / width * np.eye(width)
    upper = np.linalg.cholesky(np.linalg.inv(regular[np.ix_(order, order)])).T
    left = weight.astype(np.float64)[:, order]
    codes = np.empty(weight.shape, np.int64)
    for k, column in enumerate(order):
        scales = blocks.scales[:, column // layout.group]
        zeros = layout.middle if blocks.zeros is None else blocks.zeros[:, column // layout.group].astype(np.int64)
        codes[:, column] = np.clip(np.rint(left[:, k] / scales) + zeros, 0, 2**layout.bits - 1)
        error = (left[:, k] - scales * (codes[:, column] - zeros)) / upper[k, k]
        left[:, k:] -= np.outer(error, upper[k, k:])
    return codes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_codes_are_those_of_the_paper(layout: BlockLayout, rng: np.random.Generator) -> None:
    weight, moment = problem(rng, 12, 64)
    factors = factor_moment(moment, layout.group)
    blocks = quantize_gptq(weight, factors, layout)
    expected = inverse_form(weight, moment, factors.order, blocks, layout)
    # One code that is halfway between two sends its row another way from there on.
    same = (blocks.codes.reshape(12, 64) == expected).all(1)
    assert same.mean() >= 0.75, same


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("width", [64, 72])
def test_outputs_change_less_than_by_rounding(layout: BlockLayout, width: int, rng: np.random.Generator) -> None:
    weight, moment = problem(rng, 40, width)
    blocks = quantize_gptq(weight, factor_moment(moment, layout.group), layout)
    fitted = layout.dequantize(blocks)[:, :width]
    nearest = layout.dequantize(round_rows(weight, layout))[:, :width]
    assert loss(weight, fitted, moment) < 0.75 * loss(weight, nearest, moment)
    assert blocks.codes.max() < 2**layout.bits


def test_inputs_that_are_always_zero_do_no_harm(rng: np.random.Generator) -> None:
    weight, moment = problem(rng, 8, 64)
    moment[:, 10:20] = moment[10:20] = 0
    layout = build_integer_layout(4, 32, True)
    fitted = layout.dequantize(quantize_gptq(weight, factor_moment(moment, 32), layout))
    assert np.isfinite(fitted).all() and np.abs(fitted - weight).max() < 2
    silent = np.zeros((64, 64), np.float32)
    assert np.isfinite(layout.dequantize(quantize_gptq(weight, factor_moment(silent, 32), layout))).all()


def test_factors_multiply_to_the_moment(rng: np.random.Generator) -> None:
    _, moment = problem(rng, 1, 40)
    factors = factor_moment(moment, 16)
    unit = factors.unit + np.eye(48)
    whole = (unit * factors.left) @ unit.T
    expected = np.zeros((48, 48))
    expected[:40, :40] = moment
    expected += RIDGE * np.trace(moment) / 40 * np.eye(48)
    groups = factors.order.reshape(3, 16) // 16
    assert sorted(factors.order) == list(range(48)) and (groups == groups[:, :1]).all()  # groups stay together
    assert (np.diff(np.diag(expected)[factors.order].reshape(3, 16), axis=1) <= 0).all()
    expected = expected[np.ix_(factors.order, factors.order)]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not np.tril(factors.unit).any()


def test_corrected_weight_approximates_the_original_output(rng: np.random.Generator) -> None:
    """The share of the way to the least-squares fit, by numpy's own solver."""
    weight, _ = problem(rng, 6, 24)
    first = rng.standard_normal((200, 24)).astype(np.float32)
    changed = (first + 0.3 * rng.standard_normal((200, 24)) @ rng.standard_normal((24, 24))).astype(np.float32)
    moved = weight @ compute_correction(changed.T @ changed, first.T @ changed, ridge=0)
    fit = np.linalg.lstsq(changed.astype(np.float64), first @ weight.T.astype(np.float64), rcond=None)[0].T
    np.testing.assert_allclose(moved, weight + CORRECTION * (fit - weight), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(
        compute_correction(first.T @ first, first.T @ first), np.eye(len(first.T), dtype=np.float32)
    )
