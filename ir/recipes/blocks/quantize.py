"""Recipes that quantize weights to blocks of integer codes, and recipes that read such blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import (
    INTEGER_BITS,
    BlockLayout,
    Blocks,
    build_integer_layout,
    build_offset_layout,
    unpack_codes,
)
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe
from .searches import MINIMA, SEARCHES
from .spans import quantize_with_offsets, round_to_codes, scale_error, split_groups

CHUNK = 1 << 17  # elements rounded at once: with the intermediate arrays they fit into the processor's cache


class Quantize(BlockRecipe):
    """`item` [..., out, in] rounded to the nearest codes of `bits` bits, in groups of `group` elements of a row.

    With zero points (`zeros`) the codes 0 to 2^bits − 1 cover the range from the least to the largest value of a group
    and 0. Without, the value of largest magnitude gets the code 0, which represents −2^{bits−1} · scale. Scales are
    rounded to the dtype `scale` before codes are chosen. `search` reduces the errors: "kquant" fits scales and zero
    points by weighted squares (`fit_by_squares`), "hqq" fits scales and offsets (`fit_half_quadratic`) in the layout of
    `build_offset_layout`; "" does not search. WeftError if a value is not finite or a scale exceeds the range of its
    dtype.
    """

    item: Recipe
    bits: int = 4
    group: int = 32
    zeros: bool = True
    scale: str = "f16"
    search: str = ""

    def layout(self, reader: TensorReader) -> BlockLayout:
        layout = _build_layout(self.bits, self.group, self.zeros, self.scale)
        return build_offset_layout(self.bits, self.group) if self.search in MINIMA else layout

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        _build_layout(self.bits, self.group, self.zeros, self.scale)
        if self.search not in SEARCHES and self.search not in MINIMA:
            names = " and ".join(filter(None, [*SEARCHES, *MINIMA]))
            raise WeftError(f"unknown search {self.search!r} for scales; known are {names}")
        return check_matrix(self, self.item.shape(reader))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        rows = self.item.read(reader, start, stop)
        values = self.layout(reader).dequantize(self._blocks(reader, rows))[..., : rows.shape[-1]]
        # float64 stays: inverses of recipes, and checks of passes, compute in it.
        return values.astype(rows.dtype) if rows.dtype == np.float64 else values

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        return self._blocks(reader, self.item.read(reader, start, stop), codes)

    def _blocks(self, reader: TensorReader, rows: Array, codes: bool = True) -> Blocks:
        layout, sources = self.layout(reader), tuple(self.sources())
        return quantize_chunks(rows, lambda chunk: round_rows(rows[chunk], layout, sources, codes, self.search))


class Dequantize(BlockRecipe):
    """The matrix [..., out, `width`] of stored integer codes in groups: scale · (code − zero point).

    `codes` u8 [..., out, groups · group · bits / 8] and `zeros` u8 [..., out, groups · bits / 8] (optional) are packed
    with the lowest bits first; `scales` [..., out, groups]. With `sums` the groups of offsets follow the other groups
    in codes, zeros and scales, and the layout is that of `build_offset_layout`.
    """

    codes: Recipe
    scales: Recipe
    zeros: Recipe | None = None
    width: int = 0
    bits: int = 4
    group: int = 32
    scale: str = "f16"
    sums: bool = False

    def layout(self, reader: TensorReader) -> BlockLayout:
        integers = _build_layout(self.bits, self.group, self.zeros is not None, self.scale)
        return build_offset_layout(self.bits, self.group) if self.sums else integers

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        self.layout(reader)
        lead, groups = self.scales.shape(reader)[:-1], -(-self.width // self.group)
        groups += -(-groups // self.group) if self.sums else 0
        wanted = {"codes": groups * self.group * self.bits // 8, "scales": groups, "zeros": -(-groups * self.bits // 8)}
        for name, count in wanted.items():
            part: Recipe | None = getattr(self, name)
            if part is not None and (actual := part.shape(reader)) != (*lead, count):
                raise WeftError(
                    f"{name} of {', '.join(self.sources())} have shape {list(actual)}, but rows of {self.width} codes "
                    f"of {self.bits} bits in groups of {self.group} need {[*lead, count]}"
                )
        return check_matrix(self, (*lead, self.width))

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        scales = self.scales.read(reader, start, stop).astype(np.float32, copy=False)
        if not np.isfinite(scales).all():
            raise WeftError(f"a scale of {', '.join(self.scales.sources())} is not finite: the weights are broken")
        groups = scales.shape[-1]
        unpacked = np.empty((*scales.shape, 0), np.uint8)
        if codes:
            packed = self.codes.read(reader, start, stop)
            unpacked = unpack_codes(packed, self.bits, groups * self.group).reshape(*scales.shape, self.group)
        points = None if self.zeros is None else self.zeros.read(reader, start, stop)
        zeros = None if points is None else unpack_codes(points, self.bits, groups)
        return Blocks(unpacked, scales, None, zeros)


def _build_layout(bits: int, group: int, zeros: bool, scale: str) -> BlockLayout:
    if bits not in INTEGER_BITS:
        raise WeftError(f"codes of {bits} bits are not supported; choose {', '.join(map(str, INTEGER_BITS))}")
    if group < 8 or group % 8:
        raise WeftError(f"groups of {group} elements do not fill bytes: a group is a multiple of 8")
    return build_integer_layout(bits, group, zeros, dtypes.parse(scale))


def check_matrix(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` if it is that of a matrix, or of a stack of matrices, with columns; WeftError if not."""
    if len(shape) < 2 or not shape[-1]:
        raise WeftError(f"{', '.join(recipe.sources())} has shape {list(shape)}, but only matrices can be quantized")
    return shape


def concat_blocks(parts: list[Blocks]) -> Blocks:
    """Return the blocks of `parts`, which are blocks of consecutive rows, as one `Blocks`."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return Blocks._make(None if arrays[0] is None else np.concatenate(arrays) for arrays in columns)


def quantize_chunks(rows: Array, quantize: Callable[[slice], Blocks]) -> Blocks:
    """Return the blocks of `rows`: `quantize` is called for slices of rows of at most `CHUNK` elements, or one row."""
    step = max(1, CHUNK // max(1, int(np.prod(rows.shape[1:]))))
    return concat_blocks([quantize(slice(i, i + step)) for i in range(0, max(len(rows), 1), step)])


def round_rows(
    rows: Array, layout: BlockLayout, names: tuple[str, ...] = (), with_codes: bool = True, search: str = ""
) -> Blocks:
    """Quantize `rows` [..., width] to blocks of `layout` with the search `search` (see `Quantize`), each element to the
    nearest code; codes are empty if not `with_codes`, except with `sums`. WeftError, naming the tensors `names`, if a
    scale is not finite."""
    groups = split_groups(rows, layout.group)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        if layout.sums:
            blocks = quantize_with_offsets(groups, *MINIMA[search](groups, layout), layout)
        else:
            scales, zeros = SEARCHES[search](groups, layout)
            blocks = Blocks(np.empty((*scales.shape, 0), np.uint8), scales, None, zeros)
    if not np.isfinite(blocks.scales).all():
        raise scale_error(rows, names, str(layout.range_dtype))
    if layout.sums or not with_codes:
        return blocks
    return blocks._replace(codes=round_to_codes(groups, blocks.scales, blocks.zeros, layout))
