"""Recipes that round weights to 8-bit or 4-bit floats in groups, and recipes that read weights stored so.

Floats of 8 bits are e4m3 of FP8 Formats for Deep Learning (arXiv 2209.05433), without infinities; tiles of 128 · 128
share a scale, as in DeepSeek-V3 (arXiv 2412.19437, 3.3). Blocks repeat the scale for each row of a tile.

Floats of 4 bits are E2M1. ``mxfp4``: groups of 32 with a power of two, E8M0 (OCP Microscaling Formats 1.0). ``nvfp4``:
groups of 16 with a scale E4M3, times one f32 scale of the matrix (NVIDIA, arXiv 2509.25149).
"""

from __future__ import annotations

import math

import numpy as np

from ...errors import WeftError
from ...types import dtypes
from ...types.block_layouts import LAYOUTS, NVFP4, BlockLayout, Blocks, build_integer_layout, unpack_codes
from ...types.small_floats import E2M1, LARGEST_E2M1, LARGEST_E4M3, fit_e4m3_scales, fit_power_scales, round_to_e2m1
from ..readers import Array, TensorReader
from ..recipe import Recipe
from .layouts import BlockRecipe
from .quantize import check_matrix, quantize_chunks
from .spans import find_extremes, invert_scales, split_groups

FLOAT8 = LAYOUTS.lookup(dtypes.f8e4m3_128.name)
TALL = 128  # rows of a tile
MOST = np.float32(448)  # the largest E4M3
FORMATS = (dtypes.mxfp4.name, NVFP4.name)
_DOUBLED = (128 + 2 * E2M1).astype(np.uint8)  # by code; 128 represents 0
LEAST = np.finfo(np.float32).tiny  # the least scale of a matrix: subnormal ones would lose bits


