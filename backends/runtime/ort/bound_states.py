"""Buffers for the caches and states of a decoder, which the graph reads and writes at fixed addresses.

Caches [batch, kv_heads, capacity, width] are written in place: input and output share memory. The capacity grows with
the sequence, or the graph fixes it. A fixed capacity bounds the sequence, unless the cache rolls (position p is in slot
p mod capacity). A graph that appends to its caches reads and writes copies instead, in which the tokens of every row
end at the last slot: it counts slots, not positions. Recurrent states [batch, ...] have constant size, usually begin as
zeros, and are double-buffered: each state has two copies, 0 and 1; a run reads one copy and writes the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError
from weft.ir.schema.states import Growth

from ...folder_facts import StateRecord
from ..arrays import Ints
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
    CUDA `host` is a staging copy. The argument `host` may provide zeroed bytes (CPU only) to use instead."""

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


_ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class BoundState:
    """One cache or state of a graph: input `past`, output `present`, both of the type `kind` (see `find_kind`).

    - shape: without the batch axis; the capacity of a cache that grows is None
    - initial: the fill value of a recurrent state at the start of a sequence
    """

    past: str
    present: str
    kind: Kind
    shape: tuple[int | None, ...]
    growth: Growth
    initial: float = 0.0
    aliases: tuple[str, ...] = ()  # outputs of other attention nodes that share the cache and write the same values

    @property
    def recurrent(self) -> bool:
        """Return whether the state has constant size and is double-buffered."""
        return self.growth is Growth.CONSTANT

    @property
    def appends(self) -> bool:
        """Return whether the graph returns the cache with new tokens appended."""
        return self.growth is Growth.APPEND

    @property
    def limit(self) -> int | None:
        """Return the fixed capacity of a cache that does not roll, in tokens; None for all other caches and states."""
        return self.shape[1] if self.growth is Growth.TEXT else None

    def nbytes(self, capacity: int) -> int:
        """Return the bytes of one batch row: a cache that grows has `capacity` slots, a recurrent state two copies."""
        size = math.prod(capacity if n is None else n for n in self.shape) * np.dtype(self.kind[1]).itemsize
        return 2 * size if self.recurrent else size


def bind_states(
    name: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    carried: Iterable[StateRecord],
    head_dim: int | None = None,
) -> list[BoundState]:
    """Return a `BoundState` for each record in `carried`; types and shapes are those of the graph's inputs. `inputs`
    and `outputs` map names to ONNX Runtime's descriptions; error messages call the graph `name`. `head_dim` is the
    width of caches if the graph leaves it dynamic. Raises WeftError if a state is not both an input and an output, or
    an axis other than the capacity is dynamic."""
    states = []
    for state in carried:
        past, present, recurrent = state.input, state.output, state.growth is Growth.CONSTANT
        if past not in inputs:
            raise WeftError(f"{name}: the graph has no input {past}, although weft.json lists it; compile again")
        if present not in outputs:
            raise WeftError(f"{name}: the graph has an input {past} but no output {present}; compile again")
        shape = [n if isinstance(n, int) else None for n in inputs[past].shape[1:]]
        if not recurrent and len(shape) == 3 and shape[2] is None:
            shape[2] = head_dim
        if None in (shape if recurrent else [*shape[:1], *shape[2:]]):
            axes = "sizes" if recurrent else "heads and head size"
            raise WeftError(f"{name}: {past} is {inputs[past].shape}, but its {axes} must be fixed numbers")
        aliases = tuple(output for output in outputs if output.startswith(f"{present}."))
        kind = find_kind(name, inputs[past])
        states.append(BoundState(past, present, kind, tuple(shape), state.growth, state.initial, aliases))
    return states


