"""The parts of blocks in the forms that kernels take.

`words`, `steps` and `offsets`, for kernels that take codes of 4 or 8 bits in words of 32 bits:

    weight[n, k] = steps[n, g] · (codes[n, k] − 2^{bits−1}) + offsets[n, g],     g = k // group.

Codes of 2 and 3 bits are widened to 4 for these, and zero points become offsets.

`packed`, `steps` and `points`: the codes in their own bits, and the zero points in as many.

`codes`, `scales`, `zeros`, for kernels that take 4-bit codes alone. There an 8-bit code is two of them:
``q = 16 · (high − 8) + low``, so a row becomes the row of its high halves followed by the row of its low halves, and is
multiplied by the activations twice over; its zero points, if it has any, are in the offsets.

`signed`, `steps` and `signed_zeros`, for integers of two's complement, as DequantizeLinear takes them: codes and zero
points less 2^{bits−1}, one to a byte. `halves`, `steps` and `middles`: codes of up to 4 bits, the first half of a row
in the low halves of its bytes and the second in the high ones, and zero points, one to a byte.

`levels` and `largest`: scales in 255ths of the largest of the row, and that; `every_step`: scales as numbers. They,
`packed`, `points`, `signed` and `signed_zeros` are also of the groups of offsets behind a row, where a layout has such;
the others have `offsets`. Of floats of 4 bits, `levels` are the bytes of scales, and `tensor_scale` is the number that
these are counted in.

Several parts joined by "+", as in "packed+steps", are one whose rows are the bytes of each side by side, u8: so all of
them are made of rows that are read, and rounded, once.

Nothing is rounded but the offsets, to f32; what a reader stored as a minimum was rounded by it, to the dtype of the
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import (
    HALVES,
    LARGEST,
    BlockLayout,
    Blocks,
    largest_scales,
    pack_codes,
    pack_pairs,
    pack_words,
    scale_levels,
    unpack_codes,
    unpack_words,
)
from ...types.dtypes import DType
from ..readers import Array, TensorReader
from ..recipe import BLOCK_ELEMENTS, Recipe
from .layouts import block_layout, leaf_blocks

DTYPES: Mapping[str, DType] = {
    "words": dtypes.i32,
    "steps": dtypes.f32,
    "offsets": dtypes.f32,
    "packed": dtypes.u8,
    "points": dtypes.u8,
    "codes": dtypes.u8,
    "scales": dtypes.f32,
    "zeros": dtypes.u8,
    "signed": dtypes.i8,
    "signed_zeros": dtypes.i8,
    "halves": dtypes.u8,
    "middles": dtypes.u8,
    "levels": dtypes.u8,
    "largest": LARGEST,
    "tensor_scale": dtypes.f32,
    "every_step": dtypes.f32,
}
WITH_CODES = ("words", "packed", "codes", "signed", "halves")  # the others need no codes
# Of the groups of offsets, too.
WITH_SUMS = ("packed", "points", "signed", "signed_zeros", "levels", "largest", "every_step")


def wide(layout: BlockLayout) -> int:
    """Bits of a code where kernels take 4 or 8: the smallest of them that hold it."""
    return 4 if layout.bits <= 4 else 8


def part_shapes(layout: BlockLayout, width: int) -> dict[str, int]:
    """The numbers in a row of each part, of a matrix [out, width]."""
    groups, planes = -(-width // layout.group), wide(layout) // 4
    every = groups + (-(-groups // layout.group) if layout.sums else 0)
    return {
        "words": -(-groups * layout.group * wide(layout) // 512) * 16,
        "steps": groups,
        "offsets": groups,
        "packed": every * -(-layout.group * layout.bits // 8),
        "points": -(-every * layout.bits // 8),
        "codes": planes * groups * layout.group // 2,
        "scales": planes * groups,
        "zeros": -(-planes * groups // 2),
        "signed": every * layout.group,
        "signed_zeros": every,
        "halves": groups * layout.group // 2,
        "middles": groups,
        "levels": every,
        "largest": 1,
        "tensor_scale": 1,
        "every_step": every,
    }


@dataclass(frozen=True)
class Part(Recipe):
    """One part of the blocks of `leaf`, a checkpoint tensor or a recipe that makes blocks: [..., out, numbers of it].

    Recipes that move whole rows of blocks move rows of their parts.
    """

    leaf: Recipe
    part: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        layout = block_layout(self.leaf, reader)
        if isinstance(layout, str):
            raise WeftError(f"the blocks of {', '.join(self.sources())} cannot be taken as stored: {layout}")
        *lead, width = self.leaf.shape(reader)
        names = self.part.split("+")
        return (*lead, sum(row_bytes(layout, width, names)) if names[1:] else part_shapes(layout, width)[self.part])

    def sources(self) -> Iterator[str]:
        yield from self.leaf.sources()

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        layout = block_layout(self.leaf, reader)
        assert isinstance(layout, BlockLayout)
        _, *inner = self.leaf.shape(reader)
        step = max(1, BLOCK_ELEMENTS // max(1, int(np.prod(inner))))  # whoever transposes a part reads all of its rows
        names = self.part.split("+")
        codes = layout.sums or not set(names).isdisjoint(WITH_CODES)
        rows = [
            _side_by_side(layout, leaf_blocks(self.leaf, reader, first, min(first + step, stop), codes), names)
            for first in range(start, max(stop, start + 1), step)
        ]
        return np.concatenate(rows) if len(rows) > 1 else rows[0]


def row_bytes(layout: BlockLayout, width: int, names: Sequence[str]) -> list[int]:
    """The bytes in a row of each of the parts called `names`, of a matrix [out, width]."""
    shapes = part_shapes(layout, width)
    return [DTYPES[name].bytes_for(shapes[name]) for name in names]


def split_parts(rows: Array, layout: BlockLayout, width: int, names: Sequence[str]) -> tuple[Array, ...]:
    """Take `rows` u8 [..., bytes] of parts side by side apart into these."""
    ends = np.cumsum(row_bytes(layout, width, names))
    columns = zip(names, np.split(rows, ends[:-1], -1), strict=True)
    return tuple(np.ascontiguousarray(column).view(DTYPES[name].numpy) for name, column in columns)


def _side_by_side(layout: BlockLayout, blocks: Blocks, names: Sequence[str]) -> Array:
    parts = [one_part(layout, blocks, name) for name in names]
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], -1) if parts[1:] else parts[0]


def one_part(layout: BlockLayout, blocks: Blocks, part: str) -> Array:
    """The part called `part` of `blocks` in `layout`."""
    if layout.sums and part not in WITH_SUMS:
        blocks = layout.decode_offsets(blocks)
    codes, scales, offsets, zeros, _ = blocks
    if part == "largest":
        return largest_scales(scales)
    if part == "tensor_scale":
        return np.ones_like(scales[..., :1]) if blocks.tensor_scales is None else blocks.tensor_scales
    if part == "levels" and layout.small_floats:
        return layout.encode_scales(blocks)
    if part == "levels":
        return scale_levels(scales, largest_scales(scales))
    if part in ("steps", "every_step"):
        return scales
    if part == "packed":
        return pack_codes(codes, layout.bits).reshape(*scales.shape[:-1], -1)
    if part == "points":
        points = np.full(scales.shape, layout.middle, np.uint8) if zeros is None else zeros
        return pack_codes(points, layout.bits)
    if part == "offsets":
        return _offsets(layout, scales, offsets, zeros)
    if part in ("signed", "signed_zeros", "halves", "middles"):
        return _single(layout, blocks, part)
    bits = wide(layout)
    if bits != layout.bits:  # the same code stands for 0
        codes = codes + np.uint8((1 << (bits - 1)) - layout.middle)
    if part == "words":
        lead = codes.shape[:-2]
        return pack_words(codes.reshape(-1, *codes.shape[-2:]), bits).reshape(*lead, -1)
    flat, eights = codes.reshape(*codes.shape[:-2], -1), np.full(scales.shape, 8, np.uint8)
    two = bits == 8
    if zeros is not None and not two:
        eights = zeros + np.uint8(8 - layout.middle)
    planes = {
        "codes": (flat >> 4, flat & 15) if two else (flat,),
        "scales": (16 * scales, scales) if two else (scales,),
        "zeros": (eights, np.zeros_like(eights)) if two else (eights,),
    }[part]
    whole = np.concatenate(planes, -1)
    return whole if part == "scales" else pack_pairs(whole)


def _single(layout: BlockLayout, blocks: Blocks, part: str) -> Array:
    """Codes or zero points, one to a byte, or codes in `halves`."""
    codes, scales, _, zeros, _ = blocks
    if part in ("middles", "signed_zeros"):
        numbers = np.full(scales.shape, layout.middle, np.uint8) if zeros is None else zeros
    else:
        numbers = codes.reshape(*codes.shape[:-2], -1)
    if part == "halves":
        first, second = np.split(numbers, 2, -1)
        pairs: Array = first | (second << 4)
        return pairs
    return numbers if part == "middles" else (numbers - np.uint8(layout.middle)).view(np.int8)


def _offsets(layout: BlockLayout, scales: Array, offsets: Array | None, zeros: Array | None) -> Array:
    found = np.zeros_like(scales) if offsets is None else offsets
    if zeros is not None:
        found = found + scales * (np.float32(layout.middle) - zeros)
    return found


def joined_parts(layout: BlockLayout, parts: Mapping[str, Array], width: int) -> Blocks:
    """Return the blocks of integer codes behind `parts` [rows, numbers of each], by name, of a matrix [rows, width]:
    the inverse of `one_part`, but that zero points which `offsets` were rounded from come to the nearest."""
    groups, bits = -(-width // layout.group), wide(layout)
    widened = np.uint8((1 << (bits - 1)) - layout.middle)
    scales, zeros = parts["steps"] if "steps" in parts else parts["scales"][:, -groups:], None
    count = groups * layout.group
    if "packed" in parts:
        packed = parts["packed"].reshape(len(scales), groups, -1)
        codes = unpack_codes(packed, layout.bits, layout.group)
    elif "words" in parts:
        codes = unpack_words(parts["words"], bits)[:, :count] - widened
    elif "signed" in parts:
        codes = _unsigned(layout, parts["signed"])
    elif "halves" in parts:
        codes = HALVES.unpack(parts["halves"])
    elif bits == 8:
        planes = unpack_codes(parts["codes"], 4, 2 * count)
        codes = planes[:, :count] << 4 | planes[:, count:]
    else:
        codes = unpack_codes(parts["codes"], 4, count) - widened
    if layout.has_zeros and "points" in parts:
        zeros = unpack_codes(parts["points"], layout.bits, groups)
    elif layout.has_zeros and "signed_zeros" in parts:
        zeros = _unsigned(layout, parts["signed_zeros"])
    elif layout.has_zeros and "middles" in parts:
        zeros = parts["middles"]
    elif layout.has_zeros and "zeros" in parts and bits != 8:
        zeros = unpack_codes(parts["zeros"], 4, groups) - widened
    elif layout.has_zeros:
        with np.errstate(divide="ignore", invalid="ignore"):
            shifted = np.where(scales == 0, 0, parts["offsets"] / scales.astype(np.float32))
        zeros = (layout.middle - np.rint(shifted)).clip(0, 2**layout.bits - 1).astype(np.uint8)
    return Blocks(codes.reshape(len(scales), groups, layout.group), scales.astype(np.float32), None, zeros)


def _unsigned(layout: BlockLayout, numbers: Array) -> Array:
    codes: Array = numbers.astype(np.int8).view(np.uint8) + np.uint8(layout.middle)
    return codes
