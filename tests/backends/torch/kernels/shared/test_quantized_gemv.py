"""Weights of 4 and 8 bits against numbers worked out code by code in float64."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import norm_linear as kernel
from weft.backends.torch.kernels.linear_residual import linear_residual
from weft.backends.torch.kernels.norm_glu import norm_glu
from weft.backends.torch.kernels.norm_linear import norm_linear
from weft.backends.torch.kernels.norm_qkv import norm_qkv
from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.quantized_gemv import Codes, dequantize, unpack
from weft.backends.torch.lib.quantized import block_linear
from weft.ir.types.block_layouts import pack_words

from .....sampling import each
from ..close import DTYPES, assert_close, exact, rounded
from ..oracles import FORMULAS, assert_near, draw, make_norm, norm64

pytestmark = pytest.mark.usefixtures("few_processors")


def packed(codes: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """The words of codes [out, in], bit by bit: codes 2i and 2i + 1 of tile t of a chunk stand in its word i."""
    out, width = codes.shape
    words = np.zeros((out, -(-width * bits // 512) * 16), np.uint32)
    for k in range(width):
        chunk, within = divmod(k, 512 // bits)
        tile, place = divmod(within, 32)
        words[:, 16 * chunk + place // 2] |= codes[:, k].astype(np.uint32) << np.uint32(16 * (place % 2) + tile * bits)
    return words.view(np.int32)


@pytest.mark.parametrize(("bits", "width"), [(4, 96), (4, 128), (8, 48), (8, 96), (4, 1)])
def test_unpack_is_the_inverse_of_packing(bits: int, width: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, width))
    words = torch.from_numpy(packed(codes, bits))
    assert words.dtype == torch.int32
    assert np.array_equal(unpack(words, bits, width).numpy(), codes)
    assert np.array_equal(pack_words(codes.astype(np.uint8)[:, None], bits), words.numpy())


SHAPES = [  # rows, out, width, bits, group
    (1, 5, 96, 4, 32),
    (1, 37, 1280, 4, 128),
    (2, 19, 192, 4, 64),
    (3, 9, 96, 8, 96),
    (8, 6, 256, 8, 256),
    (1, 17, 1200, 8, 1200),
    (7, 33, 320, 4, 320),
    (16, 18, 576, 8, 32),
    (33, 35, 768, 4, 256),
    (64, 40, 160, 4, 32),
]


@pytest.mark.parametrize(("shape", "dtype", "more"), each(5, itertools.product(SHAPES, DTYPES, (False, True))))
def test_products_of_few_rows(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, more: bool) -> None:
    """Random codes, scales, and, if more, offsets and a bias."""
    rows, out, width, bits, group = shape
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (out, width))
    x, bias = (rounded(rng.normal(size=size), dtype, device) for size in ((rows, width), (out,)))
    scales, offsets = (rounded(rng.normal(size=(width // group, out)), dtype, device) for _ in range(2))
    weight = exact(scales).T.repeat(group, 1) * (codes - (1 << (bits - 1)))
    want = exact(x) @ (weight + exact(offsets).T.repeat(group, 1) if more else weight).T + (exact(bias) if more else 0)
    words = torch.from_numpy(packed(codes, bits)).to(device)
    given = (x, Codes(words, scales, offsets if more else None, bits, width), bias if more else None)
    assert kernel.refusal(*given) is None
    for computed in (kernel.norm_linear, partial(kernel.norm_linear, kernel=False)):
        assert_close(computed(*given), want, terms=width)


@pytest.mark.parametrize(("rows", "bits", "group", "dtype"), [(9, 8, 96, DTYPES[2]), (17, 4, 128, DTYPES[0])])
def test_tiles_of_many_rows(device: torch.device, rows: int, bits: int, group: int, dtype: torch.dtype) -> None:
    """A device of few processors takes 256 weights to a block at once, as large devices do of many outputs."""
    assert gemv.choose_code_tile(rows, 300, 384, bits, group, dtype.itemsize).rows == 256
    test_products_of_few_rows(device, (rows, 300, 384, bits, group), dtype, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, None), (8, 32), (8, None)])
@pytest.mark.parametrize("offsets", [False, True])
def test_dequantized_weights_are_the_nearest_of_their_group(
    bits: int, group: int | None, dtype: torch.dtype, offsets: bool
) -> None:
    """Quantized numbers come back within half a step, up to the rounding of scales and offsets."""
    rng, half = np.random.default_rng(0), 1 << (bits - 1)
    size = group or 192
    weight = (rng.normal(size=(7, 192)) + 0.5).reshape(7, -1, size)
    low, high = weight.min(2), weight.max(2)
    most = np.maximum(abs(low), abs(high))
    scales = rounded(((high - low) / (2 * half - 1) if offsets else most / (half - 1)).T, dtype, torch.device("cpu"))
    shifts = rounded((low.T + half * exact(scales)), dtype, torch.device("cpu")) if offsets else None
    step = exact(scales).T[..., None]
    base = 0.0 if shifts is None else exact(shifts).T[..., None]
    codes = np.clip(np.rint((weight - base) / step) + half, 0, 2 * half - 1).astype(np.int64).reshape(7, 192)
    words = torch.from_numpy(packed(codes, bits))
    made = exact(dequantize(words, scales, shifts, bits=bits, width=192)).reshape(weight.shape)
    assert np.abs(made - (step * (codes.reshape(weight.shape) - half) + base)).max() <= 1e-5  # it computes in f32
    assert (np.abs(made - weight) <= (0.5 + 1e-3 + (1 << bits) * torch.finfo(dtype).eps) * step).all()


def test_groups_of_equal_weights_and_of_zero_scales() -> None:
    words = torch.from_numpy(packed(np.array([[8] * 64, [7] * 64]), 4))
    scales = torch.tensor([[0.0, 3.0]] * 2)
    for offsets, want in ((None, -3.0), (torch.full((2, 2), 6.0), 3.0)):
        made = dequantize(words, scales, offsets, bits=4, width=64)
        assert torch.equal(made[1], torch.full((64,), want))
        assert torch.equal(made[0], torch.full((64,), 0.0 if offsets is None else 6.0))


def drawn(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The words and scales of some weights [5, 64] in groups of 32."""
    rng = np.random.default_rng(0)
    words = torch.from_numpy(packed(rng.integers(0, 1 << bits, (5, 64)), bits))
    return words.to(device), rounded(rng.normal(size=(2, 5)), torch.float32, device)


