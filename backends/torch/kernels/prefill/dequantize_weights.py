"""Dequantization of packed weights for GEMMs of many rows: each code is read once, each value written once."""

from __future__ import annotations

from typing import Any

import torch

from ..shared import launch
from ..shared.float8 import FLOAT8, float8_to, power_of_byte, unpack_float4, unpack_float8
from ..shared.launch import jit, start_next, tl, triton, uses_torch, wait_for_previous
from ..shared.operands import gradient_refusal
from ..shared.quantized_gemv import Codes, as_words, chunk_size, dequantize, unpack_int4

ROWS, CHUNKS = 32, 2  # of a program


@jit
def dequantize_kernel(
    y, codes, scales, offsets, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Dequantize CHUNKS chunks (see `shared.quantized_gemv`) of ROWS rows of W into y [N, K]. Grid [blocks of rows,
    blocks of chunks]."""
    start_next(PDL)
    wait_for_previous(PDL)
    CHUNK: tl.constexpr = 512 // BITS
    FLOATS: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    SMALL: tl.constexpr = codes.dtype.element_ty == tl.uint8  # floats of 4 bits
    HALF: tl.constexpr = tl.float16 if y.dtype.element_ty == tl.float16 else tl.bfloat16
    ADDED: tl.constexpr = 1024 if tl.float16 == HALF else 128
    EXPONENT: tl.constexpr = 0x6400 if tl.float16 == HALF else 0x4300
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = tl.arange(0, 16), tl.arange(0, 32)
    chunks = tl.cdiv(K, CHUNK)
    from_words = as_words(codes) + row.to(tl.int64)[:, None] * (chunks * 16) + i[None, :]
    for c in tl.static_range(CHUNKS):
        at = tl.program_id(1) * CHUNKS + c
        some = tl.load(from_words + at * 16, mask=(row < N)[:, None] & (at + 0 * i < chunks)[None, :], other=0)
        for t in tl.static_range(CHUNK // 32):
            k = at * CHUNK + t * 32
            if FLOATS:
                numbers = unpack_float8(some, t, HALF).to(tl.float32)
                if tl.float16 == HALF:
                    numbers *= 256
            elif SMALL:
                numbers = unpack_float4(some, None, t, HALF).to(tl.float32)
                if tl.float16 == HALF:
                    numbers *= 16384
            elif BITS == 8:
                low = unpack_int4(some, 8 * t, EXPONENT, ADDED, HALF)
                high = unpack_int4(some, 8 * t + 4, EXPONENT, ADDED + 8, HALF)
                numbers = low.to(tl.float32) + 16 * high.to(tl.float32)
            else:
                numbers = unpack_int4(some, 4 * t, EXPONENT, ADDED + 8, HALF).to(tl.float32)
            if SMALL and GROUP == 16:
                groups = tl.minimum(k + j, K - 1) // 16
                each = tl.load(scales + groups[None, :] * N + row[:, None], mask=(row < N)[:, None], other=0.0)
                numbers *= float8_to(each, tl.float32)
            else:
                group = tl.minimum(k, K - 1) // GROUP
                scale = tl.load(scales + group * N + row, mask=row < N, other=0)
                numbers *= (power_of_byte(scale) if SMALL else scale.to(tl.float32))[:, None]
            if SMALL:
                if offsets is not None:
                    numbers *= tl.load(offsets + row, mask=row < N, other=0.0)[:, None]
            elif offsets is not None:
                numbers += tl.load(offsets + group * N + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
            there = (row < N)[:, None] & (k + j < K)[None, :]
            tl.store(y + row.to(tl.int64)[:, None] * K + (k + j)[None, :], numbers, mask=there)


def refusal(weight: Codes, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel cannot dequantize `weight` to `dtype`; None if it can."""
    parts = [part for part in weight.parts if part is not None]
    if reason := launch.refusal(weight.packed, any(part.dtype == FLOAT8 for part in parts), dtype):
        return reason
    if not all(part.is_contiguous() for part in parts):
        return "an operand is not contiguous"
    return gradient_refusal(*parts)


def can_dequantize(weight: Codes, dtype: torch.dtype) -> bool:
    """Return whether the kernel can dequantize `weight` to `dtype`."""
    return refusal(weight, dtype) is None


def dequantize_weights(weight: Codes, dtype: torch.dtype, *, kernel: bool | None = None) -> torch.Tensor:
    """Return `weight` [out, in], dequantized in fp32 and rounded to `dtype`. `kernel` is as in `uses_torch`."""
    packed, scales, offsets = weight.parts
    K = weight.width
    if uses_torch(kernel, refusal, weight, dtype):
        return dequantize(packed, scales, offsets, bits=weight.bits, width=K).to(dtype)
    return dequantize_codes(packed, scales, offsets, weight.bits, K, dtype)


def _empty(packed: torch.Tensor, *more: Any) -> torch.Tensor:
    *_, width, dtype = more
    return packed.new_empty(len(packed), width, dtype=dtype)


@launch.custom_operator(_empty)
def dequantize_codes(
    packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bits: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the dequantized W [out, width], in `dtype`, of the fields of a `Codes`, computed with the kernel."""
    y = _empty(packed, width, dtype)
    grid = (triton.cdiv(len(y), ROWS), triton.cdiv(width, CHUNKS * chunk_size(bits)))
    constants = {"BITS": bits, "GROUP": width // len(scales), "ROWS": ROWS, "CHUNKS": CHUNKS}
    dequantize_kernel[grid](y, packed, scales, offsets, *y.shape, **constants, **launch.options(packed, 4, 1))
    return y
