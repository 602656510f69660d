"""y = x Wᵀ + b for up to 8 rows x and W of 4 or 8 bits with a scale per group of weights, read once.

weight = scale · (code − 2^{bits−1}) + offset, codes unsigned, with one scale, and maybe one offset, for each `group`
consecutive weights of a row; one group per row is per-channel quantization. This covers the GGUF layouts q4_0, q4_1 and
q8_0 (groups of 32) and AWQ and GPTQ (arXiv 2306.00978, 2210.17323; groups of 128), a zero point z being the offset
scale · (2^{bits−1} − z).

Codes are packed into 32-bit words, 32/bits to a word. A group of G weights fills R = G·bits/32 words: code s of word i
(bits s·bits and up) is its weight s·R + i. So the weights that a thread unpacks from neighbouring words with one shift
and mask meet neighbouring x. Scales and offsets lie as [groups, out]: a block of outputs reads them side by side.

A code becomes a number without a conversion, of which a GPU does few: put into the low bits of the float 2²³ it is
2²³ + code, exactly. Left at its place in the word it is 2²³ + code·2^p; then 2²³ + 2^{p+bits−1} is subtracted, and the
2^p taken from x instead. That is a mask, a subtraction and a multiply-add per weight, and a shift per word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from .shared import gemv
from .shared.launch import BF16, FP16, FP32, Variant, jit, options, start_next, tl, triton, uses_torch, variant, wait
from .shared.operands import contiguous, gradient_refusal, power_of_2


@jit
def _words(codes, n, N, start, words, BLOCK_B: tl.constexpr):
    """Words `start` onward of rows n of W, four for each thread: i32 [1, BLOCK_N, BLOCK_B, 4]."""
    at = start + tl.arange(0, BLOCK_B)[:, None] * 4 + tl.arange(0, 4)[None, :]
    row = codes + n.to(tl.int64)[:, None, None] * words
    there = (n < N)[:, None, None] & (at < words)[None, :, :]
    return tl.load(row + at[None, :, :], mask=there, other=0, eviction_policy="evict_first")[None]


@jit
def _spread(values, start, n, N, words, RUN: tl.constexpr, BLOCK_B: tl.constexpr):
    """Load what belongs to the groups of four words each, of [groups, N]: fp32 [1, BLOCK_N, BLOCK_B]."""
    at = start + tl.arange(0, BLOCK_B) * 4
    there = (n < N)[:, None] & (at < words)[None, :]
    return tl.load(values + (at // RUN)[None, :] * N + n[:, None], mask=there, other=0.0).to(tl.float32)[None]


@jit
def _linear_kernel(
    x, codes, scales, offsets, bias, y, M, N, K, GROUP: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows; x [M, K], codes [N, K·BITS/32], scales and offsets [K/GROUP, N]."""
    start_next(PDL)
    PER: tl.constexpr = 32 // BITS  # codes in a word
    RUN: tl.constexpr = GROUP // PER  # words in a group
    words = K // (4 * PER) * 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    some = _words(codes, n, N, 0, words, BLOCK_B)
    wait(PDL)
    m = tl.minimum(tl.arange(0, BLOCK_M), M - 1)[:, None, None, None]
    four = (tl.arange(0, BLOCK_B)[:, None] * 4 + tl.arange(0, 4)[None, :])[None, None, :, :]
    total = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, words, 4 * BLOCK_B):
        more = _words(codes, n, N, start + 4 * BLOCK_B, words, BLOCK_B)
        at = start + four
        from_x = x + m * K + at // RUN * GROUP + at % RUN
        part = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_B, 4], tl.float32)
        sums = tl.zeros([BLOCK_M, 1, BLOCK_B, 4], tl.float32)
        for s in tl.static_range(PER):
            move = 0 if (s + 1) * BITS <= 23 else 16  # the upper codes are brought into the 23 bits of a float
            place = s * BITS - move
            code = ((some >> move) & (((1 << BITS) - 1) << place)) | 0x4B000000
            number = code.to(tl.float32, bitcast=True) - (8388608.0 + (1 << (place + BITS - 1)))
            v = tl.load(from_x + s * RUN, mask=at < words, other=0.0).to(tl.float32)
            part += number * (v * (1.0 / (1 << place)))
            if offsets is not None:
                sums += v
        total += tl.sum(part, axis=3) * _spread(scales, start, n, N, words, RUN, BLOCK_B)
        if offsets is not None:
            total += tl.sum(sums, axis=3) * _spread(offsets, start, n, N, words, RUN, BLOCK_B)
        some = more
    out = tl.sum(total, axis=2)
    if bias is not None:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    m = tl.arange(0, BLOCK_M)[:, None]
    tl.store(y + m * N + n[None, :], out.to(y.dtype.element_ty), mask=(m < M) & (n < N)[None, :])