def test_q4_1_blocks_of_gguf_need_no_conversion(device: torch.device) -> None:
    """q4_1 is minimum + scale · code, groups of 32."""
    rng = np.random.default_rng(0)
    codes, scale, low = rng.integers(0, 16, (6, 64)), rng.uniform(0.1, 1, (6, 2)), rng.normal(size=(6, 2))
    x = rounded(rng.normal(size=(1, 64)), torch.float32, device)
    want = exact(x) @ (low.repeat(32, 1) + scale.repeat(32, 1) * codes).T
    scales, offsets = (rounded(t.T, torch.float32, device).contiguous() for t in (scale, low + 8 * scale))
    words = torch.from_numpy(packed(codes, 4)).to(device)
    assert_close(kernel.norm_linear(x, Codes(words, scales, offsets, 4, 64)), want, terms=64)


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    words, scales = drawn(4, device)
    weight = Codes(words, scales, None, 4, 64)
    for x, reason in (
        (torch.ones(65, 64, device=device), "not 1 to 64 rows"),
        (torch.ones(1, 64, dtype=torch.float64, device=device), "torch.float64 is not one of bf16, fp16, fp32"),
    ):
        assert kernel.refusal(x, weight) == reason
        want = exact(x) @ exact(dequantize(words, scales, bits=4, width=64)).T
        assert_close(kernel.norm_linear(x, weight), want, terms=64)
    strided = Codes(words.repeat_interleave(2, 1)[:, ::2], scales, None, 4, 64)
    assert kernel.refusal(torch.ones(1, 64, device=device), strided) == "an operand is not contiguous"


