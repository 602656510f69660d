"""Buffers of caches and states: one block of memory, rows that move, and double-buffered recurrent states."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.backends.folder_facts import StateRecord
from weft.backends.runtime.ort.bound_states import BoundState, Buffer, StateBuffers, bind_states, find_kind
from weft.backends.runtime.ort.session import Session, import_onnxruntime
from weft.ir import WeftError
from weft.ir.schema.states import Growth

from ..pretended import Device


def test_caches_of_a_context_are_parts_of_one_block() -> None:
    shapes = [((2, None, 3), 1, Growth.TEXT), ((2, None, 5), 10, Growth.TEXT), ((7,), 1, Growth.CONSTANT)]
    kinds = {1: np.float32, 10: np.float16}
    states = [BoundState(f"p{i}", f"n{i}", (kind, kinds[kind]), shape, g) for i, (shape, kind, g) in enumerate(shapes)]
    memory = StateBuffers(Session(None, "cpu"), states, batch=3, capacity=11)
    buffers = [b for sides in memory._buffers for b in dict.fromkeys(sides)]
    assert [b.shape for b in buffers] == [(3, 2, 11, 3), (3, 2, 11, 5), (3, 7), (3, 7)]
    assert memory.nbytes == sum(b.host.nbytes for b in buffers) == sum(3 * state.nbytes(11) for state in states)
    assert all(b.address == b.host.ctypes.data and b.address % 64 == 0 and not b.host.any() for b in buffers)
    for number, buffer in enumerate(buffers, 1):
        buffer.host[...] = number
    assert all((buffer.host == number).all() for number, buffer in enumerate(buffers, 1))
    spans = sorted((b.address, b.address + b.nbytes) for b in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] < memory.nbytes + 64 * len(buffers)


KEYS = BoundState("past.key", "present.key", (1, np.float32), (1, None, 1), Growth.TEXT)
SUM = BoundState("past.sum", "present.sum", (1, np.float32), (1,), Growth.CONSTANT, initial=5.0)


def memory(batch: int = 3, capacity: int = 4) -> StateBuffers:
    """Return a cache whose elements are 10 · row + slot, and a state that is initial."""
    buffers = StateBuffers(Session(None, "cpu"), [KEYS, SUM], batch, capacity)
    cache_of(buffers)[...] = 10 * np.arange(batch)[:, None] + np.arange(capacity)
    return buffers


def cache_of(buffers: StateBuffers) -> Any:
    return buffers._buffers[0][0].host[:, 0, :, 0]


def write_states(buffers: StateBuffers, values: list[float], first: int = 0) -> None:
    """Imitate a run: write the states of rows from `first` on to the other copy, and switch to it."""
    copies = buffers._buffers[1]
    copies[1 - buffers.copy_index].host[first : first + len(values), 0] = values
    buffers.swap_copies(first, len(values))


def read_states(buffers: StateBuffers) -> list[float]:
    buffers.sync_rows(0, 3)
    return [float(value) for value in buffers._buffers[1][buffers.copy_index].host[:, 0]]


def test_states_have_two_copies_and_caches_one() -> None:
    assert KEYS.nbytes(4) == 4 * 4 and SUM.nbytes(4) == 2 * 4
    assert memory().nbytes == 3 * (16 + 8) and memory().copy_count == 2
    assert (KEYS.recurrent, SUM.recurrent, KEYS.limit, SUM.limit) == (False, True, None, None)
    fixed = BoundState("past.key", "present.key", (1, np.float32), (1, 9, 1), Growth.TEXT)
    assert fixed.limit == 9 and StateBuffers(Session(None, "cpu"), [fixed], 1, 4).copy_count == 1


def test_run_writes_states_to_the_other_copy() -> None:
    buffers = memory()
    assert read_states(buffers) == [5, 5, 5]
    write_states(buffers, [1, 2, 3])
    assert buffers.copy_index == 1 and read_states(buffers) == [1, 2, 3]
    write_states(buffers, [7], first=1)  # the other rows stay in their copy until they are moved
    assert buffers.copy_index == 0 and read_states(buffers) == [1, 7, 3]


def test_rows_are_reset_copied_and_gathered() -> None:
    buffers = memory()
    write_states(buffers, [1, 2, 3])
    buffers.gather_rows(np.array([0, 1, 0]), used=2)
    assert cache_of(buffers).tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [0, 1, 22, 23]]
    buffers.clear_row(1)
    assert read_states(buffers) == [1, 5, 1]
    buffers.gather_rows(np.array([1, 0, 2]), used=3)
    assert cache_of(buffers)[:2].tolist() == [[10, 11, 12, 3], [0, 1, 2, 13]] and read_states(buffers) == [5, 1, 1]
    buffers.clear_states()
    assert read_states(buffers) == [5, 5, 5]


def test_smaller_buffers_are_copied_into_larger_ones() -> None:
    old, new = memory(), memory(capacity=6)
    cache_of(old)[...] = -1
    write_states(old, [1, 2, 3])
    new.copy_from(old, used=2)
    assert cache_of(new)[0].tolist() == [-1, -1, 2, 3, 4, 5] and read_states(new) == [1, 2, 3]


def test_states_are_bound_by_the_types_of_the_graph() -> None:
    inputs = {"past.key": SimpleNamespace(name="past.key", type="tensor(float16)", shape=["b", 2, "t", "w"])}
    outputs = dict.fromkeys(["present.key", "present.key.1", "present.key2"])
    record = StateRecord("past.key", "present.key", Growth.TEXT)
    (state,) = bind_states("model.onnx", inputs, outputs, [record], head_dim=8)
    assert (state.shape, state.kind, state.aliases) == ((2, None, 8), (10, np.float16), ("present.key.1",))
    with pytest.raises(WeftError, match=r"model\.onnx: past\.key is \['b', 2, 't', 'w'\], but its heads and head size"):
        bind_states("model.onnx", inputs, outputs, [record])
    with pytest.raises(
        WeftError, match=r"the graph has no input past\.other, although weft\.json lists it; compile again"
    ):
        bind_states("model.onnx", inputs, outputs, [StateRecord("past.other", "present.key", Growth.TEXT)])
    with pytest.raises(
        WeftError, match=r"the graph has an input past\.key but no output present\.other; compile again"
    ):
        bind_states("model.onnx", inputs, outputs, [StateRecord("past.key", "present.other", Growth.TEXT)])


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
