"""Exact conversion of FP8 (e4m3 of arXiv 2209.05433: no infinities, largest 448) and FP4 (e2m1) to fp16 and bf16.

Moving sign, exponent and fraction bits to their places in a 16-bit float multiplies the value by a power of 2, because
the exponent biases differ: 7 in e4m3, 15 in fp16, 127 in bf16. So fp16 holds 2⁻⁸ of the value, and the caller corrects
the sum; bf16 holds 2⁻¹²⁰, too small to be summed, so it is multiplied by 2¹²⁰ at once. Both are exact and take two to
three instructions for two values; the conversions of the hardware go through fp16 and fp32 to bf16.

FP4 (e2m1) is converted in the same way: its exponent bias is 1, so fp16 holds 2⁻¹⁴ of the value and bf16 2⁻¹²⁶. Groups
of FP4 values have 8-bit scales: powers of two, e8m0 (mxfp4), or e4m3 (nvfp4). The product of an e2m1 and an e4m3 has 6
significant bits, so it is exact in fp16 and bf16.
"""

from __future__ import annotations

import torch

from .dots import dot_operand
from .launch import INTERPRETER, constant, constexpr, jit, tl

FLOAT8 = torch.float8_e4m3fn
FLOAT4 = torch.uint8  # the type that tells codes of floats of 4 bits from integers: the bytes of words
SHORT = 16  # group of nvfp4; others are multiples of a tile
LARGEST = 448.0
_LARGEST = constexpr(LARGEST)


@constant
def float_assembly(tile: int, half: bool) -> str:
    """Return PTX that converts two FP8 values of a 32-bit word, to fp16 if `half`, else to bf16. The values are the low
    (`tile` 0) or high (`tile` 1) bytes of the word's halves. The results in fp16 are 2⁻⁸ of the values."""
    shift, mask = (7, 0x3F803F80) if half else (4, 0x07F007F0)
    shifts = f"shl.b32 numbers, $1, {shift}; shl.b32 signs, $1, 8;"
    if tile == 1:
        shifts = f"shr.b32 numbers, $1, {8 - shift}; mov.b32 signs, $1;"
    merged = f"{shifts} and.b32 signs, signs, 0x80008000; lop3.b32 numbers, numbers, {mask:#x}, signs, 0xEA;"
    if half:
        return f"{{ .reg .b32 numbers, signs; {merged} mov.b32 $0, numbers; }}"
    power = "mov.b32 power, 0x7B807B80; mov.b32 zero, 0x80008000;"  # 2^120 and −0, twice
    return f"{{ .reg .b32 numbers, signs, power, zero; {merged} {power} fma.rn.bf16x2 $0, numbers, power, zero; }}"


