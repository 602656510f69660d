"""Sources of weights: the small interface that every checkpoint reader offers.

A reader returns rows, never full files, so that a compilation needs memory only for a slice of the largest tensor and
not for the model. It reads with plain file reads (pages of mapped files count as resident memory).
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
        """Path that error messages name."""
        ...

    def keys(self) -> Iterable[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape, axis 0 outermost."""
        ...

    def dtype(self, key: str) -> DType:
        """Return the stored element type."""
        ...

    def read(self, key: str, start: int, stop: int) -> Array:
        """Return rows ``start:stop`` of axis 0; floats as float32, integers as stored."""
        ...


@runtime_checkable
class BlockTensorReader(TensorReader, Protocol):
    """A reader that can also return quantized blocks as they are stored."""

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """Return the blocks of rows ``start:stop`` of axis 0, u8 [rows, ..., blocks in a row, bytes of a block]."""
        ...


class MemoryReader:
    """Named numpy arrays with the `TensorReader` interface (tests, converted models)."""

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


class SpilledTensors:
    """The reader `base` with computed tensors on top, for passes that compute new weights.

    The computed tensors are spilled to an unnamed temporary file, so that only one of them is in memory at a time.

    Raises:
        WeftError: if the temporary file cannot be created.
    """

    def __init__(self, base: TensorReader) -> None:
        self.base = base
        with contextlib.ExitStack() as files:
            try:
                self._file = files.enter_context(tempfile.TemporaryFile())
            except OSError as e:
                raise WeftError(f"no temporary file for computed tensors can be made: {e.strerror or e}") from e
            weakref.finalize(self, files.pop_all().close)  # closed when this object is freed
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}

    @classmethod
    def wrap(cls, reader: TensorReader) -> SpilledTensors:
        """Return `reader` if it accepts computed tensors already, else a `SpilledTensors` on top of it."""
        return reader if isinstance(reader, cls) else cls(reader)

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def computed_keys(self) -> tuple[str, ...]:
        """Names of the computed tensors."""
        return tuple(self._places)

    def unique_key(self, key: str) -> str:
        """Return `key`, or `key` with a number appended if a tensor is already called `key`."""
        keys, name, n = {*self.keys()}, key, 1
        while name in keys:
            n += 1
            name = f"{key}.{n}"
        return name

    def put(self, key: str, array: Array) -> None:
        """Add the tensor `key`, of floats or bytes; it hides a tensor of the same name from now on.

        Raises:
            WeftError: if the temporary folder has no room.
        """
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

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """Read the stored blocks of a tensor of the checkpoint; computed tensors have none."""
        assert isinstance(self.base, BlockTensorReader)
        return self.base.read_blocks(key, start, stop)


class SwitchedTensors:
    """The reader `base` with slots on top: tensors of the given `shapes`, filled by a selected choice or with zeros.

    Factors of unmerged adapters are slots: the adapter is selected when the model runs. `choices` maps the name of each
    choice to arrays by slot; a slot that a choice lacks is zero.
    """

    def __init__(
        self, base: TensorReader, shapes: Mapping[str, tuple[int, ...]], choices: Mapping[str, Mapping[str, Array]]
    ) -> None:
        self.base, self.shapes, self.choices, self._chosen = base, shapes, choices, ""

    @property
    def path(self) -> Path:
        return self.base.path

    @contextlib.contextmanager
    def select(self, name: str) -> Iterator[None]:
        """Fill the slots with the arrays of the choice `name` during the block."""
        self._chosen = name
        try:
            yield
        finally:
            self._chosen = ""

    def reads_slots(self, keys: Iterable[str]) -> bool:
        """Return whether any of the tensors `keys` is a slot, whose values depend on the choice."""
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

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """Read the stored blocks of a tensor of the checkpoint; slots have none."""
        assert isinstance(self.base, BlockTensorReader)
        return self.base.read_blocks(key, start, stop)


def find_switched_tensors(reader: TensorReader) -> SwitchedTensors | None:
    """Return the first `SwitchedTensors` among `reader`, its base, the base of that, …; None if there is none."""
    while not isinstance(reader, SwitchedTensors):
        if (base := getattr(reader, "base", None)) is None:
            return None
        reader = base
    return reader


EMPTY: TensorReader = MemoryReader({}, "<no checkpoint>")