def unpack(words: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The codes [out, in], i32, that are packed in `words` [out, in·bits/32]; the module says how."""
    runs = words.reshape(len(words), -1, 1, group * bits // 32)
    codes = (runs >> torch.arange(0, 32, bits, device=words.device)[:, None]) & ((1 << bits) - 1)
    return codes.flatten(1)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None, *, bits: int
) -> torch.Tensor:
    """The weights [out, in], f32, of words [out, in·bits/32] and scales and offsets [groups, out]."""
    width = codes.shape[1] * 32 // bits
    group = width // len(scales)
    numbers = (unpack(codes, bits, group) - (1 << (bits - 1))).float().reshape(len(codes), -1, group)
    weight = numbers * scales.T.float()[..., None]
    return (weight if offsets is None else weight + offsets.T.float()[..., None]).flatten(1)


def _bits(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bias: torch.Tensor | None
) -> int:
    """Check that operands fit, and return how many bits a code has."""
    (out, words), width = codes.shape, x.shape[-1]
    bits = 32 * words // width
    if bits not in (4, 8) or 32 * words % width or codes.dtype != torch.int32:
        raise ValueError(
            f"codes {[*codes.shape]} {codes.dtype} must be int32 [out, {width}·bits/32] for x {[*x.shape]}"
        )
    group = width // len(scales)
    if scales.shape[1:] != (out,) or width % len(scales) or group % (128 // bits):
        raise ValueError(f"scales {[*scales.shape]} must be [groups, {out}], of groups of a multiple of {128 // bits}")
    if offsets is not None and offsets.shape != scales.shape:
        raise ValueError(f"offsets {[*offsets.shape]} differ from scales {[*scales.shape]}")
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"bias {[*bias.shape]} must be [{out}]")
    return bits


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
    otherwise: Callable[..., torch.Tensor] | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """x Wᵀ + b: x [..., in], codes i32 [out, in·bits/32], scales and offsets [in/group, out], bias [out] → [..., out].

    Bits and group follow from the shapes; see the module for the layout. Sums are fp32, and only the result is rounded.
    `kernel`: see `uses_torch`; torch computes in f32 (f64 for f64), or what `otherwise` does.

    Raises:
        ValueError: the shapes do not fit.
    """
    bits = _bits(x, codes, scales, offsets, bias)
    if uses_torch(kernel, refusal, x, codes, bias, scales, offsets):
        if otherwise is not None:
            return otherwise(x, codes, scales, offsets, bias)
        weight, wide = dequantize(codes, scales, offsets, bits=bits), torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
    width, out = x.shape[-1], len(codes)
    rows = x.reshape(-1, width).contiguous()
    scales, offsets = scales.contiguous(), contiguous(offsets)
    y = x.new_empty(*x.shape[:-1], out)
    sizes, warps = _sizes(len(rows), out, width, bits)
    _linear_kernel[(triton.cdiv(out, sizes["BLOCK_N"]),)](
        rows, codes, scales, offsets, bias, y, len(rows), out, width, GROUP=width // len(scales), BITS=bits, **sizes,
        **options(x, warps, 1),
    )  # fmt: skip
    return y


reference = partial(quantized_linear, kernel=False)


def _sizes(rows: int, out: int, width: int, bits: int) -> tuple[dict[str, int], int]:
    """The constants that shape a block, and its warps: these share a row of W, as many as leave few lanes idle.

    Outputs: 8 for a row of x, fewer where registers would not hold them, or where multiprocessors would be left with
    less than two blocks.
    """
    warps = next(w for w in (4, 2, 1) if w == 1 or -width % (4096 // bits * w) <= width // 8)
    block_m = power_of_2(rows)
    outputs = next(r for r in (8, 4, 2, 1) if r == 1 or (r * block_m <= 8 and out // r >= 2 * gemv.PROCESSORS))
    return {"BLOCK_M": block_m, "BLOCK_N": outputs, "BLOCK_B": 32 * warps}, warps


def variants() -> list[Variant]:
    """8 B parameters in 4 bits by groups of 128 and 32, with offsets; 8 bits per channel and as q8_0; several rows; and
    blocks as GGUF files have them, whose scales are fp16 and offsets fp32, whatever x is."""
    shipped, stored = [], {"scales": "*fp16", "offsets": "*fp32"}
    for rows, out, width, dtype, bits, group, absent, types in (
        (1, 28672, 4096, BF16, 4, 128, "offsets bias", {}),
        (1, 4096, 14336, FP16, 4, 32, "", {}),
        (1, 6144, 4096, BF16, 4, 64, "offsets bias", {}),
        (4, 4096, 4096, BF16, 4, 128, "offsets bias", {}),
        (2, 6144, 4096, BF16, 4, 128, "offsets bias", {}),
        (8, 2048, 2048, FP16, 8, 32, "offsets bias", {}),
        (8, 4096, 4096, FP32, 4, 32, "", {}),
        (1, 4096, 14336, BF16, 8, 14336, "offsets bias", {}),
        (1, 1536, 576, FP32, 8, 32, "offsets bias", {}),
        (2, 28672, 4096, FP32, 4, 128, "", {}),
        (1, 4096, 4096, BF16, 4, 32, "", stored),
        (1, 4096, 14336, BF16, 8, 32, "offsets bias", stored),
    ):
        sizes, warps = _sizes(rows, out, width, bits)
        sizes |= {"GROUP": group, "BITS": bits, **({"M": 1} if rows == 1 else {})}  # Triton takes a 1 as a constant
        types = {"codes": "*i32", **types}
        shipped.append(variant(_linear_kernel, dtype, sizes, "M", "N K", absent, types, warps=warps, stages=1))
    return shipped
