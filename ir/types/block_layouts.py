"""Block layouts: how a checkpoint stores a matrix as quantized blocks.

A row is cut into groups. A group has a scale, perhaps a minimum, and a code of a few bits for every number:

    weight[n, k] = scales[n, g] · (codes[n, k] − 2^{bits−1}) + offsets[n, g],     g = k // group.

Or the codes are floats of 8 bits, e4m3 of arXiv 2209.05433 without infinities, and a weight is scale · float.
A layout is data: a new one is one `BlockLayout`, registered by `add_layout`. Kernels and lowerings never ask for a
layout by name, they say which groups and offsets they take, of codes of 4 or 8 bits. Those are the bits of an unpacked
code: a layout with codes of w bits declares the smallest of 4 and 8 that holds them. If it has no minimum, `unpack`
adds 2^{bits−1} − 2^{w−1}, so that the same code stands for 0. A zero point z is the minimum −scale·z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..registry import Registry
from . import dtypes
from .dtypes import DType

Array = np.ndarray[Any, Any]
BITS = (4, 8)  # of codes that `pack_words` and kernels take


class Blocks(NamedTuple):
    """A matrix: codes u8 [rows, groups, group] below 2^bits, scales f32 [rows, groups], offsets alike or None."""

    codes: Array
    scales: Array
    offsets: Array | None = None


class Packing(NamedTuple):
    """Bit layout of the codes [..., group] of a group in its bytes [..., bytes]."""

    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


def pack_pairs(codes: Array) -> Array:
    """Put pairs of 4-bit codes along the last axis into one byte, the first in the low half; an odd one gets a 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    packed: Array = codes[..., ::2] | (codes[..., 1::2] << 4)
    return packed


def pack_words(codes: Array, bits: int) -> Array:
    """Put the codes u8 [rows, groups, group] of `bits` each into words, i32 [rows, words], in chunks of 16 words.

    A chunk holds tiles of 32 codes, 4 tiles of 4 bits or 2 of 8: codes 2i and 2i + 1 of tile t stand in word i, from
    bits t · bits and 16 + t · bits on. The last chunk is filled up with zeros.
    """
    flat = codes.reshape(len(codes), -1).astype(np.uint32)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % (512 // bits))))
    tiles = flat.reshape(len(flat), -1, 16 // bits, 16, 2)
    shifts = np.arange(0, 16, bits, dtype=np.uint32)[:, None, None] + np.array([0, 16], np.uint32)
    words: Array = np.bitwise_or.reduce(np.bitwise_or.reduce(tiles << shifts, axis=4), axis=2)
    return words.reshape(len(flat), -1).view(np.int32)


def _pack_halves(codes: Array) -> Array:
    first, second = np.split(codes, 2, -1)
    packed: Array = first | (second << 4)
    return packed


HALVES = Packing(_pack_halves, lambda raw: np.concatenate([raw & 15, raw >> 4], -1))  # low halves first, then high ones
BYTES = Packing(lambda codes: codes, lambda raw: raw)
SIGNED = Packing(lambda codes: codes ^ 128, lambda raw: raw ^ 128)  # two's complement; codes are that plus 128


@dataclass(frozen=True)
class BlockLayout:
    """The layout of the blocks of `dtype`: a scale, a minimum if `has_minimum`, then the codes as `packing` says.

    Scale and minimum m are stored in the dtype `scale`. With a minimum a weight is scale · code + m, so that the offset
    of the module's formula is m + scale · 2^{bits−1}. `floats` says that codes are floats, of 8 bits, without minimum.
    """

    dtype: DType
    packing: Packing
    has_minimum: bool = False
    scale: DType = dtypes.f16
    floats: bool = False

    def __str__(self) -> str:
        return self.dtype.name

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.dtype.bits

    @property
    def group(self) -> int:
        """Number of elements in a row that share a scale."""
        return self.dtype.block

    def unpack(self, raw: Array) -> Blocks:
        """Take blocks apart, u8 [rows, groups, bytes of a block], exactly."""
        head = (1 + self.has_minimum) * self.scale.bits // 8
        numbers = np.ascontiguousarray(raw[..., :head]).view(self.scale.numpy).astype(np.float32)
        scales = numbers[..., 0]
        offsets = numbers[..., 1] + (1 << (self.bits - 1)) * scales if self.has_minimum else None
        return Blocks(self.packing.unpack(raw[..., head:]), scales, offsets)

    def pack(self, blocks: Blocks) -> Array:
        """Put blocks together as they are stored: the inverse of `unpack`, but for rounding scales and minima."""
        numbers = [blocks.scales]
        if blocks.offsets is not None:
            numbers.append(blocks.offsets - (1 << (self.bits - 1)) * blocks.scales)
        head = np.ascontiguousarray(np.stack(numbers, -1).astype(self.scale.numpy)).view(np.uint8)
        return np.concatenate([head, self.packing.pack(blocks.codes)], -1)

    def dequantize(self, blocks: Blocks) -> Array:
        """The numbers that blocks stand for, f32 [rows, groups · group]: the meaning of a layout."""
        if self.floats:
            centred = blocks.codes.view(dtypes.f8e4m3.numpy).astype(np.float32)
        else:
            centred = blocks.codes.astype(np.float32) - (1 << (self.bits - 1))
        values = blocks.scales[..., None] * centred
        if blocks.offsets is not None:
            values = values + blocks.offsets[..., None]
        numbers: Array = values.reshape(len(values), -1)
        return numbers


LAYOUTS: Registry[BlockLayout] = Registry("block layout", __name__, "see docs/extending.md")  # by the name of the dtype


def add_layout(layout: BlockLayout) -> None:
    """Register `layout`: weights that a checkpoint stores in blocks of its dtype can stay so."""
    LAYOUTS.add(layout.dtype.name, layout)


# Layouts of the GGUF specification with codes of 4 or 8 bits and one scale for each group.
add_layout(BlockLayout(dtypes.q4_0, HALVES))
add_layout(BlockLayout(dtypes.q4_1, HALVES, has_minimum=True))
add_layout(BlockLayout(dtypes.q8_0, SIGNED))
# Folders of Hugging Face: a scale for a tile of 128 · 128, which here every row of the tile has.
add_layout(BlockLayout(dtypes.f8e4m3_128, BYTES, scale=dtypes.f32, floats=True))
