"""Recipes for the blocks of weights, stored or quantized: their parts, and blocks converted for kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import (
    LAYOUTS,
    BlockLayout,
    Blocks,
    Packing,
    build_integer_layout,
    build_offset_layout,
    find_layout,
)
from ..combinators import Source
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .grids import OnGrid
from .layouts import BlockRecipe, get_block_layout, read_leaf_blocks
from .parts import Part
from .spans import quantize_with_offsets, round_scales


class Stored(Recipe):
    """The part called `part` of the blocks of the matrix `item` [..., out, in]; the module `parts` defines the parts.

    ``words``: i32 [out, words], see `pack_words`; ``steps``: f32 [out, groups], the scales; ``offsets``: like steps.
    ``packed``: u8 [out, in · bits / 8]; ``points``: u8 [out, groups · bits / 8]. ``codes``: u8 [out, planes · in / 2],
    two 4-bit codes per byte, the first in the low half; ``scales``: f32 [out, planes · groups]; ``zeros``: u8 [out,
    planes · groups / 2], packed like codes. ``signed``: i8 [out, in]; ``signed_zeros``: i8 [out, groups]; ``halves``:
    u8 [out, in / 2]; ``middles``: u8 [out, groups]. ``levels``: u8 [out, groups]; ``largest``: f16 [out, 1];
    ``every_step``: f32 [out, groups]; ``tensor_scale``: f32 [out, 1]. `planes` is 2 for 8-bit layouts, else 1. Rows are
    padded to full groups.
    """

    item: Recipe
    part: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        get_block_layout(self.item, reader)
        return _replace_leaves(self.item, self.part).shape(reader)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return _replace_leaves(self.item, self.part).read(reader, start, stop)


def _replace_leaves(recipe: Recipe, part: str) -> Recipe:
    if isinstance(recipe, BlockRecipe) or not recipe.parts:
        return Part(recipe, part)
    return recipe.map_parts(lambda inner: _replace_leaves(inner, part))


class AsStored(BlockRecipe):
    """The tensor `item` [out, in], which a checkpoint stores in blocks, as blocks that kernels can read.

    Floats of 4 bits do not change. Blocks without minima keep their codes, 5 and 6 bits widened to 8 and 3 bits to 4;
    the scales of K-quants are rounded to f16. Blocks with minima get the layout of `build_offset_layout`. Their codes
    stay, except in groups whose values are all positive or all negative, which are quantized again. Their scales are
    rounded to 255ths of the largest scale of the row. A zero point replaces each minimum, and the remainder becomes an
    offset with a code of its own. WeftError if a scale or minimum is not finite or exceeds the range of f16.
    """

    item: Recipe

    def layout(self, reader: TensorReader) -> BlockLayout:
        layout = get_block_layout(self.item, reader)
        if layout.has_minimum:
            return build_offset_layout(layout.bits, layout.group)
        return _find_unpacked_layout(layout)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        blocks = read_leaf_blocks(self.item, reader, start, stop)
        for factors in (blocks.scales, blocks.offsets):
            if factors is not None and not np.isfinite(factors).all():
                raise WeftError(f"a scale of {', '.join(self.sources())} is not finite: fetch or save the file again")
        layout = self.layout(reader)
        if layout.small_floats:
            return blocks
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            if blocks.offsets is None:
                converted = blocks._replace(scales=round_scales(blocks.scales, layout))
            else:
                values = layout.without_sums.dequantize(blocks).reshape(blocks.codes.shape)
                converted = quantize_with_offsets(values, blocks.scales, blocks.offsets, layout)
        if not np.isfinite(converted.scales).all():
            raise WeftError(f"{', '.join(self.sources())} cannot keep its blocks: a scale exceeds the range of f16")
        return converted


def _find_unpacked_layout(layout: BlockLayout) -> BlockLayout:
    """Return the layout to which `AsStored` converts `layout`, which has no minima: it has one group per block."""
    if layout.bits == layout.dtype.bits and isinstance(layout.packing, Packing):
        return layout
    # Files mix q5_0 with q8_0, and only weights in one layout can be packed together.
    wider = LAYOUTS[dtypes.q8_0.name]
    same = (layout.bits, layout.group) == (wider.bits, wider.group)
    return wider if same else build_integer_layout(layout.bits, layout.group, False)


def wrap_stored_blocks(recipe: Recipe, reader: TensorReader, grid: BlockLayout) -> Recipe:
    """Return `recipe`, which only moves rows, with `AsStored` around each tensor stored in blocks, and `OnGrid`, in the
    layout `grid`, around each float tensor. `grid` must represent those exactly (see `find_grid_layout`)."""
    if not isinstance(recipe, Source):
        return recipe.map_parts(lambda part: wrap_stored_blocks(part, reader, grid))
    if find_layout(reader.dtype(recipe.key)) is not None:
        return AsStored(recipe)
    minima = "codes" if grid.has_minimum else ""
    return OnGrid(recipe, grid.bits, grid.group, grid.has_zeros and not minima, minima)


def unwrap_stored_blocks(recipe: Recipe) -> Recipe:
    """Return `recipe` in block layouts of files: each `AsStored` is replaced by its tensor, and each `OnGrid` with
    minima has them as in Q4_1."""
    if isinstance(recipe, AsStored):
        return recipe.item
    if isinstance(recipe, OnGrid) and recipe.minima:
        return replace(recipe, minima="numbers")
    return recipe.map_parts(unwrap_stored_blocks)
