"""Block layouts: how a quantized matrix is stored in blocks, by a checkpoint or by the pass quantize.

A row is split into groups. A group has a scale, optionally a zero point or a minimum, and a code of a few bits for each
element:

    weight[n, k] = scales[n, g] · (codes[n, k] − zeros[n, g]) + offsets[n, g],     g = k // group.

Without zero points, zeros are 2^{bits−1}. Codes may also be floats, of 8 bits (e4m3 of arXiv 2209.05433 without
infinities) or 4 (e2m1, `small_floats`); a weight is then scale · float. Offsets may be stored as integer codes in
groups (`BlockLayout.sums`). A block of a file holds one group, or several (`SuperBlock`).

A layout is data. Each file format registers its `BlockLayout`s by `add_layout`. `build_integer_layout` makes layouts of
integers, to which weft quantizes and which GPTQ, AWQ and other checkpoints contain. `find_layout` finds both kinds.
Kernels and lowerings do not depend on names of layouts: they state the bits, groups, zero points and offsets that they
support. The stored codes of a registered layout have w bits; unpacked codes have `bits`, the smaller of 4 and 8 that is
at least w. Without a minimum, `unpack` adds 2^{bits−1} − 2^{w−1} to each code, so that the code 2^{bits−1} represents 0
in every such layout.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..registry import Registry
from . import dtypes, super_blocks
from .dtypes import DType
from .small_floats import E2M1, decode_scales, encode_scales

Array = np.ndarray[Any, Any]
BITS = (4, 8)  # of codes that `pack_words` and kernels take
INTEGER_BITS = (2, 3, 4, 8)  # of codes of `build_integer_layout`
LARGEST = dtypes.f16  # dtype of the largest scale of a row, where scales are u8


class Blocks(NamedTuple):
    """The unpacked blocks of a matrix; stacked matrices have more leading axes.

    codes: u8 [rows, groups, group], below 2^bits. scales: f32 [rows, groups], already multiplied by `tensor_scales`.
    offsets: f32 [rows, groups] or None. zeros: zero points u8 [rows, groups] or None.
    With `BlockLayout.sums` offsets is None: the last groups of a row of codes, scales and zeros encode the offsets.
    tensor_scales: f32 [rows, 1], the scale of the matrix in a layout with `tensor_scale`, else None.
    """

    codes: Array
    scales: Array
    offsets: Array | None = None
    zeros: Array | None = None
    tensor_scales: Array | None = None


class Packing(NamedTuple):
    """A packing of codes u8 [..., group] into bytes u8 [..., bytes]: the function `pack` and its inverse `unpack`."""

    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


class SuperBlock(NamedTuple):
    """A block of several groups with packed scales. `unpack` maps bytes [..., bytes per block] to (codes u8
    [..., groups, group], scales f32 [..., groups], minima f32 [..., groups] or None)."""

    groups: int
    unpack: Callable[[Array], super_blocks.Groups]


def pack_pairs(codes: Array) -> Array:
    """Pack 4-bit codes u8 [..., n] into bytes [..., ⌈n / 2⌉], the first of a pair in the low half; pad odd n with 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    if codes.flags.c_contiguous:
        pairs = codes.view("<u2")  # the second code of a pair is in the high byte, 4 bits from its packed position
        return np.asarray((pairs | (pairs >> 4)).astype(np.uint8))
    return np.asarray(codes[..., ::2] | (codes[..., 1::2] << 4))


def pack_codes(codes: Array, bits: int) -> Array:
    """Pack codes u8 [..., n] of `bits` each into bytes [..., ⌈n · bits / 8⌉], the lowest bits first."""
    if bits == 8:
        return codes
    if bits == 4:
        return pack_pairs(codes)
    if 8 % bits:
        each = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(each.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    per = 8 // bits
    padded = np.concatenate([codes, np.zeros((*codes.shape[:-1], -codes.shape[-1] % per), np.uint8)], -1)
    shifted = padded.reshape(*codes.shape[:-1], -1, per) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=-1))


