"""Weights that a checkpoint stores in quantized blocks, taken as stored instead of as the numbers they stand for.

A block of 32 numbers of one row is held as 4-bit or 8-bit codes with one scale (and in ``q4_1`` one minimum), the
layouts of the GGUF specification. Kernels that multiply by such blocks want them as

    weight[n, k] = scales[n, b] · (codes[n, k] − zeros[n, b]) + offsets[n, b],     b = k // 32,

with codes of 4 bits. An 8-bit code is two of them: ``q = 16 · (high − 8) + low``, so a row becomes the row of its high
halves followed by the row of its low halves, and is multiplied by the activations twice over. The zero of the 4-bit
layouts is always 8, which kernels take for granted. Nothing is rounded but the offsets of ``q4_1``, to f32.

Kernels that take 8-bit codes as they are want ``weight = steps · (code − 2^{bits−1}) + offsets``, the codes in words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import WeftError
from ..types import dtypes
from ..types.dtypes import DType
from .combinators import Concat, Permute, Reshape, Slice, Source, Take
from .readers import Array, BlockTensorReader, TensorReader
from .recipe import BLOCK_ELEMENTS, Recipe

BLOCK = 32  # numbers that share a scale, in every layout below
LAYOUTS = (dtypes.q4_0, dtypes.q4_1, dtypes.q8_0)
PARTS = ("codes", "scales", "zeros", "offsets", "words", "steps")


def stored_layout(recipe: Recipe, reader: TensorReader) -> DType | str:
    """The block layout that every row of `recipe` is stored in, or why its rows cannot be taken as stored."""
    if not recipe.has(Source):
        return "it is not read from a file"
    found = _rows_of(recipe)
    if isinstance(found, str):
        return found
    layouts = {reader.dtype(key) for key in found}
    if len(layouts) > 1:
        return f"its rows are stored in different ways ({', '.join(sorted(t.name for t in layouts))})"
    layout = layouts.pop()
    if layout not in LAYOUTS or not isinstance(reader, BlockTensorReader):
        return f"it is stored as {layout}, not as {', '.join(t.name for t in LAYOUTS)}"
    return layout


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
        found = _rows_of(part)
        if isinstance(found, str):
            return found
        keys += found
    return tuple(keys)


@dataclass(frozen=True)
class Stored(Recipe):
    """One part of the blocks behind the matrix `item` [out, in]; see the module for what the parts mean.

    ``codes``: u8 [out, planes · in / 2], two codes a byte, the first in the low half; ``scales``: f32 [out, planes ·
    in / 32]; ``zeros``: u8 [out, planes · in / 64], packed like codes; ``offsets``: f32 [out, in / 32], for q4_1.
    `planes` is 2 for q8_0, else 1.
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
class _Parts:
    """An reader whose tensors are one part of the blocks of another's: recipes that move rows work on it unchanged."""

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
        planes = 2 if self.reader.dtype(key) == dtypes.q8_0 else 1
        blocks = width // BLOCK
        sizes = {
            "codes": planes * width // 2,
            "scales": planes * blocks,
            "zeros": -(-planes * blocks // 2),
            "offsets": blocks,
            "words": blocks * 4 * planes,
            "steps": blocks,
        }
        return (*lead, sizes[self.part])

    def read(self, key: str, start: int, stop: int) -> Array:
        step = max(1, BLOCK_ELEMENTS // self.reader.shape(key)[-1])  # whoever transposes a part reads all of its rows
        parts = [self._rows(key, first, min(first + step, stop)) for first in range(start, stop, step)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else self._rows(key, start, stop)

    def _rows(self, key: str, start: int, stop: int) -> Array:
        assert isinstance(self.reader, BlockTensorReader)
        raw = self.reader.read_blocks(key, start, stop)  # [rows, blocks, bytes]
        layout = self.reader.dtype(key)
        rows = len(raw)
        head = 4 if layout == dtypes.q4_1 else 2
        numbers = np.ascontiguousarray(raw[..., :head]).view(np.float16).astype(np.float32)
        scale, codes = numbers[..., 0], raw[..., head:]
        if self.part == "words":
            found = _words(codes ^ 128 if layout == dtypes.q8_0 else _halves(codes), 8 if layout == dtypes.q8_0 else 4)
        elif self.part == "steps":
            found = scale
        elif layout == dtypes.q8_0:
            shifted = (codes ^ 128).reshape(rows, -1)  # two's complement plus 128
            high = np.full(scale.shape, 8, np.uint8)
            planes = {
                "codes": (shifted >> 4, shifted & 15),
                "scales": (16 * scale, scale),
                "zeros": (high, np.zeros_like(high)),
            }
            found = np.concatenate(planes[self.part], -1)
        elif self.part == "codes":
            found = _halves(codes).reshape(rows, -1)
        elif self.part == "scales":
            found = scale
        elif self.part == "zeros":
            found = np.full(scale.shape, 8, np.uint8)
        else:
            found = numbers[..., 1] + 8 * scale
        return _packed(found) if self.part in ("codes", "zeros") else found


def _halves(codes: Array) -> Array:
    """The 32 codes of blocks of 4-bit ones: the low halves of the bytes, then the high ones."""
    return np.concatenate([codes & 15, codes >> 4], -1)


def _words(codes: Array, bits: int) -> Array:
    """Codes u8 [rows, blocks, 32] of `bits` each as words, i32 [rows, blocks · bits]."""
    runs = codes.reshape(*codes.shape[:2], 32 // bits, bits).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
    words: Array = np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(codes), -1).view(np.int32)
    return words


def _packed(codes: Array) -> Array:
    """Pairs of 4-bit codes along the last axis in one byte, the first in the low half."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    packed: Array = codes[..., ::2] | (codes[..., 1::2] << 4)
    return packed
