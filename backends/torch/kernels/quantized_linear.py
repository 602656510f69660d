"""y = x Wᵀ + b for up to 64 rows x and W of 4 or 8 bits with a scale per group of weights, read once.

How W is stored, and how it is multiplied, `shared.codes` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .shared import gemv
from .shared.codes import TILE, chunk, code_products, dequantize, multiplied, words
from .shared.dots import prefetch_rows
from .shared.launch import BF16, FP16, FP32, Variant, jit, options, start_next, tl, triton, uses_torch, variant, wait
from .shared.operands import contiguous, gradient_refusal, power_of_2

__all__ = ["dequantize", "quantized_linear", "reference"]


@jit
def _linear_kernel(
    x, codes, scales, offsets, bias, y, M, N, K, GROUP: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows; x [M, K], codes [N, words of K], scales and offsets [K/GROUP, N]."""
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    if PDL:
        width = tl.cdiv(K, 512 // BITS) * 16
        prefetch_rows(codes, rows, width, 0, width, 64)
    wait(PDL)
    out = code_products(
        x, K, codes, scales, offsets, None, rows, M, N, K, 0, K, 0.0,
        "none", BITS, GROUP, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if bias is not None:
        out += tl.load(bias + rows).to(tl.float32)[None, :]
    m = tl.arange(0, BLOCK_M)[:, None]
    tl.store(y + m * N + n[None, :], out.to(y.dtype.element_ty), mask=(m < M) & (n < N)[None, :])


def _check(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
) -> None:
    """Check that operands fit."""
    if bits not in (4, 8):
        raise ValueError(f"codes of {bits} bits are not of 4 or 8")
    out, width = len(codes), x.shape[-1]
    if codes.dtype != torch.int32 or codes.shape != (out, words(width, bits)):
        raise ValueError(
            f"codes {[*codes.shape]} {codes.dtype} must be int32 [out, {words(width, bits)}] for x {[*x.shape]}"
        )
    group = width // len(scales)
    if scales.shape[1:] != (out,) or width % len(scales) or (group % TILE and len(scales) > 1):
        raise ValueError(f"scales {[*scales.shape]} must be [groups, {out}], of groups of a multiple of {TILE}")
    if offsets is not None and offsets.shape != scales.shape:
        raise ValueError(f"offsets {[*offsets.shape]} differ from scales {[*scales.shape]}")
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"bias {[*bias.shape]} must be [{out}]")


def refusal(
    x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None = None, *others: torch.Tensor | None
) -> str | None:
    """Say why torch computes this instead of the kernel, in a few words; None if the kernel does."""
    if reason := gradient_refusal(*others) or gemv.refusal(x, bias):
        return reason
    return None if codes.is_contiguous() else "the codes are not contiguous"


def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    bits: int,
    otherwise: Callable[..., torch.Tensor] = multiplied,
    kernel: bool | None = None,
) -> torch.Tensor:
    """x Wᵀ + b: x [..., in], codes i32 [out, words], scales and offsets [in/group, out], bias [out] → [..., out].

    The group follows from the shapes; see `shared.codes` for the words of codes of 4 or 8 bits. Sums are fp32, and only
    the result is rounded. `kernel`: see `uses_torch`; torch computes what `otherwise` does.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(x, codes, scales, offsets, bias, bits)
    if uses_torch(kernel, refusal, x, codes, bias, scales, offsets):
        return otherwise(x, codes, scales, offsets, bias, bits)
    width, out = x.shape[-1], len(codes)
    rows = x.reshape(-1, width).contiguous()
    scales, offsets = scales.contiguous(), contiguous(offsets)
    y = x.new_empty(*x.shape[:-1], out)
    sizes, warps = _sizes(len(rows), out, width, bits, width // len(scales))
    _linear_kernel[(triton.cdiv(out, sizes["BLOCK_N"]),)](
        rows, codes, scales, offsets, bias, y, len(rows), out, width, BITS=bits, **sizes, **options(x, warps, 1),
    )  # fmt: skip
    return y


reference = partial(quantized_linear, kernel=False)


def _sizes(rows: int, out: int, width: int, bits: int, group: int) -> tuple[dict[str, int], int]:
    """The constants that shape a block, and its warps: 32 outputs to a warp, two warps or one, as leave every
    multiprocessor a block, but four of many rows, which all of them read; two chunks at a time, or one where the width
    is not divided by two, or registers would not hold them."""
    block_m = power_of_2(rows, 8)
    outputs = 128 if block_m >= 32 else 64 if out // 64 >= gemv.PROCESSORS else 32
    one = chunk(bits)
    step = one if block_m == 64 or (group < 64 and bits == 4) or width % (2 * one) else 2 * one
    group = group if group % TILE == 0 else -(-group // step) * step  # of all columns, which may be any number
    sizes = {"BLOCK_M": block_m, "BLOCK_N": outputs, "BLOCK_K": step, "GROUP": group, "EVEN": width % step == 0}
    stages = gemv.staged(outputs * step * bits // 8, block_m * step * 2, out // outputs)
    return {**sizes, "STAGES": stages}, outputs // 32


def variants() -> list[Variant]:
    """8 B parameters in 4 bits by groups of 128 and 32, with offsets; 8 bits per channel and as q8_0; several rows; and
    blocks as GGUF files have them, whose scales are fp16 and offsets fp32, whatever x is."""
    shipped, stored = [], {"scales": "*fp16", "offsets": "*fp32"}
    for rows, out, width, dtype, bits, group, absent, types in (
        (1, 28672, 4096, BF16, 4, 128, "offsets bias", {}),
        (1, 4096, 14336, FP16, 4, 32, "", {}),
        (1, 6144, 4096, BF16, 4, 64, "offsets bias", {}),
        (4, 4096, 4096, BF16, 4, 128, "offsets bias", {}),
        (16, 28672, 4096, BF16, 4, 128, "offsets bias", {}),
        (32, 28672, 4096, BF16, 4, 128, "offsets bias", {}),
        (64, 28672, 4096, BF16, 4, 128, "offsets bias", {}),
        (8, 2048, 2048, FP16, 8, 32, "offsets bias", {}),
        (8, 4096, 4096, FP32, 4, 32, "", {}),
        (1, 4096, 14336, BF16, 8, 14336, "offsets bias", {}),
        (1, 1536, 576, FP32, 8, 32, "offsets bias", {}),
        (2, 28672, 4096, FP32, 4, 128, "", {}),
        (1, 4096, 4096, BF16, 4, 32, "", stored),
        (1, 4096, 14336, BF16, 8, 32, "offsets bias", stored),
    ):
        sizes, warps = _sizes(rows, out, width, bits, group)
        sizes |= {"BITS": bits, **({"M": 1} if rows == 1 else {})}  # Triton takes a 1 as a constant
        types = {"codes": "*i32", **types}
        shipped.append(variant(_linear_kernel, dtype, sizes, "M", "N K", absent, types, warps=warps, stages=1))
    return shipped
