"""Weights that were in blocks of few bits once, and have been written as floats since: back to their codes.

Whoever dequantizes a checkpoint leaves numbers that lie on a grid in every group; rounding them in another way loses
what this one has lost already, once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...types import dtypes
from ...types.block_layouts import LAYOUTS, BlockLayout, Blocks, integer_layout, offset_layout
from ..combinators import Source
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe, block_leaves
from .quantize import CHUNK, joined
from .spans import extremes, grouped, reciprocal, rounded_scales, unscaled, with_sums

# Relative rounding errors of numbers in floats; in f32 those of multiplying and adding, too.
UNITS = {dtypes.f64: 2.0**-20, dtypes.f32: 2.0**-20, dtypes.f16: 2.0**-11, dtypes.bf16: 2.0**-8}
SAMPLES, SAMPLED = 4, 4  # places of a tensor that are looked at, and rows at each
FEWEST = 4  # different numbers in a group that tell of a grid


@dataclass(frozen=True)
class OnGrid(BlockRecipe):
    """The matrix `item` [out, in], a tensor of floats whose numbers lie on grids of `bits` bits in groups of `group`
    numbers of a row, as the blocks that it was before somebody wrote it as floats, see `grid_layout`.

    Grids of 4 bits in groups of 32 may have `minima`: "codes", offsets as of `AsStored`, or "numbers", as of Q4_1. A
    group that is on no grid is rounded to one over its range.

    Raises:
        WeftError: where a number is not finite, or a scale beyond what f16 reaches.
    """

    item: Recipe
    bits: int = 4
    group: int = 32
    zeros: bool = False
    minima: str = ""

    def layout(self, reader: TensorReader) -> BlockLayout:
        if not self.minima:
            return integer_layout(self.bits, self.group, self.zeros)
        return LAYOUTS[dtypes.q4_1.name] if self.minima == "numbers" else offset_layout(self.bits, self.group)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.item.shape(reader)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        layout, rows = self.layout(reader), self.item.read(reader, start, stop)
        step = max(1, CHUNK // max(1, int(np.prod(rows.shape[1:]))))
        parts = []
        for first in range(0, max(len(rows), 1), step):
            groups = grouped(rows[first : first + step], self.group)
            with np.errstate(over="ignore", invalid="ignore"):  # found below
                blocks, _ = gridded(groups, layout, _unit(self.item, reader) or 0)
                if blocks.offsets is not None and layout.sums:
                    blocks = with_sums(groups, blocks.scales, blocks.offsets, layout)
            if not np.isfinite(blocks.scales).all():
                raise unscaled(groups, self.sources(), "f16")
            parts.append(blocks)
        return parts[0] if len(parts) == 1 else joined(parts)


def grid_layout(recipe: Recipe, reader: TensorReader, layouts: Iterable[BlockLayout]) -> BlockLayout | None:
    """Return the first of `layouts` on whose grids the numbers of `recipe` lie, which moves rows of a file's floats.

    Some rows of each tensor tell: numbers that never were in blocks are on no grid in a single group.
    """
    leaves = block_leaves(recipe, reader)
    if isinstance(leaves, str) or any(_unit(leaf, reader) is None for leaf in leaves):
        return None
    samples: dict[Recipe, Array] = {}
    for layout in layouts:
        for leaf in leaves:
            if leaf not in samples:
                samples[leaf] = _sample(leaf, reader)
            whole = samples[leaf].shape[-1] % layout.group == 0
            if layout.has_minimum and not whole:  # a group that is filled up has 0 among its numbers
                break
            if not _lies_on(grouped(samples[leaf], layout.group), layout, _unit(leaf, reader) or 0):
                break
        else:
            return layout
    return None


def _sample(leaf: Recipe, reader: TensorReader) -> Array:
    """Some rows [rows, width] from the beginning, the middle and the end of a tensor."""
    count, *stacked, width = leaf.shape(reader)
    rows = 1 if len(stacked) else SAMPLED  # of a stack, one matrix
    starts = dict.fromkeys(int(at) for at in np.linspace(0, max(0, count - rows), SAMPLES))
    parts = [leaf.read(reader, at, min(at + rows, count)).reshape(-1, width)[-SAMPLED:] for at in starts]
    return np.concatenate(parts)


def _lies_on(groups: Array, layout: BlockLayout, unit: float) -> bool:
    # Numbers of the same code are the same.
    values = 1 + (np.diff(np.sort(groups, -1)) != 0).sum(-1)
    if not values.size or values.max() > 2**layout.bits or not np.isfinite(groups).all():
        return False
    if (values < FEWEST).mean() > 0.5:  # a few values are on any grid
        return False
    with np.errstate(over="ignore", invalid="ignore"):  # such numbers lie on no grid
        return bool(gridded(groups, layout, unit)[1].all())


def _unit(leaf: Recipe, reader: TensorReader) -> float | None:
    return UNITS.get(reader.dtype(leaf.key)) if isinstance(leaf, Source) else None


def gridded(groups: Array, layout: BlockLayout, unit: float) -> tuple[Blocks, Array]:
    """The blocks that `groups` [..., groups, group] were made of, where they lie on a grid, and where they do, bool
    [..., groups]; the others are rounded to grids over their ranges.

    On a grid all numbers of a group are whole multiples of one step, counted from 0, or from the least of them where
    `layout` has minima. `unit` is the relative rounding error of the dtype that they are read from: what a number may
    be off. A step must be some ten times that, or else anything would lie on a grid.
    """
    rows = groups.reshape(-1, groups.shape[-1])
    low, high = extremes(rows)
    start = low if layout.has_minimum else np.zeros_like(low)
    most = np.maximum(high, -low)
    allowed = np.float32(1.5 * unit) * most
    if layout.has_minimum or layout.has_zeros:
        reach = high - low if layout.has_minimum else np.maximum(high, 0) - np.minimum(low, 0)
        tried = [reach / np.float32(count) for count in range(2**layout.bits - 1, 0, -1)]
    else:
        # The code 0 alone stands for so large a number as it does: its sign is that of the step, turned.
        turned = np.where(high > -low, -most, most) / np.float32(layout.middle)
        tried = [turned, *(most / np.float32(layout.middle - less) for less in (1, 2, 3))]
    multiples, steps, starts, off = _on_steps(rows, start, tried[0], layout)
    fits = _close(off, allowed, steps)
    for coarser in tried[1:]:
        left = np.flatnonzero(~fits)
        if not left.size:
            break
        found = _on_steps(rows[left], start[left], coarser[left], layout)
        close = _close(found[3], allowed[left], found[1])
        fits[left] = close
        for values, new in zip((multiples, steps, starts), found, strict=False):
            values[left[close]] = new[close]
    offsets, zeros, least = None, None, np.full_like(low, -layout.middle)  # the multiple of the code 0
    if layout.has_minimum:
        least, offsets = np.zeros_like(low), starts + layout.middle * steps
    else:
        steps = rounded_scales(steps, layout)
        if layout.has_zeros:
            least = np.minimum(multiples.min(-1), 0)
            zeros = (-least).astype(np.uint8)
    codes = np.clip(multiples - least[:, None], 0, 2**layout.bits - 1).astype(np.uint8)
    shape = groups.shape[:-1]
    beside = [None if part is None else part.reshape(shape) for part in (offsets, zeros)]
    return Blocks(codes.reshape(groups.shape), steps.reshape(shape), *beside), fits.reshape(shape)


def _close(off: Array, allowed: Array, steps: Array) -> Array:
    close: Array = (off <= allowed) & ((8 * off <= np.abs(steps)) | (steps == 0))
    return close


def _on_steps(groups: Array, start: Array, steps: Array, layout: BlockLayout) -> tuple[Array, Array, Array, Array]:
    """The multiples of `steps` from `start` on nearest to `groups`, f32, steps and starts fitted to these by least
    squares, and how far the numbers are off at most."""
    multiples: Array = np.rint((groups - start[:, None]) * reciprocal(steps)[:, None])
    if not (layout.has_zeros or layout.has_minimum):
        np.clip(multiples, -layout.middle, layout.middle - 1, out=multiples)
    own = np.square(multiples).sum(-1)
    if layout.has_minimum:
        count, first = np.float32(groups.shape[-1]), multiples.sum(-1)
        spread = count * own - first * first
        steps = np.where(spread > 0, (count * (multiples * groups).sum(-1) - first * groups.sum(-1)), 0)
        steps = steps * reciprocal(spread)
        start = (groups.sum(-1) - steps * first) / count
    else:
        steps = (multiples * groups).sum(-1) * reciprocal(own)
    off: Array = np.abs(groups - multiples * steps[:, None] - start[:, None]).max(-1)
    return multiples, steps, start, off
