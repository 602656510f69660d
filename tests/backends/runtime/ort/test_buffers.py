"""Buffers at fixed addresses: rows that are bound, and copies to a device that is not the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.backends.runtime.ort.buffers import Buffer, find_kind
from weft.backends.runtime.ort.session import Session, import_onnxruntime
from weft.ir import WeftError

from ..pretended import Device

FLOAT = (1, np.float32)


class Binding:
    """Record what is bound."""

    def __init__(self) -> None:
        self.bound: list[Any] = []

    def bind_input(self, *arguments: Any) -> None:
        self.bound.append(("input", *arguments))

    def bind_output(self, *arguments: Any) -> None:
        self.bound.append(("output", *arguments))


def test_host_array_is_the_memory_on_a_cpu() -> None:
    buffer = Buffer(Session(None, "cpu"), (2, 3), FLOAT)
    assert buffer.nbytes == 24 and not buffer.host.any()
    assert buffer.address == buffer.host.ctypes.data and buffer.download() is buffer.host
    buffer.write(np.arange(6.0).reshape(2, 3))
    assert buffer.drop_host().download().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_given_bytes_are_used() -> None:
    memory = np.zeros(8, np.uint8)
    buffer = Buffer(Session(None, "cpu"), (2, 2), (10, np.float16), memory)
    buffer.host[1, 0] = 1.0
    assert memory.tolist() == [0, 0, 0, 0, 0, 0x3C, 0, 0]  # 1.0 in f16 is 0x3C00


def test_adjacent_rows_are_bound_by_their_address() -> None:
    buffer, binding = Buffer(Session(None, "cpu"), (5, 2, 3), FLOAT), Binding()
    buffer.bind_input(binding, "past")
    buffer.bind_input(binding, "past", 1, 2)
    buffer.bind_output(binding, "present", 3)
    assert binding.bound == [
        ("input", "past", "cpu", 0, 1, (5, 2, 3), buffer.address),
        ("input", "past", "cpu", 0, 1, (2, 2, 3), buffer.address + 24),
        ("output", "present", "cpu", 0, 1, (2, 2, 3), buffer.address + 3 * 24),
    ]


def test_device_memory_is_reached_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(import_onnxruntime(), None).pretend(monkeypatch)
    buffer = Buffer(Session(None, "cuda"), (4,), (7, np.int64))
    buffer.host[:] = 3
    assert buffer.download().tolist() == [0] * 4
    buffer.upload()
    values = buffer.download()
    assert values.tolist() == [3] * 4
    values[0] = 9
    buffer.write(values[::-1])
    assert buffer.download().tolist() == [3, 3, 3, 9]
    assert buffer.drop_host().host.size == 0 and buffer.download().size == 4


def test_types_that_numpy_lacks_are_read_as_bits() -> None:
    assert find_kind("model.onnx", SimpleNamespace(name="logits", type="tensor(bfloat16)")) == (16, np.uint16)
    with pytest.raises(WeftError, match=r"model\.onnx: logits has type tensor\(double\), which the runtime does not"):
        find_kind("model.onnx", SimpleNamespace(name="logits", type="tensor(double)"))