@jit
def unpack_float8(words, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the FP8 values of tile TILE (0 or 1) of words [n, 16] as DTYPE [n, 32], in the interpreter as fp32. If
    DTYPE is fp16, the results are 2⁻⁸ of the values."""
    if INTERPRETER:
        shifted = words if TILE == 1 else words << 8
        signs = shifted & -0x7FFF8000
        if tl.float16 == DTYPE:
            pair = signs | ((shifted >> 1) & 0x3F803F80)
        else:  # it takes the smallest of bf16 for 0
            pair = signs | ((shifted >> 4) & 0x07F007F0)
            low = (pair << 16).to(tl.float32, bitcast=True) * 1.329227995784916e36
            high = (pair & -0x10000).to(tl.float32, bitcast=True) * 1.329227995784916e36
            return tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]])
    else:
        pair = tl.inline_asm_elementwise(
            float_assembly(TILE, tl.float16 == DTYPE), "=r,r", [words], tl.int32, is_pure=True, pack=1
        )
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return dot_operand(tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]]))


@constant
def float4_assembly(tile: int, half: bool) -> str:
    """Return PTX that converts two FP4 values of a 32-bit word, to fp16 if `half`, else to bf16. The values are bits
    4·`tile` to 4·`tile` + 3 (`tile` 0 to 3) of the word's halves. The results in fp16 are 2⁻¹⁴ of the values."""
    shift, mask = (9 - 4 * tile, 0x0E000E00) if half else (6 - 4 * tile, 0x01C001C0)
    shifts = f"{'shl' if shift > 0 else 'shr'}.b32 numbers, $1, {abs(shift)}; shl.b32 signs, $1, {12 - 4 * tile};"
    merged = f"{shifts} and.b32 signs, signs, 0x80008000; lop3.b32 numbers, numbers, {mask:#x}, signs, 0xEA;"
    if half:
        return f"{{ .reg .b32 numbers, signs; {merged} mov.b32 $0, numbers; }}"
    power = "mov.b32 power, 0x7E807E80; mov.b32 zero, 0x80008000;"  # 2^126 and −0, twice
    return f"{{ .reg .b32 numbers, signs, power, zero; {merged} {power} fma.rn.bf16x2 $0, numbers, power, zero; }}"


@jit
def unpack_float4(words, factors, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the FP4 values of tile TILE (0 to 3) of words [n, 16], times `factors` [n, 16] or [n, 1] of DTYPE, as
    DTYPE [n, 32], in the interpreter as fp32. If `factors` is None and DTYPE is fp16, the results are 2⁻¹⁴ of the
    values."""
    if INTERPRETER:
        shifted = words >> (4 * TILE)
        signs, rest = (shifted & 0x00080008) << 12, shifted & 0x00070007
        if tl.float16 == DTYPE:
            pair = signs | (rest << 9)
            low = pair.to(tl.int16).to(DTYPE, bitcast=True)
            high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        else:  # it takes the smallest of bf16 for 0
            pair = signs | (rest << 6)
            low = (pair << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37
            high = (pair & -0x10000).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        pair = tl.inline_asm_elementwise(
            float4_assembly(TILE, tl.float16 == DTYPE), "=r,r", [words], tl.int32, is_pure=True, pack=1
        )
        low = pair.to(tl.int16).to(DTYPE, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    if factors is not None:
        if tl.float16 == DTYPE:
            low, high = low * 16384, high * 16384
        low, high = low * factors, high * factors
    return dot_operand(tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]]))


@jit
def scale_of_byte(x, DTYPE: tl.constexpr):
    """Convert byte x, a non-negative e4m3 scale, to DTYPE; the interpreter returns fp32 instead of bf16."""
    if tl.float16 == DTYPE:
        return (x.to(tl.int16) << 7).to(DTYPE, bitcast=True) * 256
    if INTERPRETER:
        return (x.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return (x.to(tl.int16) << 4).to(DTYPE, bitcast=True) * 1.329227995784916e36


@jit
def power_of_byte(x):
    """Convert byte x, an e8m0 scale, to 2^(x − 127) in fp32."""
    return tl.maximum(x.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


@jit
def round_float8(x):
    """Clamp fp32 x to ±448 and round it to the nearest FP8 value (float8e4nv), ties to even."""
    x = tl.clamp(x, -_LARGEST, _LARGEST)
    if INTERPRETER:  # it loses the carry of a fraction that is rounded up to the next power of 2
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return x.to(tl.float8e4nv)


@jit
def float8_to(x, DTYPE: tl.constexpr):
    """Convert FP8 to DTYPE (to fp32 in the interpreter), exactly."""
    if INTERPRETER:
        bits = x.to(tl.int8, bitcast=True).to(tl.int32)
        return ((bits & -0x80000000) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return x.to(DTYPE)


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """Clamp x to ±448 and round it to the nearest float8_e4m3fn, ties to even, with torch."""
    return x.float().clamp(-LARGEST, LARGEST).to(FLOAT8)


def as_bytes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x [batch, heads, seq, width] / `scale` [heads], rounded to FP8, as the bytes (u8) that a cache stores."""
    return to_float8(x.float() / scale[:, None, None]).view(torch.uint8)


def from_bytes(held: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize cached FP8 bytes `held`, u8 [batch, heads, seq, width], with `scale` [heads], to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return (held.view(FLOAT8).to(wide) * scale[:, None, None].to(wide)).to(dtype)


def decode_float4(words: torch.Tensor) -> torch.Tensor:
    """Return the FP4 values in the low 4 bits of the two 16-bit halves of `words` i32 [..., n], as f32 [..., 2·n]."""
    halves = (words & 0x00080008) << 12 | (words & 0x00070007) << 9
    numbers: torch.Tensor = halves.view(torch.float16).float().mul_(2.0**14)
    return numbers


def decode_scales(scales: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
    """Return FP4 scales [groups, out] (float8_e4m3fn, or e8m0 as uint8) as f32, times `whole` [1, out] if given."""
    exact = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    numbers: torch.Tensor = exact.float()
    return numbers if whole is None else numbers * whole


def check_scales(k: torch.Tensor, v: torch.Tensor, *scales: torch.Tensor | None) -> None:
    """Check that caches k and v [batch, heads, capacity, width] fit the two FP8 `scales`, of keys and of values. Accept
    any caches if both scales are None. Raise ValueError if only one is given, scales are not f32 (or f64) [heads], or a
    cache with scales is not uint8."""
    parts = [scale for scale in scales if scale is not None]
    if not parts:
        return
    if len(parts) != 2 or any(s.shape != k.shape[1:2] or s.dtype not in (torch.float32, torch.float64) for s in parts):
        shapes = " and ".join(f"{[*s.shape]} {s.dtype}" for s in parts)
        raise ValueError(f"scales {shapes} are not float32 [{k.shape[1]}] for keys and for values")
    if {k.dtype, v.dtype} != {torch.uint8}:
        raise ValueError(f"caches with scales must be uint8, not {k.dtype} and {v.dtype}")