class ToFloat8(BlockRecipe):
    """`item` [..., out, in] rounded to the nearest 8-bit floats (e4m3) in tiles of 128 · 128 elements. The scale of a
    tile is its largest magnitude / 448. The last tiles of an axis may be smaller. WeftError if a value is not
    finite."""

    item: Recipe

    def layout(self, reader: TensorReader) -> BlockLayout:
        return FLOAT8

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return check_matrix(self, self.item.shape(reader))

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        # Full tiles are read; in a stack each matrix has its own tiles.
        rows, *rest = self.shape(reader)
        first, last = (start, stop) if rest[1:] else (start // TALL * TALL, min(-(-stop // TALL) * TALL, rows))
        groups = split_groups(self.item.read(reader, first, last), FLOAT8.group)
        scales = _find_tile_maxima(np.maximum(*(np.abs(end) for end in find_extremes(groups))) / MOST)
        groups, scales = groups[start - first : stop - first], scales[start - first : stop - first]
        if not np.isfinite(scales).all():
            raise WeftError(f"a weight of {', '.join(self.sources())} is not finite: it cannot be quantized")
        if not codes:
            return Blocks(np.empty((*scales.shape, 0), np.uint8), scales)
        scaled = groups * invert_scales(scales)[..., None]
        return Blocks(scaled.clip(-MOST, MOST).astype(dtypes.f8e4m3.numpy).view(np.uint8), scales)


def _find_tile_maxima(sizes: Array) -> Array:
    """Return the maxima of `sizes` [..., rows, groups] over the 128 rows of each tile, repeated for all its rows."""
    *lead, rows, groups = sizes.shape
    padded = np.pad(sizes, [*((0, 0) for _ in lead), (0, -rows % TALL), (0, 0)])
    tall = padded.reshape(*lead, -1, TALL, groups).max(-2)
    return np.asarray(tall.repeat(TALL, -2)[..., :rows, :])


class Float8(BlockRecipe):
    """The matrix [..., out, `width`] of `codes` u8 [..., out, groups · 128], the bytes of 8-bit floats, times `scales`
    f32 [..., out, groups]."""

    codes: Recipe
    scales: Recipe
    width: int = 0

    def layout(self, reader: TensorReader) -> BlockLayout:
        return FLOAT8

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        lead, groups = self.scales.shape(reader)[:-1], -(-self.width // FLOAT8.group)
        for part, count in ((self.codes, groups * FLOAT8.group), (self.scales, groups)):
            if (actual := part.shape(reader)) != (*lead, count) or not lead or not count:
                raise WeftError(
                    f"{', '.join(part.sources())} has shape {list(actual)}, but rows of {self.width} floats in "
                    f"{FLOAT8} need {[*lead, count]}"
                )
        return (*lead, self.width)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        scales = self.scales.read(reader, start, stop).astype(np.float32, copy=False)
        raw = np.empty((*scales.shape, 0), np.uint8)
        if codes:
            raw = self.codes.read(reader, start, stop).reshape(*scales.shape, FLOAT8.group)
            if not np.isfinite(scales).all() or np.isnan(raw.view(dtypes.f8e4m3.numpy)).any():
                raise WeftError(
                    f"an element of {', '.join(self.sources())} is not finite: fetch or save the weights again"
                )
        return Blocks(raw, scales)


def find_float4_layout(name: str) -> BlockLayout:
    """Return the layout of 4-bit floats called `name`, mxfp4 or nvfp4; raise WeftError for another name."""
    if name not in FORMATS:
        raise WeftError(f"unknown format of 4-bit floats {name!r}; known are {' and '.join(FORMATS)}")
    return LAYOUTS[name]


def compute_tensor_scale(largest: float) -> float:
    """Return the f32 scale of an nvfp4 matrix whose largest magnitude is `largest`: largest / (6 · 448), ≥ `LEAST`."""
    return float(max(np.float32(largest) / (LARGEST_E2M1 * LARGEST_E4M3), LEAST))


class ToFloat4(BlockRecipe):
    """`item` [..., out, in] rounded to the nearest 4-bit floats of `format`, ties to even, in groups of adjacent
    elements.

    With L the largest magnitude of a group, its scale is 2^(⌊log2 L⌋ − 2) in ``mxfp4``; magnitudes above 6 · scale
    become 6 · scale. In ``nvfp4`` it is the E4M3 nearest to L / 6 / tensor scale, and 0 only for groups of zeros.
    `tensor_scales` (nvfp4 only) has one for all matrices or, for a stack [experts, out, in], one for each. WeftError if
    a value is not finite.
    """

    item: Recipe
    format: str = dtypes.mxfp4.name
    tensor_scales: tuple[float, ...] = ()

    def layout(self, reader: TensorReader) -> BlockLayout:
        return find_float4_layout(self.format)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        layout, shape = self.layout(reader), check_matrix(self, self.item.shape(reader))
        count = len(self.tensor_scales)
        wanted = {1, shape[0] if len(shape) > 2 else 1} if layout.tensor_scale else {0}
        if count not in wanted or not all(0 < s < math.inf for s in self.tensor_scales):
            raise WeftError(
                f"{', '.join(self.sources())} of shape {list(shape)}: format={self.format} needs "
                f"{' or '.join(map(str, sorted(wanted)))} tensor_scales above 0, not {list(self.tensor_scales)}"
            )
        return shape

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        layout, rows = self.layout(reader), self.item.read(reader, start, stop)
        row_scales = self._row_scales(rows, start) if layout.tensor_scale else None

        def quantize(chunk: slice) -> Blocks:
            groups = split_groups(rows[chunk], layout.group)
            largest = np.maximum(*(np.abs(end) for end in find_extremes(groups)))
            if not np.isfinite(largest).all():
                raise WeftError(f"a weight of {', '.join(self.sources())} is not finite: it cannot be quantized")
            outer = None if row_scales is None else row_scales[chunk]
            scales = fit_power_scales(largest) if outer is None else fit_e4m3_scales(largest, outer) * outer
            rounded = np.empty((*scales.shape, 0), np.uint8)
            if codes:
                with np.errstate(over="ignore"):  # values beyond 6 scales become 6
                    rounded = round_to_e2m1(groups / np.where(scales == 0, np.float32(1), scales)[..., None])
            return Blocks(rounded, scales, tensor_scales=outer)

        return quantize_chunks(rows, quantize)

    def _row_scales(self, rows: Array, start: int) -> Array:
        scales = np.array(self.tensor_scales, np.float32)
        selected = scales if len(scales) == 1 else scales[start : start + len(rows)]
        lead = rows.shape[:-1]
        return np.broadcast_to(selected.reshape(-1, *(1 for _ in lead)), (*lead, 1))


class Float4(BlockRecipe):
    """The matrix [..., out, `width`] of stored 4-bit floats, E2M1 value · scale (· tensor scale).

    `codes` u8 [..., out, groups · group / 2] have two E2M1 per byte, the first in the low half. `scales` u8 [..., out,
    groups] are bytes of E8M0 (mxfp4) or E4M3 (nvfp4). `tensor_scales` f32 [..., out, 1] are for nvfp4 only.
    """

    codes: Recipe
    scales: Recipe
    tensor_scales: Recipe | None = None
    width: int = 0
    format: str = dtypes.mxfp4.name

    def layout(self, reader: TensorReader) -> BlockLayout:
        return find_float4_layout(self.format)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        layout, lead = self.layout(reader), self.scales.shape(reader)[:-1]
        groups = -(-self.width // layout.group)
        parts = [(self.codes, groups * layout.group // 2), (self.scales, groups)]
        if layout.tensor_scale != (self.tensor_scales is not None):
            need = "needs" if layout.tensor_scale else "takes no"
            raise WeftError(f"{', '.join(self.sources())}: format={self.format} {need} tensor_scales")
        if self.tensor_scales is not None:
            parts.append((self.tensor_scales, 1))
        for part, count in parts:
            if (actual := part.shape(reader)) != (*lead, count) or not lead or not groups:
                raise WeftError(
                    f"{', '.join(part.sources())} has shape {list(actual)}, but rows of {self.width} floats in "
                    f"{self.format} need {[*lead, count]}"
                )
        return (*lead, self.width)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        layout = self.layout(reader)
        tensor_scales = None if self.tensor_scales is None else self.tensor_scales.read(reader, start, stop)
        if tensor_scales is not None:
            tensor_scales = tensor_scales.astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            scales = layout.decode_scales(self.scales.read(reader, start, stop), tensor_scales)
            if not np.isfinite(scales * LARGEST_E2M1).all():
                raise WeftError(
                    f"a scale of {', '.join(self.sources())} is not finite: fetch or save the weights again"
                )
        unpacked = np.empty((*scales.shape, 0), np.uint8)
        if codes:
            packed = self.codes.read(reader, start, stop)
            unpacked = unpack_codes(packed, 4, scales.shape[-1] * layout.group).reshape(*scales.shape, layout.group)
        return Blocks(unpacked, scales, tensor_scales=tensor_scales)


class InBytes(BlockRecipe):
    """The matrix `item`, a `BlockRecipe` of 4-bit floats, as 8-bit integers, for kernels that read 8-bit codes. It is
    exact: twice a 4-bit float is an integer from −12 to 12."""

    item: Recipe

    def layout(self, reader: TensorReader) -> BlockLayout:
        assert isinstance(self.item, BlockRecipe)
        return build_integer_layout(8, self.item.layout(reader).group, False, dtypes.f32)

    def read_blocks(self, reader: TensorReader, start: int, stop: int, codes: bool = True) -> Blocks:
        assert isinstance(self.item, BlockRecipe)
        blocks = self.item.read_blocks(reader, start, stop, codes)
        return Blocks(_DOUBLED[blocks.codes], blocks.scales * np.float32(0.5))


def widen_small_floats(recipe: Recipe, reader: TensorReader) -> Recipe:
    """Return `recipe` with every matrix of 4-bit floats wrapped in `InBytes`."""
    if isinstance(recipe, BlockRecipe):
        return InBytes(recipe) if recipe.layout(reader).small_floats else recipe
    return recipe.map_parts(lambda part: widen_small_floats(part, reader))
