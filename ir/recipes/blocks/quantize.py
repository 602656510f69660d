"""Recipes that round weights to integer blocks, and that read blocks which are rounded already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import (
    INTEGER_BITS,
    BlockLayout,
    Blocks,
    integer_layout,
    offset_layout,
    unpack_codes,
)
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe
from .searches import MINIMA, SEARCHES
from .spans import grouped, nearest, unscaled, with_sums

CHUNK = 1 << 17  # numbers that are rounded at once: with what is made of them they stay in the processor's cache


@dataclass(frozen=True)
class Quantize(BlockRecipe):
    """`item` [..., out, in] rounded to the nearest codes of `bits` bits, a group of `group` numbers of a row at a time.

    With zero points (`zeros`) the codes 0 to 2^bits − 1 cover a group from its least to its greatest number, and 0.
    Without, the number of largest magnitude becomes the code 0, which stands for −2^{bits−1} scales. Scales are rounded
    to the dtype `scale` before codes are chosen. `search` looks for scales and zero points that lose less:
    "kquant" by weighted squares; "hqq" for minima, by half-quadratic splitting, which are then codes, too, as of
    `offset_layout`.

    Raises:
        WeftError: where a number is not finite, or scales exceed the range of their dtype.
    """

    item: Recipe
    bits: int = 4
    group: int = 32
    zeros: bool = True
    scale: str = "f16"
    search: str = ""

    def layout(self, reader: TensorReader) -> BlockLayout:
        layout = _layout(self.bits, self.group, self.zeros, self.scale)
        return offset_layout(self.bits, self.group) if self.search in MINIMA else layout

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        _layout(self.bits, self.group, self.zeros, self.scale)
        if self.search not in SEARCHES and self.search not in MINIMA:
            known = " and ".join(filter(None, [*SEARCHES, *MINIMA]))
            raise WeftError(f"there is no search {self.search!r} for scales; there is {known}")
        return _matrix(self, self.item.shape(reader))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        rows = self.item.read(reader, start, stop)
        numbers = self.layout(reader).dequantize(self._blocks(reader, rows))[..., : rows.shape[-1]]
        # float64 stays: inverses of recipes, and trials of passes, compute in it.
        return numbers.astype(rows.dtype) if rows.dtype == np.float64 else numbers

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        return self._blocks(reader, self.item.read(reader, start, stop), codes)

    def _blocks(self, reader: TensorReader, rows: Array, codes: bool = True) -> Blocks:
        layout, sources = self.layout(reader), tuple(self.sources())
        step = max(1, CHUNK // max(1, int(np.prod(rows.shape[1:]))))
        parts = [
            round_rows(rows[i : i + step], layout, sources, codes, self.search)
            for i in range(0, max(len(rows), 1), step)
        ]
        return parts[0] if len(parts) == 1 else joined(parts)


@dataclass(frozen=True)
class Dequantize(BlockRecipe):
    """The matrix [..., out, `width`] that `codes` stand for: u8 [..., out, groups · group · bits / 8], the lowest bits
    first, with `scales` [..., out, groups] and, if there are any, `zeros` u8 [..., out, groups · bits / 8]. With `sums`
    the groups of offsets are among these, behind the others, and the layout is `offset_layout`."""

    codes: Recipe
    scales: Recipe
    zeros: Recipe | None = None
    width: int = 0
    bits: int = 4
    group: int = 32
    scale: str = "f16"
    sums: bool = False

    def layout(self, reader: TensorReader) -> BlockLayout:
        integers = _layout(self.bits, self.group, self.zeros is not None, self.scale)
        return offset_layout(self.bits, self.group) if self.sums else integers

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        self.layout(reader)
        lead, groups = self.scales.shape(reader)[:-1], -(-self.width // self.group)
        groups += -(-groups // self.group) if self.sums else 0
        wanted = {"codes": groups * self.group * self.bits // 8, "scales": groups, "zeros": -(-groups * self.bits // 8)}
        for name, count in wanted.items():
            part: Recipe | None = getattr(self, name)
            if part is not None and (found := part.shape(reader)) != (*lead, count):
                raise WeftError(
                    f"the {name} {list(found)} of {', '.join(self.sources())} do not fit: a row of {self.width} "
                    f"numbers of {self.bits} bits in groups of {self.group} has {count}, in {list(lead)} rows"
                )
        return _matrix(self, (*lead, self.width))

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        scales = self.scales.read(reader, start, stop).astype(np.float32, copy=False)
        if not np.isfinite(scales).all():
            raise WeftError(f"a scale of {', '.join(self.scales.sources())} is not finite: the weights are broken")
        groups = scales.shape[-1]
        found = np.empty((*scales.shape, 0), np.uint8)
        if codes:
            packed = self.codes.read(reader, start, stop)
            found = unpack_codes(packed, self.bits, groups * self.group).reshape(*scales.shape, self.group)
        points = None if self.zeros is None else self.zeros.read(reader, start, stop)
        zeros = None if points is None else unpack_codes(points, self.bits, groups)
        return Blocks(found, scales, None, zeros)


def _layout(bits: int, group: int, zeros: bool, scale: str) -> BlockLayout:
    if bits not in INTEGER_BITS:
        raise WeftError(f"there are no codes of {bits} bits; there are those of {', '.join(map(str, INTEGER_BITS))}")
    if group < 8 or group % 8:
        raise WeftError(f"groups of {group} numbers fill no bytes: a group is a multiple of 8")
    return integer_layout(bits, group, zeros, dtypes.parse(scale))


def _matrix(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2 or not shape[-1]:
        raise WeftError(f"{', '.join(recipe.sources())} of shape {list(shape)} is no matrix to quantize")
    return shape


def joined(parts: list[Blocks]) -> Blocks:
    """Blocks of consecutive rows as one."""

    def column(found: list[Array | None]) -> Array | None:
        arrays = [array for array in found if array is not None]
        return np.concatenate(arrays) if arrays else None

    codes, scales = (np.concatenate(arrays) for arrays in ([b.codes for b in parts], [b.scales for b in parts]))
    others = ([getattr(b, name) for b in parts] for name in ("offsets", "zeros", "tensor_scales"))
    return Blocks(codes, scales, *map(column, others))


def round_rows(
    rows: Array, layout: BlockLayout, names: tuple[str, ...] = (), with_codes: bool = True, search: str = ""
) -> Blocks:
    """`rows` [..., width] as blocks of `layout`, each number rounded to the nearest; `names` are for messages."""
    groups = grouped(rows, layout.group)
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        if layout.sums:
            made = with_sums(groups, *MINIMA[search](groups, layout), layout)
        else:
            scales, zeros = SEARCHES[search](groups, layout)
            made = Blocks(np.empty((*scales.shape, 0), np.uint8), scales, None, zeros)
    if not np.isfinite(made.scales).all():
        raise unscaled(rows, names, str(layout.unit))
    if layout.sums or not with_codes:
        return made
    return made._replace(codes=nearest(groups, made.scales, made.zeros, layout))
