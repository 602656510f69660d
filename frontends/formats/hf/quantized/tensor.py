"""The reader of a quantized folder, and the base class of its quantized tensors."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types.dtypes import DType


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A quantized tensor, which a checkpoint stores as several tensors. keys: role of such a tensor ("codes", "scales",
    …) → its key in the checkpoint; "" for an optional tensor that is absent."""

    keys: Mapping[str, str]

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the keys of the checkpoint tensors that store this tensor."""
        return tuple(filter(None, self.keys.values()))

    @abstractmethod
    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        """Return the shape of the dequantized tensor."""

    @abstractmethod
    def dtype(self, reader: TensorReader) -> DType:
        """Return the dtype as stored: that of a block layout if `read_blocks` supports the tensor."""

    @abstractmethod
    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return rows `start:stop` along axis 0, dequantized to float32."""

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return rows `start:stop` as stored, u8 [rows, blocks per row, bytes per block]. Raise WeftError if the tensor
        is not in a block layout."""
        raise WeftError(f"{reader.path}: {self.parts[0]!r} has no block layout that can be read as stored")


@dataclass(frozen=True)
class DequantizedReader:
    """A reader of `reader` that has the tensors `quantized` (key → tensor) instead of their parts. hidden: further keys
    that it leaves out, such as scales of activations, which weft does not round."""

    reader: TensorReader
    quantized: Mapping[str, QuantizedTensor]
    hidden: frozenset[str] = frozenset()

    @property
    def path(self) -> Path:
        return self.reader.path

    @functools.cached_property
    def _keys(self) -> tuple[str, ...]:
        visible = dict.fromkeys([*self.reader.keys(), *self.quantized])
        parts = self.hidden.union(*(tensor.parts for tensor in self.quantized.values()))
        return tuple(key for key in visible if key in self.quantized or key not in parts)

    def keys(self) -> Iterable[str]:
        return self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        return self.quantized[key].shape(self.reader) if key in self.quantized else self.reader.shape(key)

    def dtype(self, key: str) -> DType:
        return self.quantized[key].dtype(self.reader) if key in self.quantized else self.reader.dtype(key)

    def read(self, key: str, start: int, stop: int) -> Array:
        tensor = self.quantized.get(key)
        return self.reader.read(key, start, stop) if tensor is None else tensor.read(self.reader, start, stop)

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        return self.quantized[key].read_blocks(self.reader, start, stop)


def require_key(key: str, companion: str, keys: Collection[str]) -> str:
    """Return `companion`, a key that the tensor `key` requires; raise WeftError if it is not in `keys`."""
    if companion not in keys:
        raise WeftError(f"there is no {companion!r} next to {key!r}; the checkpoint is incomplete or of another layout")
    return companion


def misfit_error(reader: TensorReader, *keys: str, expected: str) -> WeftError:
    """Return the error "`keys` do not fit together: `expected`", with the dtype and shape of each tensor."""
    tensors = [f"{k} {reader.dtype(k)} {list(reader.shape(k))}" for k in keys]
    return WeftError(f"{', '.join(tensors[:-1])} and {tensors[-1]} do not fit together: {expected}")


def read_all(reader: TensorReader, key: str) -> Array:
    """Return all elements of the tensor `key`, which may be a scalar."""
    shape = reader.shape(key)
    return np.asarray(reader.read(key, 0, shape[0] if shape else 1)).reshape(shape)


def check_finite(scales: Array, key: str, reader: TensorReader) -> Array:
    """Return `scales`, which were read from the tensor `key` of `reader`; raise WeftError if one is not finite."""
    if not np.isfinite(scales).all():
        raise WeftError(f"{reader.path}: a scale in {key!r} is not finite; the checkpoint is damaged")
    return scales
