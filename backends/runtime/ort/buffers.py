"""Buffers at fixed device addresses that a model reads and writes in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from .session import Session, import_onnxruntime

# ONNX Runtime's name of a tensor type: (its ONNX enum value, the numpy dtype of its bytes; numpy has no bf16).
_TYPES: dict[str, tuple[int, type[np.generic]]] = {
    "tensor(float)": (1, np.float32),
    "tensor(uint8)": (2, np.uint8),
    "tensor(int8)": (3, np.int8),
    "tensor(int32)": (6, np.int32),
    "tensor(int64)": (7, np.int64),
    "tensor(float16)": (10, np.float16),
    "tensor(bfloat16)": (16, np.uint16),
}

Kind = tuple[int, type[np.generic]]


def find_kind(name: str, value: Any) -> Kind:
    """Return (the ONNX enum value, the numpy dtype; uint16 for bf16) of an input or output `value` of the graph `name`.
    Raises WeftError if the runtime cannot hold its type."""
    if value.type not in _TYPES:
        raise WeftError(f"{name}: {value.name} has type {value.type}, which the runtime does not support")
    return _TYPES[value.type]


class Buffer:
    """A zero-filled buffer at a fixed `address` on the session's device. On the CPU the array `host` is its memory; on
    CUDA `host` is a staging copy. The argument `host` may provide zeroed bytes (CPU only) to use instead of a new
    allocation."""

    def __init__(
        self, session: Session, shape: tuple[int, ...], kind: Kind, host: NDArray[np.uint8] | None = None
    ) -> None:
        self.shape, self.device, (self.onnx_type, dtype) = shape, session.device, kind
        self.host: NDArray[Any] = np.zeros(shape, dtype) if host is None else host.view(dtype).reshape(shape)
        self.nbytes = self.host.nbytes
        self._value = import_onnxruntime().OrtValue.ortvalue_from_numpy(self.host, self.device, 0)
        self.address: int = self._value.data_ptr()

    def drop_host(self) -> Buffer:
        """Free the staging copy on CUDA (nothing on the CPU); return the buffer itself."""
        if self.device != "cpu":
            self.host = np.empty(0, self.host.dtype)
        return self

    def upload(self) -> None:
        """Copy `host` to the device; do nothing on the CPU."""
        self.write(self.host)

    def download(self) -> NDArray[Any]:
        """Return the contents as a host array: on the CPU the memory itself, else a copy, to `write` after changes."""
        return self.host if self.device == "cpu" else self._value.numpy()

    def write(self, values: NDArray[Any]) -> None:
        """Replace the contents by `values`. On the CPU the array that `download` returns needs no copy."""
        if self.device != "cpu":
            self._value.update_inplace(np.ascontiguousarray(values))
        elif values is not self.host:
            self.host[...] = values

    def bind_input(self, binding: Any, name: str, first: int = 0, rows: int | None = None) -> None:
        """Bind `rows` batch rows (default: all) from row `first` on as the input `name` of an IO binding."""
        binding.bind_input(name, self.device, 0, self.onnx_type, *self._row_range(first, rows))

    def bind_output(self, binding: Any, name: str, first: int = 0, rows: int | None = None) -> None:
        """Bind `rows` batch rows (default: all) from row `first` on as the output `name` of an IO binding."""
        binding.bind_output(name, self.device, 0, self.onnx_type, *self._row_range(first, rows))

    def _row_range(self, first: int, rows: int | None) -> tuple[tuple[int, ...], int]:
        # The batch is the first axis, so adjacent rows are one block of memory.
        shape = (self.shape[0] - first if rows is None else rows, *self.shape[1:])
        return shape, self.address + first * (self.nbytes // self.shape[0])
