"""Weights as the blocks that they are stored in or quantized to, part by part, instead of as their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import WeftError
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe, block_layout
from .parts import Part


@dataclass(frozen=True)
class Stored(Recipe):
    """One part of the blocks behind the matrix `item` [..., out, in]; `parts` says what the parts are.

    ``words``: i32 [out, words], see `pack_words`; ``steps``: f32 [out, groups], the scales; ``offsets``: like steps.
    ``packed``: u8 [out, in · bits / 8]; ``points``: u8 [out, groups · bits / 8]. ``codes``: u8 [out, planes · in / 2],
    two 4-bit codes a byte, the first in the low half; ``scales``: f32 [out, planes · groups]; ``zeros``: u8 [out,
    planes · groups / 2], packed like codes. ``signed``: i8 [out, in]; ``signed_zeros``: i8 [out, groups]; ``halves``:
    u8 [out, in / 2]; ``middles``: u8 [out, groups]. `planes` is 2 for 8-bit layouts, else 1. Rows end with whole
    groups.
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
