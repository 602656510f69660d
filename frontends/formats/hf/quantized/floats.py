"""Weights that are published as small floats, read as the numbers that the codes stand for.

``mxfp4`` (gpt-oss) is the microscaling format of the OCP MX specification 1.0: 32 codes of 4 bits (E2M1) share one
power of two (E8M0). Others store such codes as matrices (`Float4`), or with scales of 8 bits and one for a matrix
(nvfp4). ``fp8`` (DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3) are floats of 8 bits of which every tile, mostly
128 · 128, has a scale. Only weights: what such models round activations to while they run is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import LAYOUTS, NVFP4, BlockLayout, Blocks, unpack_codes
from weft.ir.types.dtypes import DType

from .tensor import Quantized, beside, finite, misfit, whole

_BYTES = np.arange(256, dtype=np.uint8)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], -1)  # the first of two numbers is the low half
_E2M1 = _NIBBLES.view(ml_dtypes.float4_e2m1fn).astype(np.float32).view(np.uint64)[:, 0]  # byte -> two float32
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@dataclass(frozen=True)
class Floats(Quantized):
    """A tensor stored as two others: codes and their scales."""

    codes: str
    scales: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.codes, self.scales)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return reader.shape(self.codes)

    def dtype(self, reader: TensorReader) -> DType:
        return reader.dtype(self.codes)


@dataclass(frozen=True)
class MXFP4(Floats):
    """Weights of experts [experts, in, out], stored the other way about: `codes` u8 [experts, out, in / 32, 16], two
    codes a byte, and their exponents `scales` u8 [experts, out, in / 32]."""

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        experts, rows, count, _ = reader.shape(self.codes)
        return (experts, count * dtypes.mxfp4.block, rows)

    def dtype(self, reader: TensorReader) -> DType:
        return dtypes.mxfp4

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        values: Array = _E2M1[reader.read(self.codes, start, stop)].view(np.float32)
        values *= _E8M0[reader.read(self.scales, start, stop)][..., None]
        return values.reshape(*values.shape[:2], -1).swapaxes(1, 2)


def mxfp4(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> dict[str, Quantized]:
    """The experts' weights, by name."""
    tensors: dict[str, Quantized] = {}
    for key in keys:
        name = key.removesuffix("_blocks")
        if name == key:
            continue
        blocks, scales = reader.shape(key), beside(key, f"{name}_scales", keys)
        fits = len(blocks) == 4 and blocks[3] == 16 and reader.shape(scales) == blocks[:3]
        if not fits or {reader.dtype(key), reader.dtype(scales)} != {dtypes.u8}:
            raise misfit(reader, key, scales, expected="u8 [experts, out, in / 32, 16], without the last axis")
        tensors[name] = MXFP4(key, scales)
    return tensors


@dataclass(frozen=True)
class Float4(Floats):
    """A matrix [out, in] in floats of 4 bits: `codes` u8 [out, in / 2], two to a byte, the first in the low half, and
    `scales` [out, groups]: exponents u8, or f8e4m3 to be divided by the number in the tensor `divisor`."""

    divisor: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (*super().parts, *((self.divisor,) if self.divisor else ()))

    @property
    def layout(self) -> BlockLayout:
        """The layout of the blocks."""
        return LAYOUTS[NVFP4.name if self.divisor else dtypes.mxfp4.name]

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        rows, count = reader.shape(self.codes)
        return (rows, 2 * count)

    def dtype(self, reader: TensorReader) -> DType:
        return self.layout.dtype

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.layout.dequantize(self._blocks(reader, start, stop))

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.layout.pack(self._blocks(reader, start, stop))

    def _blocks(self, reader: TensorReader, start: int, stop: int) -> Blocks:
        scales, tensor_scales = reader.read(self.scales, start, stop), None
        with np.errstate(divide="ignore", over="ignore"):  # found below
            if self.divisor:
                one = np.float32(1) / whole(reader, self.divisor).astype(np.float32).reshape(1, 1)
                tensor_scales = np.broadcast_to(finite(one, self.divisor, reader), (stop - start, 1))
                scales = finite(scales.astype(np.float32) * tensor_scales, self.scales, reader)
            else:
                scales = self.layout.scales_of(scales, None)
            finite(scales * np.float32(6), self.scales, reader)
        count, group = scales.shape[1], self.layout.group
        codes = unpack_codes(reader.read(self.codes, start, stop), 4, count * group)
        return Blocks(codes.reshape(-1, count, group), scales, tensor_scales=tensor_scales)


