"""y = act(norm(x) Wᵀ + b) for up to 64 rows in one kernel: heads, routers, projections, ungated feed-forwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .shared.activation import ACTIVATIONS, activate, check_activation
from .shared.codes import Codes
from .shared.gemv import FLOATS, MXFP4, NVFP4, Weight, affine, check, coded, flat, parts, refusal, tile
from .shared.launch import BF16, FP16, FP32, Variant, jit, operator, start_next, tl, triton, uses_torch
from .shared.norm import NO_NORM, Norm
from .shared.rows import linear


@jit
def norm_linear_kernel(
    x, weight, scales, offsets, gain, shift, bias, y, M, N, K, x_row, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block computes BLOCK_N outputs of all rows."""
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    out = affine(
        x, x_row, weight, scales, offsets, gain, shift, bias, rows, M, N, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN, PDL,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    tl.store(y + m[:, None] * N + n[None, :], activate(out, ACTIVATION), mask=(m[:, None] < M) & (n[None, :] < N))


def norm_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "identity",
    dtype: torch.dtype | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """act(norm(x) Wᵀ + b): x [..., in], weight [out, in], bias [out] → [..., out] of `dtype`, that of x if not given.

    x may be a slice of a projection. Sums are fp32, and only the result is rounded. `kernel`: see `uses_torch`.

    Raises:
        ValueError: if shapes do not fit, or the norm or activation is unknown.
    """
    check(x, weight, norm, bias)
    check_activation(activation)
    if uses_torch(kernel, refusal, x, weight, norm.gain, norm.shift, bias):
        return ACTIVATIONS[activation](linear(norm(x), weight, bias)).to(dtype or x.dtype)
    bits = weight.bits if isinstance(weight, Codes) else 0
    gain, shift = norm.gain, norm.shift
    return normed_product(x, *parts(weight), bits, bias, gain, shift, norm.kind, norm.eps, activation, dtype or x.dtype)


def _empty(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight), dtype=more[-1])


@operator(_empty)
def normed_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bits: int,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    shift: torch.Tensor | None,
    norm: str,
    eps: float,
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`norm_linear` by the kernel, with a weight of numbers, or of `bits` in the parts of `Codes`."""
    rows, N, K = flat(x), len(weight), x.shape[-1]
    y = _empty(x, weight, dtype)
    plan = tile(len(rows), N, K, x.dtype, weight=weight if scales is None else Codes(weight, scales, offsets, bits, K))
    norm_linear_kernel[(triton.cdiv(N, plan.rows),)](
        rows, weight, scales, offsets, gain, shift, bias, y, len(rows), N, K, rows.stride(0), eps,
        NORM=norm, ACTIVATION=activation, **plan.options(x),
    )  # fmt: skip
    return y


reference = partial(norm_linear, kernel=False)


def variants() -> list[Variant]:
    """Heads of one row and of more, a LayerNorm, and a router without norm; and products with weights of few bits."""
    return [
        tile(m, n, k, dtype).variant(norm_linear_kernel, m, dtype, "N K x_row", forms, absent=absent)
        for m, n, k, dtype, norm, absent, activation in (
            (1, 128256, 4096, BF16, "rms", "shift bias", "identity"),
            *((m, 128256, 4096, BF16, "rms", "shift bias", "identity") for m in (4, 8, 16, 32, 64)),
            (4, 2048, 1536, FP16, "layer", "", "gelu"),
            (1, 64, 576, FP32, "none", "gain shift bias", "sigmoid"),
        )
        for forms in [{"NORM": norm, "ACTIVATION": activation}]
    ] + _coded()


def _coded() -> list[Variant]:
    """8 B parameters in 4 bits by groups of 128 and 32, with offsets; 8 bits per channel and as q8_0; several rows;
    blocks as GGUF files have them, whose scales are fp16 and offsets fp32, whatever x is; floats of 8 and 4 bits."""
    shipped, stored = [], {"scales": "*fp16", "offsets": "*fp32"}
    plain = {"NORM": "none", "ACTIVATION": "identity"}
    for m, n, k, dtype, bits, group, absent, types in (
        *((m, 28672, 4096, BF16, 4, 128, "offsets bias", {}) for m in (1, 4, 8, 16, 32, 64)),
        (4, 4096, 4096, BF16, 4, 128, "offsets bias", {}),
        (1, 4096, 14336, FP16, 4, 32, "", {}),
        (1, 6144, 4096, BF16, 4, 64, "offsets bias", {}),
        (8, 2048, 2048, FP16, 8, 32, "offsets bias", {}),
        (8, 4096, 4096, FP32, 4, 32, "", {}),
        (1, 4096, 14336, BF16, 8, 14336, "offsets bias", {}),
        (1, 1536, 576, FP32, 8, 32, "offsets bias", {}),
        (1, 4096, 4096, BF16, 4, 32, "", stored),
        (1, 4096, 14336, BF16, 8, 32, "offsets bias", stored),
        *((m, 28672, 4096, BF16, 8, 128, "offsets bias", FLOATS) for m in (1, 8, 16, 32, 64)),
        (1, 28672, 4096, BF16, 8, 4096, "offsets bias", FLOATS),
        (1, 28672, 4096, FP16, 8, 128, "offsets bias", FLOATS),
        (8, 4096, 4096, FP32, 8, 128, "offsets bias", FLOATS),
        *((m, 28672, 4096, BF16, 4, 32, "offsets bias", MXFP4) for m in (1, 8, 64)),
        (1, 4096, 14336, FP16, 4, 32, "offsets bias", MXFP4),
        *((m, 28672, 4096, BF16, 4, 16, "bias", NVFP4) for m in (1, 8, 64)),
        (1, 4096, 14336, FP16, 4, 16, "bias", NVFP4),
        (8, 4096, 4096, FP32, 4, 16, "bias", NVFP4),
    ):
        types = {"weight": "*i32", **types}
        plan, absent = coded(m, n, k, bits, group, small=types["weight"] == "*u8"), f"gain shift {absent}"
        shipped.append(plan.variant(norm_linear_kernel, m, dtype, "N K x_row", plain, absent=absent, types=types))
    return shipped
