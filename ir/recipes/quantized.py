"""Weights that a checkpoint stores in quantized blocks, taken as stored instead of as the numbers they stand for.

`weft.ir.types.block_layouts` says what blocks are. Kernels want their parts in two forms. In words of 32 bits,
``words`` and ``steps``, for kernels that take codes of 4 or 8 bits. And as 4-bit codes with a zero point, for others:

    weight[n, k] = scales[n, b] · (codes[n, k] − zeros[n, b]) + offsets[n, b],     b = k // group.

There an 8-bit code is two of them: ``q = 16 · (high − 8) + low``, so a row becomes the row of its high halves followed
by the row of its low halves, and is multiplied by the activations twice over. The zero of 4-bit layouts is always 8,
which kernels take for granted. Nothing is rounded but the offsets, to f32; what a reader stored as a minimum was
rounded by it, to the dtype of the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import WeftError
from ..types import dtypes
from ..types.block_layouts import BITS, LAYOUTS, BlockLayout, pack_pairs, pack_words
from ..types.dtypes import DType
from .combinators import Concat, Permute, Reshape, Slice, Source, Take
from .readers import Array, BlockTensorReader, SpilledTensors, TensorReader
from .recipe import BLOCK_ELEMENTS, Recipe


def stored_layout(recipe: Recipe, reader: TensorReader) -> BlockLayout | str:
    """The block layout that every row of `recipe` is stored in, or why its rows cannot be taken as stored."""
    if not recipe.has(Source):
        return "it is not read from a file"
    blocks = _rows_of(recipe)
    if isinstance(blocks, str):
        return blocks
    dtype, *others = {reader.dtype(key) for key in blocks}
    if others:
        return f"its rows are stored in different ways ({', '.join(sorted(map(str, (dtype, *others))))})"
    if dtype.name not in LAYOUTS:
        return f"it is stored as {dtype}, not as {', '.join(LAYOUTS)}"
    if not isinstance(reader.base if isinstance(reader, SpilledTensors) else reader, BlockTensorReader):
        return "its reader returns no blocks"
    if dtype.bits not in BITS:
        return f"codes of {dtype.bits} bits are taken by no kernel"
    if any(reader.shape(key)[-1] % dtype.block for key in blocks):
        return f"its rows are no multiple of {dtype.block} numbers, those of a block"
    return LAYOUTS[dtype.name]


def _rows_of(recipe: Recipe) -> tuple[str, ...] | str:
    """The tensors whose whole rows `recipe` rearranges, or why it does something else."""
    if isinstance(recipe, Source):
        return (recipe.key,)
    along_rows = (isinstance(recipe, (Concat, Slice, Take)) and recipe.axis == 0) or (
        isinstance(recipe, Permute) and recipe.axes[-1] == len(recipe.axes) - 1
    )
    if not (along_rows or (isinstance(recipe, Reshape) and recipe.dims[-1] == -1)):
        return f"its recipe ({recipe.name}) does more than move whole rows"
    keys: list[str] = []
    for part in recipe.parts:
        blocks = _rows_of(part)
        if isinstance(blocks, str):
            return blocks
        keys += blocks
    return tuple(keys)


@dataclass(frozen=True)
class Stored(Recipe):
    """One part of the blocks behind the matrix `item` [out, in]; see the module for what the parts mean.

    ``words``: i32 [out, words], see `pack_words`; ``steps``: f32 [out, in / group], the scales; ``offsets``:
    like steps, for layouts that have some. ``codes``: u8 [out, planes · in / 2], two 4-bit codes a byte, the first in
    the low half; ``scales``: f32 [out, planes · in / group]; ``zeros``: u8 [out, planes · in / group / 2], packed like
    codes. `planes` is 2 for 8-bit layouts, 1 for 4-bit ones.
    """

    item: Recipe
    part: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        layout = stored_layout(self.item, reader)
        if isinstance(layout, str):
            raise WeftError(f"the blocks of {', '.join(self.sources())} cannot be taken as stored: {layout}")
        return self.item.shape(_Parts(reader, self.part))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.item.read(_Parts(reader, self.part), start, stop)


@dataclass(frozen=True)
class HeadScales(Recipe):
    """f32 [heads]: the size that keys or values of each head have, as scales of caches of 8-bit floats.

    That is the root mean square over a head's rows of the product of `weight` [heads · d, in] with what a norm makes,
    if its numbers do not hang together: of size 1 but for the `gains` [in], with the `biases` [heads · d] added. A
    weight of one head stands for all. Floats hold 1/64 to 448 times that with all their bits.
    """

    weight: Recipe
    heads: int
    width: int
    gains: tuple[Recipe, ...] = ()
    biases: tuple[Recipe, ...] = ()

    @property
    def constant(self) -> bool:
        return True

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        rows = self.weight.shape(reader)[0]
        if rows not in (self.width, self.heads * self.width):
            raise WeftError(f"{rows} rows are not those of {self.heads} heads of {self.width}")
        return (self.heads,)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        gain = np.prod([g.evaluate(reader).astype(np.float64) for g in self.gains] or [np.ones(1)], axis=0)
        squares = np.concatenate([np.square(rows * gain).sum(1) for rows in self.weight.blocks(reader)])
        for bias in self.biases:
            squares += np.square(bias.evaluate(reader).astype(np.float64))
        sizes = np.sqrt(squares.reshape(-1, self.width).mean(1))
        scales = np.broadcast_to(np.where(sizes > 0, sizes, 1), self.heads)
        return scales[start:stop].astype(np.float32)


@dataclass(frozen=True)
class _Parts:
    """A reader whose tensors are one part of the blocks of another's: recipes that move rows work on it unchanged."""

    reader: TensorReader
    part: str

    @property
    def path(self) -> Path:
        return self.reader.path

    def keys(self) -> Iterable[str]:
        return self.reader.keys()

    def dtype(self, key: str) -> DType:
        return {"codes": dtypes.u8, "zeros": dtypes.u8, "words": dtypes.i32}.get(self.part, dtypes.f32)

    def shape(self, key: str) -> tuple[int, ...]:
        *lead, width = self.reader.shape(key)
        layout = LAYOUTS[self.reader.dtype(key).name]
        planes, groups = layout.bits // 4, width // layout.group
        sizes = {
            "codes": planes * width // 2,
            "scales": planes * groups,
            "zeros": -(-planes * groups // 2),
            "offsets": groups,
            "words": -(-width * layout.bits // 512) * 16,
            "steps": groups,
        }
        return (*lead, sizes[self.part])

    def read(self, key: str, start: int, stop: int) -> Array:
        step = max(1, BLOCK_ELEMENTS // self.reader.shape(key)[-1])  # whoever transposes a part reads all of its rows
        parts = [self._rows(key, first, min(first + step, stop)) for first in range(start, stop, step)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else self._rows(key, start, stop)

    def _rows(self, key: str, start: int, stop: int) -> Array:
        assert isinstance(self.reader, BlockTensorReader)
        layout = LAYOUTS[self.reader.dtype(key).name]
        codes, scales, offsets = layout.unpack(self.reader.read_blocks(key, start, stop))
        if self.part == "words":
            return pack_words(codes, layout.bits)
        if self.part == "steps":
            return scales
        if self.part == "offsets":
            assert offsets is not None
            return offsets
        flat, eights = codes.reshape(len(codes), -1), np.full(scales.shape, 8, np.uint8)
        wide = layout.bits == 8
        planes = {
            "codes": (flat >> 4, flat & 15) if wide else (flat,),
            "scales": (16 * scales, scales) if wide else (scales,),
            "zeros": (eights, np.zeros_like(eights)) if wide else (eights,),
        }[self.part]
        whole = np.concatenate(planes, -1)
        return whole if self.part == "scales" else pack_pairs(whole)
