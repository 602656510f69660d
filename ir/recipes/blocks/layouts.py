"""The block layout of a recipe: of rows that a checkpoint stores in blocks, or that a recipe computes as blocks."""

from __future__ import annotations

import numpy as np

from ...errors import WeftError
from ...types.block_layouts import LAYOUTS, BlockLayout, Blocks, find_layout
from ..combinators import Concat, Permute, Reshape, Slice, Source, Take
from ..readers import Array, BlockTensorReader, SpilledTensors, TensorReader
from ..recipe import Recipe


class BlockRecipe(Recipe):
    """Base of recipes that produce a matrix [..., out, in] as blocks (`read_blocks`); `read` dequantizes the blocks."""

    def layout(self, reader: TensorReader) -> BlockLayout:
        """Return the layout of the blocks."""
        raise TypeError(f"recipe {self.name} defines no layout")

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        """Return the blocks of ``start:stop`` on axis 0; the last group of a row is padded. If not `codes`, the array
        of codes may be empty, which is faster."""
        raise TypeError(f"recipe {self.name} defines no read_blocks")

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        width = self.shape(reader)[-1]
        return self.layout(reader).dequantize(self.read_blocks(reader, start, stop))[..., :width]


class Kept(Recipe):
    """The matrix `item` [..., out, in]. Backends multiply by its stored blocks instead of dequantizing them first.

    `activations` is "fp8" if backends also round activations to 8-bit floats in products with many tokens, else "".
    """

    item: Recipe
    activations: str = ""

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.item.read(reader, start, stop)


def find_block_layout(recipe: Recipe, reader: TensorReader) -> BlockLayout | str:
    """Return the layout of the blocks that form the rows of `recipe`; a reason (str) if the rows are not blocks."""
    leaves = find_block_leaves(recipe, reader)
    if isinstance(leaves, str):
        return leaves
    layouts = [_find_leaf_layout(leaf, reader) for leaf in leaves]
    if reason := next((layout for layout in layouts if isinstance(layout, str)), None):
        return reason
    first, *rest = dict.fromkeys(layouts)
    if rest:
        return f"its rows are stored in different ways ({', '.join(sorted(map(str, (first, *rest))))})"
    return first


def get_block_layout(recipe: Recipe, reader: TensorReader) -> BlockLayout:
    """Return the layout of the blocks that form the rows of `recipe`; raise WeftError if the rows are not blocks."""
    layout = find_block_layout(recipe, reader)
    if isinstance(layout, str):
        raise WeftError(f"the blocks of {', '.join(recipe.sources())} cannot be kept: {layout}")
    return layout


def find_block_leaves(recipe: Recipe, reader: TensorReader) -> tuple[Recipe, ...] | str:
    """Return the `Source`s and `BlockRecipe`s whose full rows `recipe` moves; a reason (str) if it does more."""
    if isinstance(recipe, (Source, BlockRecipe)):
        return (recipe,)
    if not recipe.parts:
        return "it is not read from a file"
    if not _moves_rows(recipe, reader):
        if not recipe.has(Source, BlockRecipe):
            return "it is not read from a file"
        return f"its recipe ({recipe.name}) does more than move whole rows"
    collected: list[Recipe] = []
    for part in recipe.parts:
        leaves = find_block_leaves(part, reader)
        if isinstance(leaves, str):
            return leaves
        collected += leaves
    return tuple(collected)


def _moves_rows(recipe: Recipe, reader: TensorReader) -> bool:
    if isinstance(recipe, (Concat, Slice, Take)):
        return recipe.axis == 0 or recipe.axis < len(recipe.parts[0].shape(reader)) - 1
    if isinstance(recipe, Permute):
        return recipe.axes[-1] == len(recipe.axes) - 1
    return isinstance(recipe, Kept) or (isinstance(recipe, Reshape) and recipe.dims[-1] == -1)


def read_leaf_blocks(leaf: Recipe, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
    """Return the blocks of ``start:stop`` on axis 0 of a leaf of `find_block_leaves`; `codes` as in `read_blocks`."""
    if isinstance(leaf, BlockRecipe):
        return leaf.read_blocks(reader, start, stop, codes)
    assert isinstance(leaf, Source) and isinstance(reader, BlockTensorReader)
    layout = find_layout(reader.dtype(leaf.key))
    assert layout is not None
    return layout.unpack(np.asarray(reader.read_blocks(leaf.key, start, stop)))


def _find_leaf_layout(leaf: Recipe, reader: TensorReader) -> BlockLayout | str:
    if isinstance(leaf, BlockRecipe):
        return leaf.layout(reader)
    assert isinstance(leaf, Source)
    dtype = reader.dtype(leaf.key)
    layout = find_layout(dtype)
    if layout is None:
        return f"it is stored as {dtype}, not as {', '.join(LAYOUTS)} or integers in groups"
    if not isinstance(reader.base if isinstance(reader, SpilledTensors) else reader, BlockTensorReader):
        return "its reader returns no blocks"
    if reader.shape(leaf.key)[-1] % dtype.block:
        return f"the width of its rows is not a multiple of {dtype.block}, the elements of a block"
    return layout
