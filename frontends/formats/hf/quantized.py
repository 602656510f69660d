"""Folders whose weights are quantized as published, read as the numbers that the codes stand for.

``mxfp4`` (gpt-oss) is the microscaling format of the OCP MX specification 1.0: 32 codes of 4 bits (E2M1) share one
power of two (E8M0). ``fp8`` (DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3) are floats of 8 bits of which every
tile, mostly 128 · 128, has a scale. Only weights: what such models round activations to while they run is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

_BYTES = np.arange(256, dtype=np.uint8)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], -1)  # the first of two numbers is the low half
_E2M1 = _NIBBLES.view(ml_dtypes.float4_e2m1fn).astype(np.float32).view(np.uint64)[:, 0]  # byte -> two float32
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def dequantized(reader: TensorReader, config: Mapping[str, Any], source: str) -> TensorReader:
    """`reader` under the names and shapes of an unquantized checkpoint, as `config` (called `source`) says to read it.

    Raises:
        WeftError: if its weights are quantized in a way that cannot be read, or lack scales that fit.
    """
    how = config.get("quantization_config")
    if not how:
        return reader
    how = how if isinstance(how, Mapping) else {"quant_method": how}
    method = str(how.get("quant_method"))
    if method not in _METHODS:
        raise WeftError(
            f"{source}: the weights are quantized ({method}); weft imports unquantized folders, those quantized by "
            f"{' or '.join(_METHODS)}, and GGUF"
        )
    try:
        return DequantizedReader(reader, _METHODS[method](reader, dict.fromkeys(reader.keys()), how))
    except WeftError as e:
        raise WeftError(f"{source}: the weights are quantized ({method}), but {e}") from e


@dataclass(frozen=True)
class Quantized(ABC):
    """A tensor that a checkpoint stores as two others: codes and their scales."""

    codes: str
    scales: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return reader.shape(self.codes)

    def dtype(self, reader: TensorReader) -> DType:
        return reader.dtype(self.codes)

    @abstractmethod
    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Rows `start:stop` of axis 0, as float32."""

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        """The same rows as stored: u8 [rows, blocks in a row, bytes of a block]. Raises WeftError without a layout."""
        raise WeftError(f"{reader.path}: {self.codes!r} is in no layout whose blocks are taken as stored")


@dataclass(frozen=True)
class DequantizedReader:
    """The tensors of `reader`, but that those of `quantized` stand in the place of their parts."""

    reader: TensorReader
    quantized: Mapping[str, Quantized]

    @property
    def path(self) -> Path:
        return self.reader.path

    def keys(self) -> Iterable[str]:
        visible = dict.fromkeys([*self.reader.keys(), *self.quantized])
        parts = {part for tensor in self.quantized.values() for part in (tensor.codes, tensor.scales)}
        return [key for key in visible if key in self.quantized or key not in parts]

    def shape(self, key: str) -> tuple[int, ...]:
        return self.quantized[key].shape(self.reader) if key in self.quantized else self.reader.shape(key)

    def dtype(self, key: str) -> DType:
        """Return the stored type of tensor `key`: of its codes if it is quantized."""
        return self.quantized[key].dtype(self.reader) if key in self.quantized else self.reader.dtype(key)

    def read(self, key: str, start: int, stop: int) -> Array:
        """Rows `start:stop` of axis 0 of tensor `key`: float32, or integers as stored."""
        tensor = self.quantized.get(key)
        return self.reader.read(key, start, stop) if tensor is None else tensor.read(self.reader, start, stop)

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """The blocks of rows `start:stop` of the quantized matrix `key`, u8 [rows, blocks in a row, bytes of a block].

        Raises:
            WeftError: if there is a NaN among its codes.
        """
        return self.quantized[key].read_blocks(self.reader, start, stop)


@dataclass(frozen=True)
class MXFP4(Quantized):
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


def _mxfp4(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> Mapping[str, Quantized]:
    tensors: dict[str, Quantized] = {}
    for key in keys:
        name = key.removesuffix("_blocks")
        if name == key:
            continue
        blocks, scales = reader.shape(key), _beside(key, f"{name}_scales", keys)
        fits = len(blocks) == 4 and blocks[3] == 16 and reader.shape(scales) == blocks[:3]
        if not fits or {reader.dtype(key), reader.dtype(scales)} != {dtypes.u8}:
            raise _misfit(reader, key, scales, "u8 [experts, out, in / 32, 16], without the last axis")
        tensors[name] = MXFP4(key, scales)
    return tensors


@dataclass(frozen=True)
class Tiles(Quantized):
    """Floats of 8 bits, `codes`, each to be multiplied by the number of `scales` that belongs to its tile.

    `edges` are the sides of a tile, one for each axis; the last tile of an axis may be cut.
    """

    edges: tuple[int, ...]

    def dtype(self, reader: TensorReader) -> DType:
        stored, block = reader.dtype(self.codes), dtypes.f8e4m3_128
        return block if stored == dtypes.f8e4m3 and self.edges[1:] == (block.block,) else stored

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        tall, wide = self.edges
        first, last = start // tall, -(-stop // tall)
        scales = reader.read(self.scales, first, last)[np.arange(start, stop) // tall - first]
        values = reader.read(self.codes, start, stop)
        if np.isnan(values).any():
            raise WeftError(f"{reader.path}: there is a NaN in {self.codes!r}; the checkpoint is broken")
        codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(len(values), -1, wide)
        head = np.ascontiguousarray(scales[..., None], np.float32).view(np.uint8)
        return np.concatenate([head, codes], -1)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        tall, *edges = self.edges
        first, last = start // tall, -(-stop // tall)
        scales = reader.read(self.scales, first, last)[np.arange(start, stop) // tall - first]
        for axis, edge in enumerate(edges, 1):
            scales = scales.repeat(edge, axis)
        values = reader.read(self.codes, start, stop)
        values *= scales[tuple(map(slice, values.shape))]
        return values


def _fp8(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> Mapping[str, Quantized]:
    size = how.get("weight_block_size", (128, 128))
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise WeftError(f"weight_block_size={size!r} says no tile of two sides")
    if how.get("activation_scheme", "dynamic") != "dynamic":
        raise WeftError(f"activation_scheme={how['activation_scheme']!r} is not supported, only 'dynamic'")
    tensors: dict[str, Quantized] = {}
    for key in keys:
        if reader.dtype(key) not in (dtypes.f8e4m3, dtypes.f8e5m2):
            continue
        shape, scales = reader.shape(key), _beside(key, f"{key}_scale_inv", keys)
        # In stacks of experts tiles cover the last two axes only.
        edges = (*(1 for _ in shape[2:]), *size)
        tiles = tuple(-(-n // edge) for n, edge in zip(shape, edges, strict=False))
        if len(shape) < 2 or reader.shape(scales) != tiles or not reader.dtype(scales).is_float:
            raise _misfit(reader, key, scales, f"a float for each tile of {size[0]} · {size[1]}")
        tensors[key] = Tiles(key, scales, edges)
    return tensors


def _beside(key: str, scales: str, keys: Collection[str]) -> str:
    """The key `scales` of the scales of `key`, if it is there."""
    if scales not in keys:
        raise WeftError(f"there is no {scales!r} beside {key!r}; the checkpoint is incomplete or of another layout")
    return scales


def _misfit(reader: TensorReader, key: str, scales: str, expected: str) -> WeftError:
    both = " and ".join(f"{k} {reader.dtype(k)} {list(reader.shape(k))}" for k in (key, scales))
    return WeftError(f"{both} are not codes and their scales, {expected}")


_METHODS = {"mxfp4": _mxfp4, "fp8": _fp8}