class StateBuffers:
    """The buffers for the caches and states of one batch. `copy_index` (0 or 1) is the copy of recurrent states that
    the next run reads; `copy_count` is 2 with recurrent states, else 1."""

    def __init__(self, session: Session, states: Sequence[BoundState], batch: int, capacity: int) -> None:
        self.copy_index, self.copy_count = 0, 1 + any(state.recurrent for state in states)
        self._states = states
        self._row_copies = np.zeros(batch, np.int64)  # the copy that has the current states of each row
        self._buffers: list[tuple[Buffer, Buffer]] = []
        room = _allocate(session, states, batch, capacity)
        for state in states:
            shape = (batch, *(capacity if n is None else n for n in state.shape))
            copies = [Buffer(session, shape, state.kind, next(room)).drop_host() for _ in range(1 + state.recurrent)]
            self._buffers.append((copies[0], copies[-1]))
        self._copies: dict[BoundState, list[NDArray[Any]]] = {}  # caches that grow, before and after the last call
        if any(state.initial for state in states):
            self.clear_states()

    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for caches and states."""
        return sum(buffer.nbytes for copies in self._buffers for buffer in dict.fromkeys(copies))

    def bind(self, binding: Any, copy: int, first: int = 0, rows: int | None = None) -> None:
        """Bind all caches and states of `rows` batch rows (default: all) from row `first` on to an IO binding.
        Recurrent states are read from copy `copy` (0 or 1) and written to the other copy. Caches that grow are bound by
        `bind_past` instead."""
        for state, copies in zip(self._states, self._buffers, strict=True):
            if state.appends:
                continue
            copies[copy].bind_input(binding, state.past, first, rows)
            for output in (state.present, *state.aliases):
                copies[1 - copy].bind_output(binding, output, first, rows)

    def bind_past(self, binding: Any, first: int, past: Ints, new: int) -> None:
        """Bind copies of the caches that grow, for a call of `new` tokens: row `first + r` has `past[r]` tokens."""
        used = int(past.max(initial=0))
        for state, (buffer, _) in self._find_growing():
            heads, _, width = buffer.shape[1:]
            cached = buffer.download()
            before, after = (np.zeros((past.size, heads, n, width), cached.dtype) for n in (used, used + new))
            for row, length in enumerate(past.tolist()):
                before[row, :, used - length :] = cached[first + row, :, :length]
            self._copies[state] = [before, after]  # a binding holds addresses only
            binding.bind_input(state.past, "cpu", 0, buffer.onnx_type, before.shape, before.ctypes.data)
            for output in (state.present, *state.aliases):
                binding.bind_output(output, "cpu", 0, buffer.onnx_type, after.shape, after.ctypes.data)

    def keep_new(self, first: int, past: Ints, total: Ints) -> None:
        """Copy the new tokens of the last call, `past[r]` to `total[r]` of row `first + r`, to the caches that grow."""
        used = int(past.max(initial=0))
        for state, (buffer, _) in self._find_growing():
            cached = buffer.download()
            for row, (start, end) in enumerate(zip(past.tolist(), total.tolist(), strict=True)):
                cached[first + row, :, start:end] = self._copies[state][1][row, :, used : used + end - start]

    def _find_growing(self) -> Iterator[tuple[BoundState, tuple[Buffer, Buffer]]]:
        return ((s, copies) for s, copies in zip(self._states, self._buffers, strict=True) if s.appends)

    def swap_copies(self, first: int = 0, rows: int | None = None) -> None:
        """Switch `copy_index` after a run of `rows` rows (default: all) from row `first` on: the next run reads the
        states that this run wrote."""
        self.copy_index = (self.copy_index + 1) % self.copy_count
        self._row_copies[first : None if rows is None else first + rows] = self.copy_index

    def sync_rows(self, first: int, rows: int, copy: int | None = None) -> None:
        """Set `copy_index` to `copy` (None: unchanged); move states of `rows` rows from `first` on to that copy."""
        self.copy_index = self.copy_index if copy is None else copy
        for row in np.flatnonzero(self._row_copies[first : first + rows] != self.copy_index) + first:
            for copies in (c for state, c in zip(self._states, self._buffers, strict=True) if state.recurrent):
                values = copies[self.copy_index].download()
                values[row] = copies[1 - self.copy_index].download()[row]
                copies[self.copy_index].write(values)
            self._row_copies[row] = self.copy_index

    def list_current(self) -> list[tuple[Buffer, bool]]:
        """Return (the copy that the next run reads, whether axis 2 has the slots of a cache) of each cache or state."""
        return [(c[self.copy_index], not s.recurrent) for s, c in zip(self._states, self._buffers, strict=True)]

    def clear_row(self, row: int) -> None:
        """Set the recurrent states of batch row `row` to their initial values."""
        for state, copies in zip(self._states, self._buffers, strict=True):
            if state.recurrent:
                values = copies[self.copy_index].download()
                values[row] = state.initial
                copies[self.copy_index].write(values)
        self._row_copies[row] = self.copy_index

    def clear_states(self) -> None:
        """Set all recurrent states to their initial values. Caches need no reset: no row reads beyond its length."""
        self.copy_index = 0
        self._row_copies[:] = 0
        for state, copies in zip(self._states, self._buffers, strict=True):
            for buffer in copies if state.recurrent else ():
                buffer.write(np.full(buffer.shape, state.initial, state.kind[1]))

    def gather_rows(self, rows: Ints, used: int) -> None:
        """Copy the recurrent states and the first `used` cache slots of batch row `rows[r]` to row r, for every r."""
        moved = np.flatnonzero(rows != np.arange(rows.size))
        if not moved.size:
            return
        self.sync_rows(0, rows.size)
        for state, copies in zip(self._states, self._buffers, strict=True):
            # Only this copy: the other copy is overwritten before it is read again.
            buffer = copies[self.copy_index]
            values = buffer.download()
            used_slots = values if state.recurrent else values[:, :, :used]
            # Advanced indexing copies the right side first, so rows may swap places.
            used_slots[moved] = used_slots[rows[moved]]
            buffer.write(values)

    def copy_from(self, other: StateBuffers, used: int) -> None:
        """Copy the recurrent states and the first `used` cache slots of `other` into these buffers. `other` must have
        the same batch size, and at most the same capacity."""
        other.sync_rows(0, other._row_copies.size)
        self.copy_index, self._row_copies = other.copy_index, other._row_copies.copy()
        for state, mine, theirs in zip(self._states, self._buffers, other._buffers, strict=True):
            to, values = mine[self.copy_index], theirs[self.copy_index].download()
            if state.recurrent or to.shape == values.shape:
                to.write(values)
            else:
                used_slots = to.download()
                used_slots[:, :, :used] = values[:, :, :used]
                to.write(used_slots)


def _allocate(
    session: Session, states: Sequence[BoundState], batch: int, capacity: int
) -> Iterator[NDArray[np.uint8] | None]:
    """Yield the memory of each buffer, in the order of `states`, one per copy of a state. On the CPU buffers are parts
    of one zeroed block, for which numpy requests huge pages; on other devices yield None for each."""
    counts = [1 + state.recurrent for state in states]
    sizes = [batch * s.nbytes(capacity) // n for s, n in zip(states, counts, strict=True) for _ in range(n)]
    if session.device != "cpu":
        yield from [None] * len(sizes)
        return
    starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    block = np.zeros(starts[-1] + _ALIGNMENT, np.uint8)
    block = block[-block.ctypes.data % _ALIGNMENT :]
    for start, size in zip(starts, sizes, strict=False):
        yield block[start : start + size]
