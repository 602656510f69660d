"""Quantized weights in small floats: 4-bit (mxfp4, nvfp4) and 8-bit (fp8).

``mxfp4`` (gpt-oss) is the microscaling format of the OCP MX specification 1.0: 32 4-bit codes (E2M1) share one power of
two (E8M0). compressed-tensors stores such codes as a matrix (`Float4Matrix`); its nvfp4 has 8-bit float scales, and one
more scale per matrix. ``fp8`` (DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3) are 8-bit floats with a scale for
every tile, mostly 128 × 128. The rounding of activations that such models do at run time is left out.
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

from .tensor import QuantizedTensor, check_finite, misfit_error, read_all, require_key

_BYTES = np.arange(256, dtype=np.uint8)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], -1)  # the first of two values is in the low half
_E2M1 = _NIBBLES.view(ml_dtypes.float4_e2m1fn).astype(np.float32).view(np.uint64)[:, 0]  # byte -> two float32
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@dataclass(frozen=True)
class Floats(QuantizedTensor):
    """A tensor stored as the tensors "codes" and "scales"."""

    @property
    def codes(self) -> str:
        return self.keys["codes"]

    @property
    def scales(self) -> str:
        return self.keys["scales"]


@dataclass(frozen=True)
class MXFP4(Floats):
    """Weights of experts [experts, in, out] in MXFP4, whose codes are stored transposed. codes: u8 [experts, out, in /
    32, 16], two per byte. scales: exponents u8 [experts, out, in / 32]."""

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        experts, rows, count, _ = reader.shape(self.codes)
        return (experts, count * dtypes.mxfp4.block, rows)

    def dtype(self, reader: TensorReader) -> DType:
        return dtypes.mxfp4

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        values: Array = _E2M1[reader.read(self.codes, start, stop)].view(np.float32)
        values *= _E8M0[reader.read(self.scales, start, stop)][..., None]
        return values.reshape(*values.shape[:2], -1).swapaxes(1, 2)


def read_mxfp4(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the experts' MXFP4 weights among the tensors `keys`, keyed by name; raise WeftError if scales misfit."""
    tensors: dict[str, QuantizedTensor] = {}
    for key in keys:
        name = key.removesuffix("_blocks")
        if name == key:
            continue
        blocks, scales = reader.shape(key), require_key(key, f"{name}_scales", keys)
        fits = len(blocks) == 4 and blocks[3] == 16 and reader.shape(scales) == blocks[:3]
        if not fits or {reader.dtype(key), reader.dtype(scales)} != {dtypes.u8}:
            expected = "blocks must be u8 [experts, out, in / 32, 16], and scales u8 [experts, out, in / 32]"
            raise misfit_error(reader, key, scales, expected=expected)
        tensors[name] = MXFP4({"codes": key, "scales": scales})
    return tensors


@dataclass(frozen=True)
class Float4Matrix(Floats):
    """A matrix [out, in] in 4-bit floats.

    codes: u8 [out, in / 2], two per byte with the first in the low half. scales [out, groups]: exponents u8, or f8e4m3
    values, which are divided by the scalar in the tensor "divisor".
    """

    @property
    def layout(self) -> BlockLayout:
        """Return the block layout: nvfp4 with a divisor, mxfp4 without."""
        return LAYOUTS[NVFP4.name if self.keys["divisor"] else dtypes.mxfp4.name]

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
        with np.errstate(divide="ignore", over="ignore"):  # `check_finite` reports them below
            if divisor := self.keys["divisor"]:
                tensor_scale = np.float32(1) / read_all(reader, divisor).astype(np.float32).reshape(1, 1)
                tensor_scales = np.broadcast_to(check_finite(tensor_scale, divisor, reader), (stop - start, 1))
                scales = check_finite(scales.astype(np.float32) * tensor_scales, self.scales, reader)
            else:
                scales = self.layout.decode_scales(scales, None)
            check_finite(scales * np.float32(6), self.scales, reader)
        count, group = scales.shape[1], self.layout.group
        codes = unpack_codes(reader.read(self.codes, start, stop), 4, count * group)
        return Blocks(codes.reshape(-1, count, group), scales, tensor_scales=tensor_scales)


