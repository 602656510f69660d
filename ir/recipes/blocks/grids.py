"""Recover the codes of weights that were quantized in blocks and then saved as floats.

In a dequantized checkpoint the values of every group are multiples of a step (plus an offset): a grid. Rounding them to
another grid would add a second rounding error to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from ...types import dtypes
from ...types.block_layouts import LAYOUTS, BlockLayout, Blocks, build_integer_layout, build_offset_layout
from ..combinators import Source
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe, find_block_leaves
from .quantize import quantize_chunks
from .spans import find_extremes, invert_scales, quantize_with_offsets, round_scales, scale_error, split_groups

# Relative rounding errors of float dtypes; for f32 also of the multiplication and addition.
UNITS = {dtypes.f64: 2.0**-20, dtypes.f32: 2.0**-20, dtypes.f16: 2.0**-11, dtypes.bf16: 2.0**-8}
SAMPLES, SAMPLED = 4, 4  # sampled positions of a tensor, and rows at each
FEWEST = 4  # distinct values that a group needs to identify a grid


class OnGrid(BlockRecipe):
    """The float tensor `item` [out, in], which was dequantized from blocks, converted back to blocks.

    Codes have `bits` bits in groups of `group` elements of a row, with zero points if `zeros`. `minima` is "" (none),
    "codes" (offsets as in `AsStored`) or "numbers" (as in Q4_1, for 4 bits and groups of 32). A group that no grid
    represents exactly is rounded. WeftError if a value is not finite or a scale exceeds the range of f16.
    """

    item: Recipe
    bits: int = 4
    group: int = 32
    zeros: bool = False
    minima: str = ""

    def layout(self, reader: TensorReader) -> BlockLayout:
        if not self.minima:
            return build_integer_layout(self.bits, self.group, self.zeros)
        return LAYOUTS[dtypes.q4_1.name] if self.minima == "numbers" else build_offset_layout(self.bits, self.group)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        layout, rows = self.layout(reader), self.item.read(reader, start, stop)

        def quantize(chunk: slice) -> Blocks:
            groups = split_groups(rows[chunk], self.group)
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                blocks, _ = fit_grids(groups, layout, _get_rounding_error(self.item, reader) or 0)
                if blocks.offsets is not None and layout.sums:
                    blocks = quantize_with_offsets(groups, blocks.scales, blocks.offsets, layout)
            if not np.isfinite(blocks.scales).all():
                raise scale_error(groups, self.sources(), "f16")
            return blocks

        return quantize_chunks(rows, quantize)


def find_grid_layout(recipe: Recipe, reader: TensorReader, layouts: Iterable[BlockLayout]) -> BlockLayout | None:
    """Return the first of `layouts` that represents the values of `recipe` exactly. Return None if none does, if most
    groups have fewer than `FEWEST` distinct values (which fit any grid), or if `recipe` does more than move full rows
    of float tensors. A few rows of each tensor are checked: groups of other weights almost never fit."""
    leaves = find_block_leaves(recipe, reader)
    if isinstance(leaves, str) or any(_get_rounding_error(leaf, reader) is None for leaf in leaves):
        return None
    sample = functools.cache(lambda leaf: _sample_rows(leaf, reader))

    def fits(leaf: Recipe, layout: BlockLayout) -> bool:
        rows = sample(leaf)
        if layout.has_minimum and rows.shape[-1] % layout.group:  # padding adds 0 to the values of a group
            return False
        return _is_on_grids(split_groups(rows, layout.group), layout, _get_rounding_error(leaf, reader) or 0)

    return next((layout for layout in layouts if all(fits(leaf, layout) for leaf in leaves)), None)


def _sample_rows(leaf: Recipe, reader: TensorReader) -> Array:
    count, *stacked, width = leaf.shape(reader)
    rows = 1 if len(stacked) else SAMPLED  # in a stack a row is a matrix
    starts = dict.fromkeys(int(at) for at in np.linspace(0, max(0, count - rows), SAMPLES))
    parts = [leaf.read(reader, at, min(at + rows, count)).reshape(-1, width)[-SAMPLED:] for at in starts]
    return np.concatenate(parts)


def _is_on_grids(groups: Array, layout: BlockLayout, unit: float) -> bool:
    # Elements with the same code have the same value.
    values = 1 + (np.diff(np.sort(groups, -1)) != 0).sum(-1)
    if not values.size or values.max() > 2**layout.bits or not np.isfinite(groups).all():
        return False
    if (values < FEWEST).mean() > 0.5:  # a few values are on any grid
        return False
    with np.errstate(over="ignore", invalid="ignore"):  # values that overflow are on no grid
        return bool(fit_grids(groups, layout, unit)[1].all())


def _get_rounding_error(leaf: Recipe, reader: TensorReader) -> float | None:
    return UNITS.get(reader.dtype(leaf.key)) if isinstance(leaf, Source) else None


def fit_grids(groups: Array, layout: BlockLayout, unit: float) -> tuple[Blocks, Array]:
    """Return the blocks of `layout` that `groups` f32 [..., groups, group] were dequantized from, and a mask [...,
    groups] of the groups that they represent exactly; other groups are rounded to a grid over their range.

    On a grid, each value minus a start is an integer multiple of one step. The start is 0, or the least value of the
    group if `layout` has minima. `unit` is the relative rounding error of the dtype of the tensor; the tolerance
    follows from it. A step must be at least 8 times the largest deviation, since any values fit a fine grid.
    """
    rows = groups.reshape(-1, groups.shape[-1])
    low, high = find_extremes(rows)
    start = low if layout.has_minimum else np.zeros_like(low)
    most = np.maximum(high, -low)
    allowed = np.float32(1.5 * unit) * most
    if layout.has_minimum or layout.has_zeros:
        reach = high - low if layout.has_minimum else np.maximum(high, 0) - np.minimum(low, 0)
        candidates = [reach / np.float32(count) for count in range(2**layout.bits - 1, 0, -1)]
    else:
        # Only the code 0 reaches the largest magnitude, −middle steps: the step has the opposite sign.
        opposite = np.where(high > -low, -most, most) / np.float32(layout.middle)
        candidates = [opposite, *(most / np.float32(layout.middle - less) for less in (1, 2, 3))]
    multiples, steps, starts, off = _fit_steps(rows, start, candidates[0], layout)
    fits = _is_close(off, allowed, steps)
    for coarser in candidates[1:]:
        remaining = np.flatnonzero(~fits)
        if not remaining.size:
            break
        fit = _fit_steps(rows[remaining], start[remaining], coarser[remaining], layout)
        close = _is_close(fit[3], allowed[remaining], fit[1])
        fits[remaining] = close
        for values, new in zip((multiples, steps, starts), fit, strict=False):
            values[remaining[close]] = new[close]
    offsets, zeros, least = None, None, np.full_like(low, -layout.middle)  # the multiple of the code 0
    if layout.has_minimum:
        least, offsets = np.zeros_like(low), starts + layout.middle * steps
    else:
        steps = round_scales(steps, layout)
        if layout.has_zeros:
            least = np.minimum(multiples.min(-1), 0)
            zeros = (-least).astype(np.uint8)
    codes = np.clip(multiples - least[:, None], 0, 2**layout.bits - 1).astype(np.uint8)
    shape = groups.shape[:-1]
    optional = [None if part is None else part.reshape(shape) for part in (offsets, zeros)]
    return Blocks(codes.reshape(groups.shape), steps.reshape(shape), *optional), fits.reshape(shape)


def _is_close(off: Array, allowed: Array, steps: Array) -> Array:
    return np.asarray((off <= allowed) & ((8 * off <= np.abs(steps)) | (steps == 0)))


def _fit_steps(groups: Array, start: Array, steps: Array, layout: BlockLayout) -> tuple[Array, Array, Array, Array]:
    """Round `groups` to start + multiple · step, and refit steps and starts by least squares. Return the multiples f32,
    the new steps, the new starts, and the largest deviation of each group."""
    multiples: Array = np.rint((groups - start[:, None]) * invert_scales(steps)[:, None])
    if not (layout.has_zeros or layout.has_minimum):
        np.clip(multiples, -layout.middle, layout.middle - 1, out=multiples)
    squares = np.square(multiples).sum(-1)
    if layout.has_minimum:
        count, first = np.float32(groups.shape[-1]), multiples.sum(-1)
        spread = count * squares - first * first
        steps = np.where(spread > 0, (count * (multiples * groups).sum(-1) - first * groups.sum(-1)), 0)
        steps = steps * invert_scales(spread)
        start = (groups.sum(-1) - steps * first) / count
    else:
        steps = (multiples * groups).sum(-1) * invert_scales(squares)
    off: Array = np.abs(groups - multiples * steps[:, None] - start[:, None]).max(-1)
    return multiples, steps, start, off
