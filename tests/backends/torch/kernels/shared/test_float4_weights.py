"""Weights of 4-bit floats (mxfp4, nvfp4) against numbers worked out code by code in float64."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels import norm_linear as kernel
from weft.backends.torch.kernels.prefill import dequantize_weights as widening
from weft.backends.torch.kernels.prefill.dequantize_weights import dequantize_weights
from weft.backends.torch.kernels.shared.quantized_gemv import Codes, dequantize
from weft.backends.torch.lib.quantized import block_linear

from .....sampling import each
from ..close import DTYPES, exact, rounded
from .test_quantized_gemv import EIGHT, check_fusions, packed

HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FOUR = np.array([*HALF, *(-v for v in HALF)])  # OCP Microscaling Formats 1.0, table 5, by code
FORMS = ("mxfp4", "nvfp4")


pytestmark = pytest.mark.usefixtures("few_processors")


def drawn(form: str, out: int, width: int, device: torch.device, seed: int = 0) -> tuple[Codes, np.ndarray]:
    """Random codes with all scales that a sum in f32 bears, and the weights that they stand for, float64."""
    rng, group = np.random.default_rng(seed), 32 if form == "mxfp4" else 16
    codes = rng.permuted(np.resize(np.arange(16), (out, width)), axis=1)
    words = torch.from_numpy(packed(codes, 4)).to(device).view(torch.uint8)
    shape = (width // group, out)
    if form == "mxfp4":
        raw = rng.integers(118, 130, shape).astype(np.uint8)
        weight = FOUR[codes] * (2.0 ** (raw.T.astype(np.float64) - 127)).repeat(group, 1)
        return Codes(words, torch.from_numpy(raw).to(device), None, 4, width), weight
    raw = rng.integers(0, 127, shape).astype(np.uint8)  # subnormal ones and the largest, 448, are among them
    factors = torch.from_numpy(np.ldexp(rng.uniform(1, 2, (1, out)), -6)).float()
    weight = FOUR[codes] * EIGHT[raw.T].repeat(group, 1) * exact(factors).T
    scales = torch.from_numpy(raw).view(torch.float8_e4m3fn)
    return Codes(words, scales.to(device), factors.to(device), 4, width), weight


def block_linear_of(x: torch.Tensor, weight: Codes) -> torch.Tensor:
    """The product of generated modules without kernels, in f32: weights of fp16 could be too large."""
    return block_linear(x.float(), *weight.parts, bits=4).to(x.dtype)


ROWS = [
    *((1, 37, 1280), (1, 1, 32), (2, 5, 160), (3, 17, 192), (8, 6, 352)),  # rows, out, width
    *((16, 18, 96), (33, 9, 96), (64, 40, 384)),
]


@pytest.mark.parametrize(("shape", "dtype", "form"), each(5, itertools.product(ROWS, DTYPES, FORMS)))
def test_small_batch_products_agree_with_float64(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, form: str
) -> None:
    rows, out, width = shape
    given, weight = drawn(form, out, width, device)
    np.testing.assert_allclose(exact(dequantize(*given.parts, bits=4, width=width)), weight, rtol=2.0**-23, atol=0)
    x = rounded(np.random.default_rng(1).normal(size=(rows, width)) / 16, dtype, device)
    size = np.abs(exact(x)) @ np.abs(weight).T
    assert kernel.refusal(x, given) is None
    for computed in (kernel.norm_linear, partial(kernel.norm_linear, kernel=False), block_linear_of):
        made = exact(computed(x, given))
        assert (np.abs(made - exact(x) @ weight.T) <= (2 + width / 64) * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_partial_tiles_agree_with_float64(device: torch.device, dtype: torch.dtype) -> None:
    given, weight = drawn("nvfp4", 5, 208, device)  # 13 groups: half a tile is beyond the columns
    x = rounded(np.random.default_rng(1).normal(size=(2, 208)) / 16, dtype, device)
    size = np.abs(exact(x)) @ np.abs(weight).T
    for computed in (partial(kernel.norm_linear, kernel=True), partial(kernel.norm_linear, kernel=False)):
        made = exact(computed(x, given))
        assert (np.abs(made - exact(x) @ weight.T) <= 6 * torch.finfo(dtype).eps * size).all()


WIDENED = [(37, 32), (5, 352), (33, 96), (1, 160)]  # out, width


@pytest.mark.parametrize(("shape", "dtype", "form"), each(5, itertools.product(WIDENED, DTYPES, FORMS)))
def test_dequantized_weights_agree_with_the_formula(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype, form: str
) -> None:
    out, width = shape
    given, weight = drawn(form, out, width, device)
    unit = torch.finfo(dtype).eps  # the interpreter cuts off what a GPU rounds
    for made in (
        dequantize_weights(given, dtype, kernel=True),
        widening.dequantize_weights(given, dtype, kernel=False),
    ):
        least = np.finfo(np.float16).smallest_subnormal
        assert made.dtype == dtype and (np.abs(exact(made) - weight) <= unit * np.abs(weight) + least).all()


def test_scale_byte_zero_is_the_smallest_power_of_two(device: torch.device) -> None:
    """The byte 0 is 2^−127, the largest of 6 of which float32 has as a number of its own."""
    words = torch.from_numpy(packed(np.full((2, 32), 7), 4)).to(device).view(torch.uint8)
    codes = Codes(words, torch.tensor([[0, 1]], dtype=torch.uint8, device=device), None, 4, 32)
    for made in (
        dequantize_weights(codes, torch.float32, kernel=True),
        widening.dequantize_weights(codes, torch.float32, kernel=False),
    ):
        assert torch.equal(made[:, 0].cpu(), torch.tensor([6 * 2.0**-127, 6 * 2.0**-126]))


@pytest.mark.parametrize(
    ("rows", "form", "dtype", "kind"), each(5, itertools.product((1, 17), FORMS, DTYPES, ("rms", "layer")))
)
def test_fused_kernels_multiply_codes(
    device: torch.device, rows: int, form: str, dtype: torch.dtype, kind: str
) -> None:
    """Every kernel that takes codes takes these: against the same with the numbers that they stand for."""
    width, out = 96, 64
    codes, weight = drawn(form, out, width, device)
    largest = 1 / np.abs(weight).max()
    factors = codes.offsets if form == "nvfp4" else torch.ones(1, out, device=device)
    assert factors is not None
    codes = Codes(codes.packed, codes.scales, factors * largest, 4, width)  # the largest is about 1
    plain = dequantize(*codes.parts, bits=4, width=width).double()
    np.testing.assert_allclose(plain.cpu().numpy(), weight * largest, rtol=2.0**-21, atol=0)
    check_fusions(codes, plain, rows, dtype, kind)


def test_mismatched_operands_are_refused(device: torch.device) -> None:
    codes, _ = drawn("nvfp4", 5, 64, device)
    for changed, words in (
        ({"width": 320}, r"codes \[5, 64\] torch.uint8 must be uint8 \[out, 192\] for rows of 320"),
        ({"scales": codes.scales[:, :4]}, r"scales \[4, 4\] must be \[groups, 5\], of groups of a multiple of 16"),
        ({"offsets": torch.ones(4, 5)}, r"offsets \[4, 5\] differ from scales"),
    ):
        parts = {"packed": codes.packed, "scales": codes.scales, "offsets": codes.offsets, "bits": 4, "width": 64}
        with pytest.raises(ValueError, match=words):
            Codes(**{**parts, **changed})
