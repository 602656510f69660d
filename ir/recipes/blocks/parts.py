"""The parts of blocks: the arrays (codes, scales, zero points, …) in the encodings that kernels read.

`words`, `steps` and `offsets` are for kernels that read codes of 4 or 8 bits in words of 32 bits:

    weight[n, k] = steps[n, g] · (codes[n, k] − 2^{bits−1}) + offsets[n, g],     g = k // group.

Codes of 2 and 3 bits are widened to 4 in `words`, and zero points become offsets.

`packed`, `steps` and `points`: the codes in their own bits, and the zero points in the same number of bits.

`codes`, `scales`, `zeros` are for kernels that read only 4-bit codes. An 8-bit code becomes two 4-bit codes,
``q = 16 · (high − 8) + low``: a row is stored as its high halves followed by its low halves, and multiplied by the
activations repeated twice. The zero points of 8-bit codes are part of the offsets.

`signed`, `steps` and `signed_zeros` are for two's complement integers, as DequantizeLinear reads them: codes and zero
points minus 2^{bits−1}, one per byte. `halves`, `steps` and `middles`: codes of up to 4 bits, the first half of a row
in the low halves of its bytes and the second half in the high halves, and zero points, one per byte.

`levels` and `largest`: scales in 255ths of the largest of the row, and that largest scale; `every_step`: scales as
floats. For 4-bit floats, `levels` are the bytes of scales, and `tensor_scale` is the scale of the matrix, which
multiplies them. In a layout with `sums`, the parts of `WITH_SUMS` include the groups of offsets that follow the row;
kernels that read other parts read `offsets`.

Several parts joined by "+", as in "packed+steps", are one part: each of its rows has the bytes of all of them in order,
u8. So the rows of the weight are read and rounded only once.

Parts represent blocks exactly, except that sums in `offsets` are rounded to f32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...types import dtypes
from ...types.block_layouts import (
    HALVES,
    LARGEST,
    BlockLayout,
    Blocks,
    encode_scale_levels,
    find_largest_scales,
    pack_codes,
    pack_pairs,
    pack_words,
    unpack_codes,
    unpack_words,
)
from ...types.dtypes import DType
from ..readers import Array, TensorReader
from ..recipe import BLOCK_ELEMENTS, Recipe
from .layouts import get_block_layout, read_leaf_blocks

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
WITH_CODES = ("words", "packed", "codes", "signed", "halves")  # parts that depend on codes
# Parts that include the groups of offsets.
WITH_SUMS = ("packed", "points", "signed", "signed_zeros", "levels", "largest", "every_step")


def choose_kernel_bits(layout: BlockLayout) -> int:
    """Return the bits per code for kernels that read 4-bit or 8-bit codes: the smaller that holds codes of `layout`."""
    return 4 if layout.bits <= 4 else 8


def compute_part_widths(layout: BlockLayout, width: int) -> dict[str, int]:
    """Map each part name to its number of elements per row, for a matrix [out, width] in `layout`."""
    groups, planes = -(-width // layout.group), choose_kernel_bits(layout) // 4
    all_groups = groups + (-(-groups // layout.group) if layout.sums else 0)
    return {
        "words": -(-groups * layout.group * choose_kernel_bits(layout) // 512) * 16,
        "steps": groups,
        "offsets": groups,
        "packed": all_groups * -(-layout.group * layout.bits // 8),
        "points": -(-all_groups * layout.bits // 8),
        "codes": planes * groups * layout.group // 2,
        "scales": planes * groups,
        "zeros": -(-planes * groups // 2),
        "signed": all_groups * layout.group,
        "signed_zeros": all_groups,
        "halves": groups * layout.group // 2,
        "middles": groups,
        "levels": all_groups,
        "largest": 1,
        "tensor_scale": 1,
        "every_step": all_groups,
    }


class Part(Recipe):
    """The part called `part` of the blocks of `leaf` (a `Source` or `BlockRecipe`): [..., out, elements of the part].

    Recipes that move full rows of the matrix can move the rows of its parts instead.
    """

    leaf: Recipe
    part: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        layout, names = get_block_layout(self.leaf, reader), self.part.split("+")
        *lead, width = self.leaf.shape(reader)
        if names[1:]:
            return (*lead, sum(compute_row_bytes(layout, width, names)))
        return (*lead, compute_part_widths(layout, width)[self.part])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        layout = get_block_layout(self.leaf, reader)
        _, *inner = self.leaf.shape(reader)
        step = max(1, BLOCK_ELEMENTS // max(1, int(np.prod(inner))))  # a transposition reads all rows of a part at once
        names = self.part.split("+")
        codes = layout.sums or not set(names).isdisjoint(WITH_CODES)
        rows = [
            _concat_parts(layout, read_leaf_blocks(self.leaf, reader, first, min(first + step, stop), codes), names)
            for first in range(start, max(stop, start + 1), step)
        ]
        return np.concatenate(rows) if len(rows) > 1 else rows[0]


def compute_row_bytes(layout: BlockLayout, width: int, names: Sequence[str]) -> list[int]:
    """Return the bytes per row of each of the parts `names`, in order, for a matrix [out, width] in `layout`."""
    shapes = compute_part_widths(layout, width)
    return [DTYPES[name].bytes_for(shapes[name]) for name in names]


def split_parts(rows: Array, layout: BlockLayout, width: int, names: Sequence[str]) -> tuple[Array, ...]:
    """Split `rows` u8 [..., bytes] of the joined parts `names` of a matrix [out, width] into one array [..., elements]
    per part, in the dtype of the part."""
    ends = np.cumsum(compute_row_bytes(layout, width, names))
    columns = zip(names, np.split(rows, ends[:-1], -1), strict=True)
    return tuple(np.ascontiguousarray(column).view(DTYPES[name].numpy) for name, column in columns)


def _concat_parts(layout: BlockLayout, blocks: Blocks, names: Sequence[str]) -> Array:
    parts = [encode_part(layout, blocks, name) for name in names]
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], -1) if parts[1:] else parts[0]


def encode_part(layout: BlockLayout, blocks: Blocks, part: str) -> Array:
    """Return the part called `part` (see the module docstring) of `blocks` of `layout`, [rows, elements]."""
    if layout.sums and part not in WITH_SUMS:
        blocks = layout.decode_offsets(blocks)
    codes, scales, offsets, zeros, _ = blocks
    if part == "largest":
        return find_largest_scales(scales)
    if part == "tensor_scale":
        return np.ones_like(scales[..., :1]) if blocks.tensor_scales is None else blocks.tensor_scales
    if part == "levels" and layout.small_floats:
        return layout.encode_scales(blocks)
    if part == "levels":
        return encode_scale_levels(scales, find_largest_scales(scales))
    if part in ("steps", "every_step"):
        return scales
    if part == "packed":
        return pack_codes(codes, layout.bits).reshape(*scales.shape[:-1], -1)
    if part == "points":
        points = np.full(scales.shape, layout.middle, np.uint8) if zeros is None else zeros
        return pack_codes(points, layout.bits)
    if part == "offsets":
        total = np.zeros_like(scales) if offsets is None else offsets
        return total if zeros is None else total + scales * (np.float32(layout.middle) - zeros)
    if part in ("signed", "signed_zeros", "halves", "middles"):
        return _encode_byte_part(layout, blocks, part)
    bits = choose_kernel_bits(layout)
    if bits != layout.bits:  # shift codes so that the middle one still represents 0
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
    rows = np.concatenate(planes, -1)
    return rows if part == "scales" else pack_pairs(rows)


def _encode_byte_part(layout: BlockLayout, blocks: Blocks, part: str) -> Array:
    codes, scales, _, zeros, _ = blocks
    if part in ("middles", "signed_zeros"):
        values = np.full(scales.shape, layout.middle, np.uint8) if zeros is None else zeros
    else:
        values = codes.reshape(*codes.shape[:-2], -1)
    if part == "halves":
        return HALVES.pack(values)
    return values if part == "middles" else (values - np.uint8(layout.middle)).view(np.int8)


def decode_parts(layout: BlockLayout, parts: Mapping[str, Array], width: int) -> Blocks:
    """Return the blocks with integer codes of a matrix [rows, width] from `parts` (part name -> [rows, elements]).

    It is the inverse of `encode_part`; zero points that became `offsets` are rounded to the nearest integer.
    """
    groups, bits = -(-width // layout.group), choose_kernel_bits(layout)
    widened = np.uint8((1 << (bits - 1)) - layout.middle)
    scales, zeros = parts["steps"] if "steps" in parts else parts["scales"][:, -groups:], None
    count = groups * layout.group
    if "packed" in parts:
        packed = parts["packed"].reshape(len(scales), groups, -1)
        codes = unpack_codes(packed, layout.bits, layout.group)
    elif "words" in parts:
        codes = unpack_words(parts["words"], bits)[:, :count] - widened
    elif "signed" in parts:
        codes = _to_unsigned(layout, parts["signed"])
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
        zeros = _to_unsigned(layout, parts["signed_zeros"])
    elif layout.has_zeros and "middles" in parts:
        zeros = parts["middles"]
    elif layout.has_zeros and "zeros" in parts and bits != 8:
        zeros = unpack_codes(parts["zeros"], 4, groups) - widened
    elif layout.has_zeros:
        with np.errstate(divide="ignore", invalid="ignore"):
            shifted = np.where(scales == 0, 0, parts["offsets"] / scales.astype(np.float32))
        zeros = (layout.middle - np.rint(shifted)).clip(0, 2**layout.bits - 1).astype(np.uint8)
    return Blocks(codes.reshape(len(scales), groups, layout.group), scales.astype(np.float32), None, zeros)


def _to_unsigned(layout: BlockLayout, values: Array) -> Array:
    return np.asarray(values.astype(np.int8).view(np.uint8) + np.uint8(layout.middle))