def unpack_codes(packed: Array, bits: int, count: int) -> Array:
    """Unpack the first `count` codes u8 [..., count] from bytes u8 [..., n]: the inverse of `pack_codes`."""
    if bits == 8:
        return packed[..., :count]
    if 8 % bits:
        each = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
        return np.packbits(each.reshape(*packed.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]
    shifted = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return shifted.reshape(*packed.shape[:-1], -1)[..., :count]


def pack_words(codes: Array, bits: int) -> Array:
    """Pack the codes u8 [rows, groups, group] of `bits` (4 or 8) each into words i32 [rows, words], in chunks of 16.

    A chunk of 16 words has 16 / bits tiles of 32 codes: codes 2i and 2i + 1 of tile t are in word i, with their lowest
    bits at t · bits and 16 + t · bits. The last chunk is padded with zeros.
    """
    flat = codes.reshape(len(codes), -1).astype(np.uint32)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % (512 // bits))))
    tiles = flat.reshape(len(flat), -1, 16 // bits, 16, 2)
    shifts = np.arange(0, 16, bits, dtype=np.uint32)[:, None, None] + np.array([0, 16], np.uint32)
    words: Array = np.bitwise_or.reduce(np.bitwise_or.reduce(tiles << shifts, axis=4), axis=2)
    return words.reshape(len(flat), -1).view(np.int32)


def unpack_words(words: Array, bits: int) -> Array:
    """Unpack the codes u8 [rows, words · 32 / bits] of `words`, i32 [rows, words]: the inverse of `pack_words`."""
    chunks = np.ascontiguousarray(words).view(np.uint32).reshape(len(words), -1, 1, 16, 1)
    shifts = np.arange(0, 16, bits, dtype=np.uint32)[:, None, None] + np.array([0, 16], np.uint32)
    codes: Array = (chunks >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(len(words), -1)


def _pack_halves(codes: Array) -> Array:
    first, second = np.split(codes, 2, -1)
    return np.asarray(first | (second << 4))


HALVES = Packing(_pack_halves, lambda raw: np.concatenate([raw & 15, raw >> 4], -1))  # low halves first, then high ones
BYTES = Packing(lambda codes: codes, lambda raw: raw)
FIVES = Packing(super_blocks.pack_fives, super_blocks.unpack_fives)
MOVED_FIVES = Packing(  # stored codes of 5 bits represent code − 16; unpacked ones have 8 bits
    lambda codes: super_blocks.pack_fives(codes - np.uint8(128 - 16)),
    lambda raw: super_blocks.unpack_fives(raw) + np.uint8(128 - 16),
)
SIGNED = Packing(lambda codes: codes ^ 128, lambda raw: raw ^ 128)  # stored in two's complement; codes add 128


@dataclass(frozen=True)
class BlockLayout:
    """The layout of the blocks of `dtype`: a scale, a minimum if `has_minimum`, then the codes, packed by `packing`.

    A `SuperBlock` as `packing` describes the entire block instead. Unpacked codes have `code_bits` bits, or, if that
    is 0, `dtype.bits`.

    - scale: the dtype of scale and minimum m. With a minimum a weight is scale · code + m; the offset in the formula of
      the module is then m + scale · 2^{bits−1}.
    - has_zeros: a block ends with its zero point, one byte.
    - floats: codes are floats of 8 or 4 bits, without minimum. The scales of 4-bit floats are 8-bit floats: e8m0 if
      `scale` is u8, else f8e4m3.
    - tensor_scale: scales are multiples of one f32 scale of the matrix. Each row ends with one more block, whose first
      4 bytes are this scale.
    - sums: blocks store no offsets. The offsets of a row are quantized into groups of codes that follow the groups of
      the row; a product multiplies these by the sums of the activations over each group, which are appended to the
      activations. Scales are stored in u8, as 255ths of the largest scale of the row, which is f16.
    """

    dtype: DType
    packing: Packing | SuperBlock
    has_minimum: bool = False
    scale: DType = dtypes.f16
    floats: bool = False
    has_zeros: bool = False
    sums: bool = False
    code_bits: int = 0
    tensor_scale: bool = False

    def __str__(self) -> str:
        return self.dtype.name

    @property
    def bits(self) -> int:
        """Bits of an unpacked code."""
        return self.code_bits or self.dtype.bits

    @property
    def group(self) -> int:
        """Number of adjacent elements of a row that share a scale."""
        return self.dtype.block // (self.packing.groups if isinstance(self.packing, SuperBlock) else 1)

    @property
    def middle(self) -> int:
        """The code 2^{bits−1}, which represents 0 if there is no zero point or offset."""
        return 1 << (self.bits - 1)

    @property
    def scale_dtype(self) -> DType:
        """Dtype that represents every decoded scale exactly."""
        return dtypes.f32 if self.sums or self.small_floats else self.scale

    @property
    def small_floats(self) -> bool:
        """True if codes are 4-bit floats."""
        return self.floats and self.bits == 4

    @property
    def range_dtype(self) -> DType:
        """Dtype whose range limits scales: `scale`, or with `sums` the dtype of the largest scale of a row."""
        return LARGEST if self.sums else self.scale

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of a long row, with scales, minima and zero points (of `bits` bits)."""
        minima = self.has_minimum and not self.sums
        bits = self.bits + (self.scale.bits * (1 + minima) + self.bits * self.has_zeros) / self.group
        return bits * (1 + self.sums / self.group)

    def row_bits(self, width: int) -> float:
        """Return the stored bits of a row of `width` elements, padded to full groups."""
        groups = -(-width // self.group)
        if not self.sums:
            return groups * self.group * self.bits_per_weight + dtypes.f32.bits * self.tensor_scale
        groups += -(-groups // self.group)
        return groups * (self.group * self.bits + self.bits + self.scale.bits) + LARGEST.bits

    def unpack(self, raw: Array) -> Blocks:
        """Unpack stored blocks u8 [rows, blocks, bytes per block], without rounding."""
        if isinstance(self.packing, SuperBlock):
            codes, scales, minima = self.packing.unpack(raw)
            scales = scales.reshape(*raw.shape[:-2], -1)
            offsets = None if minima is None else minima.reshape(scales.shape) + self.middle * scales
            return Blocks(codes.reshape(*scales.shape, self.group), scales, offsets)
        if self.small_floats:
            return self._unpack_floats(raw)
        head = (1 + self.has_minimum) * self.scale.bits // 8
        factors = np.ascontiguousarray(raw[..., :head]).view(self.scale.numpy).astype(np.float32)
        scales = factors[..., 0]
        offsets = factors[..., 1] + self.middle * scales if self.has_minimum else None
        zeros = raw[..., -1] if self.has_zeros else None
        codes = self.packing.unpack(raw[..., head : -1 if self.has_zeros else None])
        return Blocks(codes, scales, offsets, zeros)

    def pack(self, blocks: Blocks) -> Array:
        """Return `blocks` as stored, u8 [rows, blocks, bytes per block]: the inverse of `unpack`, with scales and
        minima rounded. TypeError for blocks of several groups."""
        if isinstance(self.packing, SuperBlock):
            raise TypeError(f"{self} cannot be written, only read: weft chooses no scales of super-blocks")
        if self.small_floats:
            return self._pack_floats(blocks)
        factors = [blocks.scales]
        if blocks.offsets is not None:
            factors.append(blocks.offsets - self.middle * blocks.scales)
        head = np.ascontiguousarray(np.stack(factors, -1).astype(self.scale.numpy)).view(np.uint8)
        last = [] if blocks.zeros is None else [blocks.zeros[..., None]]
        return np.concatenate([head, self.packing.pack(blocks.codes), *last], -1)

    def _unpack_floats(self, raw: Array) -> Blocks:
        assert isinstance(self.packing, Packing)
        tensor_scales = None
        if self.tensor_scale:
            tensor_scales = np.ascontiguousarray(raw[..., -1, :4]).view(np.float32)
            raw = raw[..., :-1, :]
        scales = self.decode_scales(raw[..., 0], tensor_scales)
        return Blocks(self.packing.unpack(raw[..., 1:]), scales, tensor_scales=tensor_scales)

    def _pack_floats(self, blocks: Blocks) -> Array:
        assert isinstance(self.packing, Packing)
        raw = np.concatenate([self.encode_scales(blocks)[..., None], self.packing.pack(blocks.codes)], -1)
        if blocks.tensor_scales is None:
            return raw
        last = np.zeros_like(raw[..., :1, :])
        last[..., 0, :4] = np.ascontiguousarray(blocks.tensor_scales, np.float32).view(np.uint8)
        return np.concatenate([raw, last], -2)

    def encode_scales(self, blocks: Blocks) -> Array:
        """Return the scales of `blocks` of 4-bit floats as they are stored, u8 [rows, groups]."""
        return encode_scales(blocks.scales, self.scale == dtypes.u8, blocks.tensor_scales)

    def decode_scales(self, raw: Array, tensor_scales: Array | None) -> Array:
        """Return the stored scales `raw` u8 [rows, groups] decoded, times `tensor_scales` [rows, 1]: f32."""
        return decode_scales(raw, self.scale == dtypes.u8, tensor_scales)

    @property
    def without_sums(self) -> BlockLayout:
        """This layout with `sums` false: only the groups of codes, without the groups of offsets."""
        return replace(self, sums=False)

    def decode_offsets(self, blocks: Blocks) -> Blocks:
        """Return `blocks`, of a layout with `sums`, with offset codes decoded to `offsets`, f32 [rows, groups]."""
        codes, scales, _, zeros, _ = blocks
        assert zeros is not None
        count = scales.shape[-1] - -(-scales.shape[-1] // (self.group + 1))
        trailing = Blocks(codes[..., count:, :], scales[..., count:], None, zeros[..., count:])
        offsets = self.without_sums.dequantize(trailing)[..., :count]
        return Blocks(codes[..., :count, :], scales[..., :count], offsets, zeros[..., :count])

    def dequantize(self, blocks: Blocks) -> Array:
        """Return the weights that `blocks` represent, f32 [rows, groups · group], padding included."""
        if self.sums:
            blocks = self.decode_offsets(blocks)
        if self.small_floats:
            values = E2M1[blocks.codes]
        elif self.floats:
            values = blocks.codes.view(dtypes.f8e4m3.numpy).astype(np.float32)
        else:
            values = blocks.codes.astype(np.float32)
            values -= self.middle if blocks.zeros is None else blocks.zeros[..., None]
        values *= blocks.scales[..., None]
        if blocks.offsets is not None:
            values += blocks.offsets[..., None]
        return np.asarray(values.reshape(*values.shape[:-2], -1))


@functools.cache
def build_integer_layout(bits: int, group: int, zeros: bool, scale: DType = dtypes.f16) -> BlockLayout:
    """Return the layout of integer codes of `bits` bits in groups of `group`, with zero points if `zeros`.

    Its name is, for example, int4_32, or uint4_32 with zero points; the scale dtype is appended unless it is f16.
    """
    name = f"{'u' * zeros}int{bits}_{group}{'' if scale == dtypes.f16 else f'_{scale}'}"
    block_bytes = scale.bits // 8 + -(-group * bits // 8) + zeros
    packing = Packing(lambda codes: pack_codes(codes, bits), lambda raw: unpack_codes(raw, bits, group))
    return BlockLayout(DType(name, "block", bits, group, block_bytes), packing, scale=scale, has_zeros=zeros)


@functools.cache
def build_offset_layout(bits: int, group: int) -> BlockLayout:
    """Return the layout of integer codes with zero points and `sums`, called, for example, uint4_32_sums."""
    integers = build_integer_layout(bits, group, True)
    dtype = DType(f"{integers}_sums", "block", bits, group, integers.dtype.block_bytes)
    return BlockLayout(dtype, integers.packing, has_minimum=True, scale=dtypes.u8, has_zeros=True, sums=True)


def find_largest_scales(scales: Array) -> Array:
    """Return the largest scale of each row of `scales` [rows, groups], f16 [rows, 1]."""
    return np.asarray(scales.max(-1, keepdims=True).astype(LARGEST.numpy))


def encode_scale_levels(scales: Array, largest: Array) -> Array:
    """Return scales ≥ 0, f32 [rows, groups], as 255ths of `largest` [rows, 1], rounded to u8, at least 1 if not 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.rint(scales / (largest.astype(np.float32) / np.float32(255)))
    return np.where(scales > 0, levels.clip(1, 255), 0).astype(np.uint8)


def decode_scale_levels(levels: Array, largest: Array) -> Array:
    """Return the scales f32 [rows, groups] that `levels` u8 represent: the inverse of `encode_scale_levels`."""
    return np.asarray(levels * (largest.astype(np.float32) / np.float32(255)))


LAYOUTS: Registry[BlockLayout] = Registry("block layout", __name__, "see docs/extending.md")  # by the name of the dtype


def add_layout(layout: BlockLayout) -> None:
    """Register `layout`, so that weights which a checkpoint stores in blocks of its dtype can keep these blocks."""
    LAYOUTS.add(layout.dtype.name, layout)


# Layouts of the GGUF specification with integer codes. The scales of K-quants are products, exact in f32.
add_layout(BlockLayout(dtypes.q4_0, HALVES))
add_layout(BlockLayout(dtypes.q4_1, HALVES, has_minimum=True))
add_layout(BlockLayout(dtypes.q5_0, MOVED_FIVES, code_bits=8))
add_layout(BlockLayout(dtypes.q5_1, FIVES, has_minimum=True, code_bits=8))
add_layout(BlockLayout(dtypes.q8_0, SIGNED))
for _dtype, _groups, _unpack, _has_minimum, _bits in (
    (dtypes.q2_k, 16, super_blocks.unpack_q2_k, True, 4),
    (dtypes.q3_k, 16, super_blocks.unpack_q3_k, False, 4),
    (dtypes.q4_k, 8, super_blocks.unpack_q4_k, True, 4),
    (dtypes.q5_k, 8, super_blocks.unpack_q5_k, True, 8),
    (dtypes.q6_k, 16, super_blocks.unpack_q6_k, False, 8),
):
    add_layout(BlockLayout(_dtype, SuperBlock(_groups, _unpack), _has_minimum, dtypes.f32, code_bits=_bits))
# Folders of Hugging Face: a scale for a tile of 128 · 128, repeated here for every row of the tile.
add_layout(BlockLayout(dtypes.f8e4m3_128, BYTES, scale=dtypes.f32, floats=True))
# OCP Microscaling Formats 1.0, in the order of GGUF files, and the format of NVIDIA's Blackwell. The blocks that GGUF
# calls NVFP4 are different: four groups of 16.
add_layout(BlockLayout(dtypes.mxfp4, HALVES, scale=dtypes.u8, floats=True))
PAIRS = Packing(pack_pairs, lambda raw: unpack_codes(raw, 4, 2 * raw.shape[-1]))
NVFP4 = DType("nvfp4", "block", 4, block=16, block_bytes=9)
add_layout(BlockLayout(NVFP4, PAIRS, scale=dtypes.f8e4m3, floats=True, tensor_scale=True))


_INTEGER = re.compile(r"(u?)int([2348])_([1-9]\d{0,8})(?:_(bf16|f32))?")


def find_layout(dtype: DType) -> BlockLayout | None:
    """Return the layout of blocks of `dtype`, registered or of integer codes; None if `dtype` has none."""
    layout = LAYOUTS.get(dtype.name)
    if layout is None and (match := _INTEGER.fullmatch(dtype.name)) is not None:
        zeros, bits, group, scale = match.groups()
        layout = build_integer_layout(int(bits), int(group), bool(zeros), dtypes.parse(scale or "f16"))
    return layout if layout is None or layout.dtype == dtype else None
