"""Where weights come from: the small interface every checkpoint reader offers.

A reader hands out rows, never whole files, so that a compilation needs memory for a slice of the largest tensor and not
for the model. It reads with plain file reads (pages of mapped files count as resident memory).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from . import dtypes
from .dtypes import DType
from .errors import WeftError

Array = np.ndarray[Any, Any]


@runtime_checkable
class Archive(Protocol):
    """A set of named tensors on disk or in memory."""

    @property
    def path(self) -> Path:
        """What error messages name."""
        ...

    def keys(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape, axis 0 outermost."""
        ...

    def dtype(self, key: str) -> DType:
        """Stored element type."""
        ...

    def read(self, key: str, start: int, stop: int) -> Array:
        """Rows ``start:stop`` of axis 0; floats as float32, integers as stored."""
        ...


@runtime_checkable
class BlockArchive(Archive, Protocol):
    """An archive that can also hand out quantized blocks as they are stored."""

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """The blocks of rows ``start:stop`` of a matrix, u8 [rows, blocks in a row, bytes of a block]."""
        ...


class MemoryArchive:
    """Named numpy arrays behind the `Archive` interface (tests, converted models)."""

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
        return dtypes.of(self._get(key))

    def read(self, key: str, start: int, stop: int) -> Array:
        array = self._get(key)
        rows = array[start:stop] if array.ndim else array
        return rows.astype(np.float32) if self.dtype(key).is_float and rows.dtype != np.float64 else rows


EMPTY: Archive = MemoryArchive({}, "<no checkpoint>")