def float4(reader: TensorReader, codes: str, name: str, keys: Collection[str]) -> Float4:
    """The matrix whose `codes` are those of the module `name`, as compressed-tensors stores it."""
    scales, divisor = beside(codes, f"{name}.weight_scale", keys), f"{name}.weight_global_scale"
    given = reader.dtype(scales)
    found = Float4(codes, scales, "" if given == dtypes.u8 else beside(codes, divisor, keys))
    shape, group = reader.shape(codes), found.layout.group
    fits = len(shape) == 2 and shape[1] > 0 and 2 * shape[1] % group == 0
    fits = fits and reader.shape(scales) == (shape[0], 2 * shape[1] // group)
    fits = fits and given in (dtypes.u8, dtypes.f8e4m3)
    if found.divisor:
        one = reader.shape(found.divisor)
        fits = fits and one in ((), (1,)) and reader.dtype(found.divisor).is_float
    if not fits:
        raise misfit(reader, *found.parts, expected="u8 [out, in / 32], or f8e4m3 [out, in / 16] and one float")
    return found


@dataclass(frozen=True)
class Tiles(Floats):
    """Floats of 8 bits, `codes`, each to be multiplied by the number of `scales` that belongs to its tile.

    `edges` are the sides of a tile, one for each axis; the last tile of an axis may be cut. One scale of no axes, or
    of a single one, is that of the whole tensor.
    """

    edges: tuple[int, ...]

    def dtype(self, reader: TensorReader) -> DType:
        stored, block = reader.dtype(self.codes), dtypes.f8e4m3_128.block
        kept = stored == dtypes.f8e4m3 and len(self.edges) == 2 and self.edges[1] % block == 0
        return dtypes.f8e4m3_128 if kept else stored

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        block = dtypes.f8e4m3_128.block
        values = reader.read(self.codes, start, stop)
        if np.isnan(values).any():
            raise WeftError(f"{reader.path}: there is a NaN in {self.codes!r}; the checkpoint is broken")
        codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(len(values), -1, block)
        tile = np.arange(codes.shape[1]) * block // self.edges[1]
        scales = self._scales(reader, start, stop)[:, tile]
        head = np.ascontiguousarray(scales[..., None], np.float32).view(np.uint8)
        return np.concatenate([head, codes], -1)

    def _scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        """The scales of the tiles in rows `start:stop`, a row for each of them."""
        if len(reader.shape(self.scales)) < 2:
            return np.broadcast_to(whole(reader, self.scales).reshape(1, 1), (stop - start, 1))
        tall = self.edges[0]
        first, last = start // tall, -(-stop // tall)
        return reader.read(self.scales, first, last)[np.arange(start, stop) // tall - first]

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        edges, scales = self.edges[1:], self._scales(reader, start, stop)
        for axis, edge in enumerate(edges, 1):
            scales = scales.repeat(edge, axis)
        values = reader.read(self.codes, start, stop)
        values *= scales[tuple(map(slice, values.shape))]
        return values


def fp8(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> dict[str, Quantized]:
    """The weights in tiles, by name.

    Raises:
        WeftError: if scales are missing or do not fit, or activations are rounded by stored scales.
    """
    size = how.get("weight_block_size", (128, 128))
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise WeftError(f"weight_block_size={size!r} says no tile of two sides")
    if how.get("activation_scheme", "dynamic") != "dynamic":
        raise WeftError(f"activation_scheme={how['activation_scheme']!r} is not supported, only 'dynamic'")
    tensors: dict[str, Quantized] = {}
    for key in keys:
        if reader.dtype(key) not in (dtypes.f8e4m3, dtypes.f8e5m2):
            continue
        shape, scales = reader.shape(key), beside(key, f"{key}_scale_inv", keys)
        # In stacks of experts tiles cover the last two axes only.
        edges = (*(1 for _ in shape[2:]), *size)
        tiles = tuple(-(-n // edge) for n, edge in zip(shape, edges, strict=False))
        if len(shape) < 2 or reader.shape(scales) != tiles or not reader.dtype(scales).is_float:
            raise misfit(reader, key, scales, expected=f"a float for each tile of {size[0]} · {size[1]}")
        tensors[key] = Tiles(key, scales, edges)
    return tensors
