"""Readers of weights: the interface of all checkpoint readers, and readers of tensors in memory.

A reader returns some rows of a tensor at a time, so that a compilation needs memory only for a slice of the largest
tensor. It reads with plain file reads (pages of mapped files count as resident memory).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import WeftError
from ..types import dtypes
from ..types.dtypes import DType

Array = np.ndarray[Any, Any]


@runtime_checkable
class TensorReader(Protocol):
    """A set of named tensors on disk or in memory."""

    @property
    def path(self) -> Path:
        """Path of the checkpoint, for error messages."""
        ...

    def keys(self) -> Iterable[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor `key`; implementations raise WeftError if there is no such tensor."""
        ...

    def dtype(self, key: str) -> DType:
        """Return the dtype in which the tensor `key` is stored."""
        ...

    def read(self, key: str, start: int, stop: int) -> Array:
        """Return ``start:stop`` on axis 0 of the tensor `key`: floats as float32, integers as stored."""
        ...


@runtime_checkable
class BlockTensorReader(TensorReader, Protocol):
    """A reader that can also return quantized blocks as they are stored."""

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """Return the blocks of ``start:stop`` on axis 0, u8 [stop − start, ..., blocks per row, bytes per block]."""
        ...


class MemoryReader:
    """A `TensorReader` of NumPy arrays by name. It returns float64 arrays as float64."""

    def __init__(self, arrays: Mapping[str, Array], path: str = "<memory>") -> None:
        self.arrays = dict(arrays)
        self._path = Path(path)

    @property
    def path(self) -> Path:
        return self._path

    def keys(self) -> Iterable[str]:
        return self.arrays

    def _get(self, key: str) -> Array:
        if key not in self.arrays:
            raise WeftError(f"{self._path} has no tensor {key!r}")
        return self.arrays[key]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._get(key).shape)

    def dtype(self, key: str) -> DType:
        return dtypes.from_numpy(self._get(key))

    def read(self, key: str, start: int, stop: int) -> Array:
        array = self._get(key)
        rows = array[start:stop] if array.ndim else array
        # float64 stays: inverses of recipes are computed in it.
        return rows.astype(np.float32) if self.dtype(key).is_float and rows.dtype != np.float64 else rows


class _ExtendedReader:
    """Base of readers that add tensors to the reader `base`; only tensors of `base` have stored blocks."""

    base: TensorReader

    @property
    def path(self) -> Path:
        return self.base.path

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        assert isinstance(self.base, BlockTensorReader)
        return self.base.read_blocks(key, start, stop)


class SpilledTensors(_ExtendedReader):
    """The reader `base` and additional tensors, which passes computed and added by `put`.

    They are stored in an unnamed temporary file, so that not all are in memory. WeftError if it cannot be created.
    """

    def __init__(self, base: TensorReader) -> None:
        self.base = base
        with contextlib.ExitStack() as files:
            try:
                self._file = files.enter_context(tempfile.TemporaryFile())
            except OSError as e:
                raise WeftError(f"cannot create a temporary file in {tempfile.gettempdir()}: {e.strerror or e}") from e
            weakref.finalize(self, files.pop_all().close)  # closed when this object is freed
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}

    @classmethod
    def wrap(cls, reader: TensorReader) -> SpilledTensors:
        """Return `reader` itself if it is a `SpilledTensors`, else a new `SpilledTensors` with the base `reader`."""
        return reader if isinstance(reader, cls) else cls(reader)

    @property
    def computed_keys(self) -> tuple[str, ...]:
        """Names of the added tensors, in the order of addition."""
        return tuple(self._places)

    def unique_key(self, key: str) -> str:
        """Return `key` if no tensor has that name, else the first of ``key.2``, ``key.3``, … that is free."""
        keys, name, n = {*self.keys()}, key, 1
        while name in keys:
            n += 1
            name = f"{key}.{n}"
        return name

    def put(self, key: str, array: Array) -> None:
        """Add the tensor `key`; it replaces a tensor of that name in reads. WeftError if the disk is full."""
        offset = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._file.flush()
        except OSError as e:
            raise WeftError(f"no room for tensor {key!r} in {tempfile.gettempdir()}: {e.strerror}") from e
        self._places[key] = (offset, array.shape, array.dtype)

    def keys(self) -> Iterable[str]:
        return dict.fromkeys((*self.base.keys(), *self._places))

    def shape(self, key: str) -> tuple[int, ...]:
        return self._places[key][1] if key in self._places else self.base.shape(key)

    def dtype(self, key: str) -> DType:
        return dtypes.from_numpy(np.empty(0, self._places[key][2])) if key in self._places else self.base.dtype(key)

    def read(self, key: str, start: int, stop: int) -> Array:
        if key not in self._places:
            return self.base.read(key, start, stop)
        offset, shape, dtype = self._places[key]
        row = math.prod(shape[1:]) * dtype.itemsize
        rows = stop - start if shape else 1
        data = os.pread(self._file.fileno(), rows * row, offset + (start * row if shape else 0))
        return np.frombuffer(data, dtype).reshape((rows, *shape[1:]) if shape else ())


class SwitchedTensors(_ExtendedReader):
    """The reader `base` and slots: additional tensors with `shapes`, whose values depend on the selected choice.

    The factors of adapters that are switched at run time are slots, and each adapter is a choice. `choices` maps the
    name of a choice to arrays by slot name. A slot is zero if the choice has no array for it, or if no choice is
    selected.
    """

    def __init__(
        self, base: TensorReader, shapes: Mapping[str, tuple[int, ...]], choices: Mapping[str, Mapping[str, Array]]
    ) -> None:
        self.base, self.shapes, self.choices, self._chosen = base, shapes, choices, ""

    @contextlib.contextmanager
    def select(self, name: str) -> Iterator[None]:
        """Return a context in which slots have the arrays of the choice `name`; afterwards no choice is selected."""
        self._chosen = name
        try:
            yield
        finally:
            self._chosen = ""

    def reads_slots(self, keys: Iterable[str]) -> bool:
        """Return whether any of the tensor names `keys` is a slot."""
        return not self.shapes.keys().isdisjoint(keys)

    def keys(self) -> Iterable[str]:
        return (*self.base.keys(), *self.shapes)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.shapes[key] if key in self.shapes else self.base.shape(key)

    def dtype(self, key: str) -> DType:
        return dtypes.f32 if key in self.shapes else self.base.dtype(key)

    def read(self, key: str, start: int, stop: int) -> Array:
        if key not in self.shapes:
            return self.base.read(key, start, stop)
        array = self.choices.get(self._chosen, {}).get(key)
        return np.zeros((stop - start, *self.shapes[key][1:]), np.float32) if array is None else array[start:stop]


def find_switched_tensors(reader: TensorReader) -> SwitchedTensors | None:
    """Return the first `SwitchedTensors` among `reader`, ``reader.base``, ``reader.base.base``, …; None without one."""
    while not isinstance(reader, SwitchedTensors):
        if (base := getattr(reader, "base", None)) is None:
            return None
        reader = base
    return reader


EMPTY: TensorReader = MemoryReader({}, "<no checkpoint>")
