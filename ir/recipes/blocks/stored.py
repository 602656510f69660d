"""Weights as the blocks that they are stored in or quantized to, part by part, instead of as their numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import (
    LAYOUTS,
    BlockLayout,
    Blocks,
    Packing,
    integer_layout,
    layout_of,
    offset_layout,
)
from ..combinators import Source
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .grids import OnGrid
from .layouts import BlockRecipe, block_layout, leaf_blocks
from .parts import Part
from .spans import rounded_scales, with_sums


@dataclass(frozen=True)
class Stored(Recipe):
    """One part of the blocks behind the matrix `item` [..., out, in]; `parts` says what the parts are.

    ``words``: i32 [out, words], see `pack_words`; ``steps``: f32 [out, groups], the scales; ``offsets``: like steps.
    ``packed``: u8 [out, in · bits / 8]; ``points``: u8 [out, groups · bits / 8]. ``codes``: u8 [out, planes · in / 2],
    two 4-bit codes a byte, the first in the low half; ``scales``: f32 [out, planes · groups]; ``zeros``: u8 [out,
    planes · groups / 2], packed like codes. ``signed``: i8 [out, in]; ``signed_zeros``: i8 [out, groups]; ``halves``:
    u8 [out, in / 2]; ``middles``: u8 [out, groups]. ``levels``: u8 [out, groups]; ``largest``: f16 [out, 1]. `planes`
    is 2 for 8-bit layouts, else 1. Rows end with whole groups.
    """

    item: Recipe
    part: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        layout = block_layout(self.item, reader)
        if isinstance(layout, str):
            raise WeftError(f"the blocks of {', '.join(self.sources())} cannot be taken as stored: {layout}")
        return _of_leaves(self.item, self.part).shape(reader)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return _of_leaves(self.item, self.part).read(reader, start, stop)


def _of_leaves(recipe: Recipe, part: str) -> Recipe:
    """`recipe` with the part called `part` in the place of each tensor or recipe that has blocks."""
    if isinstance(recipe, BlockRecipe) or not recipe.parts:
        return Part(recipe, part)
    return recipe.map_parts(lambda inner: _of_leaves(inner, part))


@dataclass(frozen=True)
class AsStored(BlockRecipe):
    """The matrix `item` [out, in], a tensor that a file stores in blocks, in these.

    Floats of 4 bits stay as they are. Blocks without minima keep their codes, those of 5 and 6 bits as codes of 8 and
    those of 3 bits as codes of 4; the scales of K-quants are rounded to f16. With minima they become those of
    `offset_layout`: codes stay, but where all numbers of a block are on one side of 0; scales are rounded to 255ths of
    the largest of the row, and what minima have beyond a zero point to a fifteenth of what it is at most in a row of 32
    blocks.

    Raises:
        WeftError: where a scale or minimum is not finite, or a scale beyond what f16 reaches.
    """

    item: Recipe

    def layout(self, reader: TensorReader) -> BlockLayout:
        layout = block_layout(self.item, reader)
        if isinstance(layout, str):
            raise WeftError(f"the blocks of {', '.join(self.sources())} cannot be taken as stored: {layout}")
        if layout.has_minimum:
            return offset_layout(layout.bits, layout.group)
        return _unpacked(layout)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.item.shape(reader)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        blocks = leaf_blocks(self.item, reader, start, stop)
        for numbers in (blocks.scales, blocks.offsets):
            if numbers is not None and not np.isfinite(numbers).all():
                raise WeftError(f"a scale of {', '.join(self.sources())} is not finite: the file is broken")
        layout = self.layout(reader)
        if layout.small_floats:
            return blocks
        with np.errstate(over="ignore", invalid="ignore"):  # found below
            if blocks.offsets is None:
                made = blocks._replace(scales=rounded_scales(blocks.scales, layout))
            else:
                numbers = layout.integers.dequantize(blocks).reshape(blocks.codes.shape)
                made = with_sums(numbers, blocks.scales, blocks.offsets, layout)
        if not np.isfinite(made.scales).all():
            raise WeftError(f"a scale of {', '.join(self.sources())} exceeds what f16 reaches")
        return made


def _unpacked(layout: BlockLayout) -> BlockLayout:
    """Return the layout with one group in a block that holds the codes of `layout`, which has no minimum."""
    if layout.bits == layout.dtype.bits and isinstance(layout.packing, Packing):
        return layout
    # Files mix q5_0 with q8_0, and weights in one layout can be packed.
    wider = LAYOUTS[dtypes.q8_0.name]
    same = (layout.bits, layout.group) == (wider.bits, wider.group)
    return wider if same else integer_layout(layout.bits, layout.group, False)


def as_stored(recipe: Recipe, reader: TensorReader, grid: BlockLayout) -> Recipe:
    """`recipe`, which moves rows of tensors that are stored in blocks, with these blocks; or rows of floats that lie on
    the grids of `grid`, with these."""
    if not isinstance(recipe, Source):
        return recipe.map_parts(lambda part: as_stored(part, reader, grid))
    if layout_of(reader.dtype(recipe.key)) is not None:
        return AsStored(recipe)
    minima = "codes" if grid.has_minimum else ""
    return OnGrid(recipe, grid.bits, grid.group, grid.has_zeros and not minima, minima)


def in_file(recipe: Recipe) -> Recipe:
    """`recipe` with tensors in the place of `AsStored`, and grids with minima as a file has them."""
    if isinstance(recipe, AsStored):
        return recipe.item
    if isinstance(recipe, OnGrid) and recipe.minima:
        return replace(recipe, minima="numbers")
    return recipe.map_parts(in_file)
