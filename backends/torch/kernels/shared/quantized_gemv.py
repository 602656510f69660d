"""Skinny GEMMs with a quantized W (4- or 8-bit integer codes, FP8 or FP4) on tensor cores: 1 to 64 rows, W read once.

weight = scale · (code − 2^{bits−1}) + offset, codes unsigned, with one scale, and optionally one offset, per `group`
consecutive weights of a row. This covers the GGUF layouts q4_0, q4_1 and q8_0 (groups of 32) and AWQ and GPTQ (arXiv
2306.00978, 2210.17323; groups of 128); a zero point z is the offset scale · (2^{bits−1} − z).

Codes are packed in chunks of 16 words of 32 bits: 4 tiles of 32 codes of 4 bits, or 2 tiles of 32 codes of 8 bits.
Shift 4·s brings 4-bit tile s into the low nibbles of both halves of each word: word i holds codes 2i and 2i + 1 of the
tile, which a thread multiplies as two neighbours in one register. An 8-bit tile is two 4-bit planes: the low nibbles of
tile s at shift 8·s, the high ones at 8·s + 4. So one mask that also sets the exponent makes two operand values:

    bf16: 0x4300 | code = 128 + code,     fp16: 0x6400 | code = 1024 + code, exactly.

For few rows, the added constant times the group's Σ x is subtracted from the sums; Σ x is a product with ones, which
offsets also need. For 16 rows or more, the constant is subtracted from the values before the product. FP8 values, see
`float8`, are packed as 8-bit codes: weight = scale · float. FP4 values, see `float8`, are packed as 4-bit codes: weight
= tensor scale · scale · float, with 8-bit scales.

Scales and offsets are [groups, out]. An fp32 x is split into a sum of three bf16 values, each of which is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .dots import apply_gain, dot_operand, row_moments
from .float8 import (
    FLOAT4,
    FLOAT8,
    SHORT,
    decode_float4,
    decode_scales,
    power_of_byte,
    scale_of_byte,
    unpack_float4,
    unpack_float8,
)
from .launch import INTERPRETER, constant, jit, tl

WORDS = 16  # in a chunk
TILE = 32  # codes that a product takes at a time; groups are multiples of it


def chunk_size(bits: int) -> int:
    """Return the number of codes of `bits` bits in a chunk of 16 words."""
    return WORDS * 32 // bits


def words_per_row(width: int, bits: int) -> int:
    """Return the number of words of a row of `width` codes; the last chunk is padded with zeros."""
    return -(-width // chunk_size(bits)) * WORDS


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return the codes of `packed` [out, words], as i32 [out, width]; the module docstring describes the packing."""
    tiles = packed.unflatten(1, (-1, 1, WORDS)) >> _shifts(bits, packed) & ((1 << bits) - 1) * 0x10001  # two to a word
    codes: torch.Tensor = tiles.view(torch.int16).flatten(1)[:, :width].int()
    return codes


def _shifts(bits: int, packed: torch.Tensor) -> torch.Tensor:
    """Return the right shift of each tile, i32 [tiles, 1], to apply to words [..., 1, WORDS]."""
    return torch.arange(0, 16, bits, dtype=torch.int32, device=packed.device)[:, None]


@constant
def assembly(half: int, less: int) -> str:
    """Return PTX that converts the low 4 bits of both halves of a word to two 16-bit floats of value c + code − less.
    `half` has the bits of c: 0x6400 (fp16, c = 1024) or 0x4300 (bf16, c = 128); `less` is an integer value. Triton's
    own operations would convert the halves separately."""
    two = f"lop3.b32 numbers, $1, 0x000F000F, {half * 0x10001:#x}, 0xEA;"
    if less == 0:
        return f"{{ .reg .b32 numbers; {two} mov.b32 $0, numbers; }}"
    kind, one = ("f16x2", 0x3C003C00) if half == 0x6400 else ("bf16x2", 0x3F803F80)
    bits, bias = (10, 15) if half == 0x6400 else (7, 127)
    power = less.bit_length() - 1
    minus = 0x8000 | (power + bias) << bits | (less - (1 << power)) << bits >> power
    ones = f"mov.b32 one, {one:#x}; mov.b32 minus, {minus * 0x10001:#x};"
    return f"{{ .reg .b32 numbers, one, minus; {two} {ones} fma.rn.{kind} $0, numbers, one, minus; }}"