def test_operands_that_do_not_fit_are_refused() -> None:
    codes, scales = drawn(8, torch.device("cpu"))
    for changed, words in (
        ({"width": 80}, r"codes \[5, 16\] torch.int32 must be int32 \[out, 32\] for rows of 80"),
        ({"scales": scales[:, :4]}, r"scales \[2, 4\] must be \[groups, 5\]"),
        ({"offsets": scales[:1]}, r"offsets \[1, 5\] differ"),
        ({"bits": 5}, "codes must have 4 or 8 bits, not 5"),
        (
            {"packed": codes.view(torch.float8_e4m3fn)[:, :32]},
            r"codes \[5, 32\] torch.float8_e4m3fn must be float8_e4m3fn \[out, 64\] for rows of 64",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            Codes(**{"packed": codes, "scales": scales, "offsets": None, "bits": 8, "width": 64, **changed})
    with pytest.raises(ValueError, match=r"x \[1, 32\] does not fit weight \[5, 64\]"):
        kernel.norm_linear(torch.ones(1, 32), Codes(codes, scales, None, 8, 64))


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    words, scales = drawn(4, device)
    weight = Codes(words, scales.requires_grad_(), None, 4, 64)
    x = torch.ones(1, 64, device=device)
    assert kernel.refusal(x, weight) == "a gradient is required"
    assert kernel.norm_linear(x, weight).requires_grad


def float8(code: int) -> float:
    """The number of a code by arXiv 2209.05433, table 1: sign, four bits of exponent with a bias of 7, three of
    fraction; 0 at the smallest exponent stands for that of 1 without the implicit bit."""
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.ldexp(1 + fraction / 8, exponent - 7) if exponent else np.ldexp(fraction / 8, -6)
    return float(-size if code & 128 else size)


NUMBERS = np.array([c for c in range(256) if c & 127 != 127])  # the other two are no numbers
EIGHT = np.array([float8(code) for code in range(256)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out", "width", "group"),
    [(1, 37, 254, 254), (2, 5, 256, 128), (3, 17, 192, 32), (8, 6, 320, 64), (16, 18, 96, 96), (64, 40, 384, 128)],
)
def test_products_of_float8_weights(
    device: torch.device, rows: int, out: int, width: int, group: int, dtype: torch.dtype
) -> None:
    """Every code there is, with powers of 2 as scales, which leave only x to round."""
    rng = np.random.default_rng(0)
    codes = rng.permuted(np.resize(NUMBERS, (out, width)), axis=1)
    scales = torch.from_numpy(np.ldexp(1.0, rng.integers(-9, 3, (width // group, out)))).float().to(device)
    weight = exact(scales).T.repeat(group, 1) * EIGHT[codes]
    packing = torch.from_numpy(packed(codes, 8)).to(device).view(torch.float8_e4m3fn)
    given = Codes(packing, scales, None, 8, width)
    assert np.array_equal(exact(dequantize(*given.parts, bits=8, width=width)), weight)
    x = rounded(rng.normal(size=(rows, width)), dtype, device)
    size = np.abs(exact(x)) @ np.abs(weight).T
    for computed in (kernel.norm_linear, partial(kernel.norm_linear, kernel=False), block_linear_of):
        made = exact(computed(x, given))
        assert (np.abs(made - exact(x) @ weight.T) <= (2 + width / 64) * torch.finfo(dtype).eps * size).all()


def block_linear_of(x: torch.Tensor, weight: Codes) -> torch.Tensor:
    """The product of generated modules without kernels, in f32: weights of fp16 could be too small."""
    return block_linear(x.float(), *weight.parts, bits=8).to(x.dtype)


def check_fusions(codes: Codes, plain: torch.Tensor, rows: int, dtype: torch.dtype, kind: str) -> None:
    """Every kernel that takes weights takes `codes` [64, width]: against the numbers `plain` that they stand for, in
    float64."""
    (out, width), device = plain.shape, plain.device
    x = draw(rows, width, seed=1, dtype=dtype, device=device)
    norm = make_norm(kind, width, dtype, device)
    normed = norm64(x, norm)
    size = (normed.abs() + 1) @ plain.abs().T + 1
    near = partial(assert_near, reduced=width, inner=dtype)
    gate, up = (normed @ plain.T).chunk(2, -1)
    gate_size, up_size = size.chunk(2, -1)
    near(norm_linear(x, codes, norm=norm, kernel=True), normed @ plain.T, size)
    near(norm_glu(x, codes, norm=norm, kernel=True), FORMULAS["silu"](gate) * up, 4 * gate_size * up_size)
    residual = draw(rows, out, seed=2, dtype=dtype, device=device)
    product = x.double() @ plain.T
    near(
        linear_residual(x, codes, residual, kernel=True),
        residual.double() + product,
        size + x.double().abs() @ plain.abs().T,
    )
    k, v = (torch.zeros(rows, 1, 4, 16, dtype=dtype, device=device) for _ in range(2))
    at = torch.full((rows, 1), 2, device=device)
    q = norm_qkv(x, codes, k, v, at, norm=norm, kernel=True)
    want = (normed @ plain.T).view(rows, 4, 16)
    sizes = size.view(rows, 4, 16)
    near(q, want[:, :2], sizes[:, :2])
    near(k[:, :, 2], want[:, 2:3], sizes[:, 2:3])
    near(v[:, :, 2], want[:, 3:], sizes[:, 3:])


FUSED = [(1, 4, 32, False), (3, 8, 96, False), (33, 4, 96, False), (2, 8, 32, True)]  # rows, bits, group, floats


@pytest.mark.parametrize(("form", "dtype", "kind"), each(5, itertools.product(FUSED, DTYPES, ("rms", "layer"))))
def test_fused_kernels_multiply_codes(
    device: torch.device, form: tuple[int, int, int, bool], dtype: torch.dtype, kind: str
) -> None:
    """Every kernel that takes weights takes codes: against the same with the numbers that they stand for."""
    rows, bits, group, floats = form
    rng, width, out = np.random.default_rng(0), 96, 64
    drawn = rng.choice(NUMBERS, (out, width)) if floats else rng.integers(0, 1 << bits, (out, width))
    words = torch.from_numpy(packed(drawn, bits)).to(device)
    words = words.view(torch.float8_e4m3fn) if floats else words
    scales = rounded(rng.uniform(0.2, 1, (width // group, out)) / (1 << bits), torch.float16, device)
    offsets = None if floats else rounded(rng.normal(size=(width // group, out)) / 8, torch.float32, device)
    codes = Codes(words, scales, offsets, bits, width)
    plain = dequantize(words, scales, offsets, bits=bits, width=width).double()
    check_fusions(codes, plain, rows, dtype, kind)
