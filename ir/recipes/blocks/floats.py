"""Recipes that round weights to floats of 8 bits with a scale for each tile, and that read weights stored so.

The floats are e4m3 of FP8 Formats for Deep Learning (arXiv 2209.05433), without infinities; tiles of 128 · 128 share a
scale, as in DeepSeek-V3 (arXiv 2412.19437, 3.3). Blocks repeat the scale for each row of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import LAYOUTS, BlockLayout, Blocks
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe
from .spans import extremes, grouped, reciprocal

FLOAT8 = LAYOUTS.lookup(dtypes.f8e4m3_128.name)
TALL = 128  # rows of a tile
MOST = np.float32(448)  # the largest of the floats


@dataclass(frozen=True)
class ToFloat8(BlockRecipe):
    """`item` [..., out, in] rounded to the nearest floats of 8 bits, a tile of 128 · 128 numbers at a time: the one of
    largest magnitude becomes ±448 scales. The last tiles of an axis may be cut.

    Raises:
        WeftError: where a number is not finite.
    """

    item: Recipe

    def layout(self, reader: TensorReader) -> BlockLayout:
        return FLOAT8

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if len(shape) < 2 or not shape[-1]:
            raise WeftError(f"{', '.join(self.sources())} of shape {list(shape)} is no matrix to quantize")
        return shape

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        # Whole tiles are read; those of a stack are within its matrices.
        rows, *rest = self.shape(reader)
        first, last = (start, stop) if rest[1:] else (start // TALL * TALL, min(-(-stop // TALL) * TALL, rows))
        groups = grouped(self.item.read(reader, first, last), FLOAT8.group)
        scales = _of_tiles(np.maximum(*(np.abs(end) for end in extremes(groups))) / MOST)
        groups, scales = groups[start - first : stop - first], scales[start - first : stop - first]
        if not np.isfinite(scales).all():
            raise WeftError(f"a weight of {', '.join(self.sources())} is not finite: it cannot be quantized")
        if not codes:
            return Blocks(np.empty((*scales.shape, 0), np.uint8), scales)
        numbers = groups * reciprocal(scales)[..., None]
        return Blocks(numbers.clip(-MOST, MOST).astype(dtypes.f8e4m3.numpy).view(np.uint8), scales)


def _of_tiles(sizes: Array) -> Array:
    """The largest of `sizes` [..., rows, groups] in each tile of rows, for each row of it."""
    *lead, rows, groups = sizes.shape
    padded = np.pad(sizes, [*((0, 0) for _ in lead), (0, -rows % TALL), (0, 0)])
    tall = padded.reshape(*lead, -1, TALL, groups).max(-2)
    each: Array = tall.repeat(TALL, -2)[..., :rows, :]
    return each


@dataclass(frozen=True)
class Float8(BlockRecipe):
    """The matrix [..., out, `width`] that `codes` stand for: u8 [..., out, groups · 128], the bytes of floats, times
    `scales` f32 [..., out, groups]."""

    codes: Recipe
    scales: Recipe
    width: int = 0

    def layout(self, reader: TensorReader) -> BlockLayout:
        return FLOAT8

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        lead, groups = self.scales.shape(reader)[:-1], -(-self.width // FLOAT8.group)
        for part, count in ((self.codes, groups * FLOAT8.group), (self.scales, groups)):
            if (found := part.shape(reader)) != (*lead, count) or not lead or not count:
                raise WeftError(
                    f"{', '.join(part.sources())} {list(found)} does not fit: rows of {self.width} floats have {count} "
                    f"here, in {list(lead)} rows"
                )
        return (*lead, self.width)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        scales = self.scales.read(reader, start, stop).astype(np.float32, copy=False)
        found = np.empty((*scales.shape, 0), np.uint8)
        if codes:
            found = self.codes.read(reader, start, stop).reshape(*scales.shape, FLOAT8.group)
            if not np.isfinite(scales).all() or np.isnan(found.view(dtypes.f8e4m3.numpy)).any():
                raise WeftError(f"a number of {', '.join(self.sources())} is not finite: the weights are broken")
        return Blocks(found, scales)