@jit
def unpack_int4(words, SHIFT: tl.constexpr, HALF: tl.constexpr, LESS: tl.constexpr, DTYPE: tl.constexpr):
    """Return c + code − LESS for the 4-bit codes at bit SHIFT of both halves of words [n, 16], as DTYPE [n, 32] (in the
    interpreter as fp32). c is 1024 if HALF is 0x6400 (fp16), and 128 if it is 0x4300 (bf16)."""
    shifted = words >> SHIFT
    if INTERPRETER:
        pair = (shifted & 0x000F000F) | HALF * 0x10001
    else:
        pair = tl.inline_asm_elementwise(assembly(HALF, LESS), "=r,r", [shifted], tl.int32, is_pure=True, pack=1)
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    numbers = dot_operand(tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]]))
    if INTERPRETER:
        numbers -= LESS
    return numbers


@jit
def as_words(codes):
    """Cast a pointer to codes of any type to a pointer to 32-bit words."""
    return codes.to(tl.pointer_type(tl.int32))


@jit
def code_products(
    x, x_row, codes, scales, offsets, gain, shift, rows, M, N, K, begin, end, eps,
    NORM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return norm(x) Wᵀ, fp32 [BLOCK_M, BLOCK_N], of x [M, K] and `rows` [BLOCK_N] of W [N, K] over columns `begin` to
    `end` − 1. `codes`, `scales` and `offsets` point to the tensors of `Codes`; GROUP is the number of columns per
    scale. With a norm, `begin` is 0 and `end` is K. x_row is the row stride of x; rows from M on repeat the last.
    `begin` and BLOCK_K are multiples of a chunk. EVEN is true if BLOCK_K divides the columns."""
    CHUNK: tl.constexpr = 512 // BITS
    TILES: tl.constexpr = BLOCK_K // 32
    FLOATS: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    SMALL: tl.constexpr = codes.dtype.element_ty == tl.uint8  # floats of 4 bits
    SHORT: tl.constexpr = SMALL and GROUP == 16
    DTYPE: tl.constexpr = tl.float16 if x.dtype.element_ty == tl.float16 else tl.bfloat16
    # Weights are multiplied by their scales before they are summed: for groups of 16, shorter than a tile, and where
    # registers cannot hold the sums of a group next to the totals.
    AT_ONCE: tl.constexpr = SHORT or (SMALL and BLOCK_M == 64 and tl.bfloat16 == DTYPE)
    # Number of tiles after which sums are scaled: those of a group, or of a step where groups are longer.
    DUE: tl.constexpr = TILES if AT_ONCE or GROUP % BLOCK_K == 0 else GROUP // 32 if BLOCK_K % GROUP == 0 else 1
    HALF: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
    ADDED: tl.constexpr = 1024 if tl.float16 == DTYPE else 128  # to a code by HALF
    ZERO: tl.constexpr = ADDED + 8 if BITS == 4 else 17 * ADDED + 128
    CENTRED: tl.constexpr = FLOATS or SMALL or BLOCK_M >= 16  # from then on sums cost more than to subtract from codes
    LESS: tl.constexpr = ADDED + 8 if CENTRED else 0
    PLANES: tl.constexpr = 2 if BITS == 8 and not FLOATS else 1
    COLUMNS: tl.constexpr = BLOCK_M if BLOCK_M >= 8 else 8  # one row of x is multiplied eight times over
    PARTS: tl.constexpr = 3 if x.dtype.element_ty == tl.float32 else 1
    i, j = tl.arange(0, 16), tl.arange(0, 32)
    from_words = (
        as_words(codes) + rows.to(tl.int64)[:, None] * (tl.cdiv(K, CHUNK) * 16) + (begin // CHUNK * 16 + i)[None, :]
    )
    from_x = x + tl.minimum(tl.arange(0, BLOCK_M), M - 1)[:, None] * x_row + (begin + j)[None, :]
    columns = tl.arange(0, 256)
    mean, rstd = (
        row_moments(x + tl.minimum(tl.arange(0, BLOCK_M), M - 1)[:, None] * x_row + columns[None, :], columns[None, :],
                K, eps, BLOCK_M, 256) if NORM == "layer" else (0.0, 1.0)
    )  # fmt: skip
    ones = dot_operand(tl.full([BLOCK_N, 32], 1.0, DTYPE))
    total = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_M, 32], tl.float32)
    for start in tl.range(0, end - begin, BLOCK_K, num_stages=STAGES):
        low = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        high = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        for c in tl.static_range(BLOCK_K // CHUNK):
            at_words = from_words + (start // CHUNK + c) * 16
            if EVEN:
                some = tl.load(at_words, eviction_policy="evict_first")
            else:
                there = (begin + start + c * CHUNK + 0 * i < end)[None, :]
                some = tl.load(at_words, mask=there, other=0, eviction_policy="evict_first")
            for t in tl.static_range(CHUNK // 32):
                k = start + c * CHUNK + t * 32
                v = tl.load(
                    from_x + k, mask=None if EVEN else (begin + k + j < end)[None, :], other=None if EVEN else 0.0
                )
                if NORM != "none":
                    exact, there = v.to(tl.float32), begin + k + j < K
                    if NORM == "rms":
                        squares += exact * exact
                    else:
                        exact = (exact - mean) * rstd
                    v = apply_gain(exact, gain, shift, begin + k + j, None if EVEN else there).to(v.dtype)
                    if NORM == "layer":
                        v = tl.where(there[None, :], v, 0.0)  # codes beyond the columns are not 0 as numbers
                if FLOATS:
                    numbers = unpack_float8(some, t, DTYPE)
                elif SHORT:
                    group = (begin + k) // 16 + i // 8
                    if not EVEN:
                        group = tl.minimum(group, (K - 1) // 16)
                    raw = tl.load(scales.to(tl.pointer_type(tl.uint8)) + group[None, :] * N + rows[:, None])
                    numbers = unpack_float4(some, scale_of_byte(raw, DTYPE), t, DTYPE)
                elif AT_ONCE:
                    group = (begin + k) // GROUP
                    if not EVEN:
                        group = tl.minimum(group, (K - 1) // GROUP)
                    raw = tl.load(scales + group * N + rows)
                    numbers = unpack_float4(some, power_of_byte(raw)[:, None].to(DTYPE), t, DTYPE)
                elif SMALL:
                    numbers = unpack_float4(some, None, t, DTYPE)
                else:
                    numbers = unpack_int4(some, BITS * t, HALF, LESS - 8 if BITS == 8 and CENTRED else LESS, DTYPE)
                if PLANES == 2:
                    upper = unpack_int4(some, BITS * t + 4, HALF, LESS, DTYPE)
                for part in tl.static_range(PARTS):
                    rounded = v.to(DTYPE)
                    turned = tl.trans(tl.broadcast_to(dot_operand(rounded), [COLUMNS, 32]))
                    low = tl.dot(numbers, turned, low)
                    if PLANES == 2:
                        high = tl.dot(upper, turned, high)
                    if not CENTRED or (offsets is not None and not SMALL):
                        sums = tl.dot(ones, turned, sums)
                    if part + 1 < PARTS:
                        v -= rounded.to(tl.float32)
                if (c * (CHUNK // 32) + t + 1) % DUE == 0:
                    row = (begin + k) // GROUP
                    if not EVEN:
                        row = tl.minimum(row, (K - 1) // GROUP)
                    product = low + 16 * high if PLANES == 2 else low
                    if not CENTRED:
                        product -= ZERO * sums
                    if AT_ONCE:
                        total += product
                    else:
                        scale = tl.load(scales + row * N + rows)
                        scale = power_of_byte(scale) if SMALL else scale.to(tl.float32)
                        if (FLOATS or SMALL) and tl.float16 == DTYPE:
                            scale *= 16384 if SMALL else 256
                        total += product * scale[:, None]
                    if offsets is not None and not SMALL:
                        total += sums * tl.load(offsets + row * N + rows).to(tl.float32)[:, None]
                    low = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
                    high = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
                    sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    if SMALL and offsets is not None:
        total *= tl.load(offsets + rows)[:, None]
    y = tl.max(total, axis=1)[None, :] if BLOCK_M == 1 else tl.trans(total)
    return y * tl.rsqrt(tl.sum(squares, axis=1)[:, None] / K + eps) if NORM == "rms" else y


def decode_centred(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return the values of packed codes without scales and offsets, f32 [out, width]: code − 2^{bits−1} for integer
    codes i32 [out, words], and the floats for FP8 or FP4 [out, 4·words]."""
    if packed.dtype == FLOAT4:
        tiles = packed.view(torch.int32).unflatten(1, (-1, 1, WORDS)) >> _shifts(4, packed)
        return decode_float4(tiles).flatten(1)[:, :width]
    if packed.dtype != torch.int32:
        tiles = packed.float().unflatten(1, (-1, WORDS, 2, 2)).permute(0, 1, 4, 2, 3)  # [out, chunks, tiles, WORDS, 2]
        numbers: torch.Tensor = tiles.flatten(1)[:, :width]
        return numbers
    return (unpack(packed, bits, width) - (1 << (bits - 1))).float()


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None, *, bits: int, width: int
) -> torch.Tensor:
    """Return the weights [out, width], f32, of codes, scales and offsets as in `Codes`."""
    numbers = decode_centred(packed, bits, width).unflatten(1, (len(scales), -1))
    if packed.dtype == FLOAT4:
        values: torch.Tensor = numbers * decode_scales(scales, offsets).T[..., None]
        return values.flatten(1)
    weight: torch.Tensor = numbers * scales.T.float()[..., None]
    return (weight if offsets is None else weight + offsets.T.float()[..., None]).flatten(1)