def read_float4(reader: TensorReader, codes: str, name: str, keys: Collection[str]) -> Float4Matrix:
    """Return the weight of the module `name` with the tensor `codes` of compressed-tensors; `keys` are all tensors.

    Raises:
        WeftError: if its scales are missing or do not fit.
    """
    scales = require_key(codes, f"{name}.weight_scale", keys)
    scale_dtype = reader.dtype(scales)
    divisor = "" if scale_dtype == dtypes.u8 else require_key(codes, f"{name}.weight_global_scale", keys)
    matrix = Float4Matrix({"codes": codes, "scales": scales, "divisor": divisor})
    shape, group = reader.shape(codes), matrix.layout.group
    fits = len(shape) == 2 and shape[1] > 0 and 2 * shape[1] % group == 0
    fits = fits and reader.shape(scales) == (shape[0], 2 * shape[1] // group)
    fits = fits and scale_dtype in (dtypes.u8, dtypes.f8e4m3)
    if divisor:
        fits = fits and reader.shape(divisor) in ((), (1,)) and reader.dtype(divisor).is_float
    if not fits:
        expected = "codes must be u8 [out, in / 2], scales u8 [out, in / 32] or f8e4m3 [out, in / 16] and one float"
        raise misfit_error(reader, *matrix.parts, expected=expected)
    return matrix


@dataclass(frozen=True)
class Tiles(Floats):
    """A tensor in 8-bit floats, each multiplied by the scale of its tile.

    edges: size of a tile along each axis; the last tile of an axis may be smaller. Scales with fewer than two axes are
    one scale for all elements.
    """

    edges: tuple[int, ...]

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return reader.shape(self.codes)

    def dtype(self, reader: TensorReader) -> DType:
        stored, block = reader.dtype(self.codes), dtypes.f8e4m3_128.block
        has_layout = stored == dtypes.f8e4m3 and len(self.edges) == 2 and self.edges[1] % block == 0
        return dtypes.f8e4m3_128 if has_layout else stored

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        block = dtypes.f8e4m3_128.block
        values = reader.read(self.codes, start, stop)
        if np.isnan(values).any():
            raise WeftError(f"{reader.path}: {self.codes!r} contains NaN; the checkpoint is damaged")
        codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(len(values), -1, block)
        tile = np.arange(codes.shape[1]) * block // self.edges[1]
        scales = self._scales(reader, start, stop)[:, tile]
        head = np.ascontiguousarray(scales[..., None], np.float32).view(np.uint8)
        return np.concatenate([head, codes], -1)

    def _scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return the scales of the tiles of each row in `start:stop`, [stop - start, tiles per row]."""
        if len(reader.shape(self.scales)) < 2:
            return np.broadcast_to(read_all(reader, self.scales).reshape(1, 1), (stop - start, 1))
        height = self.edges[0]
        first, last = start // height, -(-stop // height)
        return reader.read(self.scales, first, last)[np.arange(start, stop) // height - first]

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        edges, scales = self.edges[1:], self._scales(reader, start, stop)
        for axis, edge in enumerate(edges, 1):
            scales = scales.repeat(edge, axis)
        values = reader.read(self.codes, start, stop)
        values *= scales[tuple(map(slice, values.shape))]
        return values


def read_fp8(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the weights in 8-bit floats with a scale per tile among the tensors `keys`, keyed by name.

    Raises:
        WeftError: if scales are missing or do not fit, or the config `scheme` has static scales for activations.
    """
    size = scheme.get("weight_block_size", (128, 128))
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise WeftError(f"weight_block_size={size!r} must be two positive integers")
    if scheme.get("activation_scheme", "dynamic") != "dynamic":
        raise WeftError(f"activation_scheme={scheme['activation_scheme']!r} is not supported, only 'dynamic'")
    tensors: dict[str, QuantizedTensor] = {}
    for key in keys:
        if reader.dtype(key) not in (dtypes.f8e4m3, dtypes.f8e5m2):
            continue
        shape, scales = reader.shape(key), require_key(key, f"{key}_scale_inv", keys)
        # In stacks of experts tiles cover the last two axes only.
        edges = (*(1 for _ in shape[2:]), *size)
        tiles = tuple(-(-n // edge) for n, edge in zip(shape, edges, strict=False))
        if len(shape) < 2 or reader.shape(scales) != tiles or not reader.dtype(scales).is_float:
            expected = f"scales must be floats {list(tiles)}, one for each tile of {size[0]} · {size[1]} in a matrix"
            raise misfit_error(reader, key, scales, expected=expected)
        tensors[key] = Tiles({"codes": key, "scales": scales}, edges)
    return tensors