def multiply_dequantized(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """Return x Wᵀ + b with dequantized W, in the dtype of x, computed with torch in f32 (f64 for f64)."""
    weight = dequantize(packed, scales, offsets, bits=bits, width=x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized weight W [out, width], packed for the kernels; words = `words_per_row(width, bits)`.

    | codes | `packed` | `scales` | `offsets` or None |
    |---|---|---|---|
    | integers of `bits` | i32 [out, words] | [groups, out] | [groups, out] |
    | FP8 | float8_e4m3fn [out, 4·words], the bytes of the words | [groups, out] | [groups, out] |
    | FP4 | uint8 [out, 4·words], the same bytes | uint8 (E8M0), or float8_e4m3fn for groups of 16 | [1, out]: factors |

    `otherwise(x, packed, scales, offsets, bias, bits)` computes x Wᵀ + bias where no kernel runs. Raise ValueError if
    shapes or dtypes do not fit.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int
    width: int
    otherwise: Callable[..., torch.Tensor] = multiply_dequantized

    def __post_init__(self) -> None:
        bits, width, out = self.bits, self.width, len(self.packed)
        if bits not in (4, 8):
            raise ValueError(f"codes must have 4 or 8 bits, not {bits}")
        kind, size = torch.int32, words_per_row(width, bits)
        if self.packed.dtype == FLOAT8 and bits == 8:
            kind, size = FLOAT8, 4 * size
        small = self.packed.dtype == FLOAT4 and bits == 4
        if small:
            kind, size = FLOAT4, 4 * size
        if self.packed.dtype != kind or self.packed.shape != (out, size):
            packed_form = f"codes {[*self.packed.shape]} {self.packed.dtype}"
            raise ValueError(f"{packed_form} must be {str(kind)[6:]} [out, {size}] for rows of {width}")
        groups = len(self.scales)
        tile = SHORT if small else TILE
        if self.scales.shape[1:] != (out,) or width % groups or (width // groups % tile and groups > 1):
            raise ValueError(
                f"scales {[*self.scales.shape]} must be [groups, {out}], of groups of a multiple of {tile}"
            )
        wanted = torch.Size([1, out]) if small else self.scales.shape
        if self.offsets is not None and self.offsets.shape != wanted:
            raise ValueError(f"offsets {[*self.offsets.shape]} differ from scales {[*self.scales.shape]}")

    def __len__(self) -> int:
        return self.packed.shape[0]  # `len` of a tensor is Python

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of W, (out, in)."""
        return len(self), self.width

    @property
    def ndim(self) -> int:
        """Return 2, the rank of a matrix."""
        return 2

    @property
    def group(self) -> int:
        """Return the group size: the number of consecutive weights of a row that share a scale."""
        return self.width // len(self.scales)

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """Return the operands of kernels, (packed, scales, offsets or None)."""
        return self.packed, self.scales, self.offsets

    def rows(self, part: slice) -> Codes:
        """Return the rows of W in the slice `part`, as `Codes`."""
        offsets = None if self.offsets is None else self.offsets[:, part].contiguous()
        scales = self.scales[:, part].contiguous()
        return Codes(self.packed[part], scales, offsets, self.bits, self.width, self.otherwise)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x Wᵀ + b, computed with `otherwise`."""
        return self.otherwise(x, *self.parts, bias, self.bits)
