"""Caches and states that a decoder carries from call to call.

Caches [batch, kv_heads, capacity, width] are written in place: input and output share memory. The capacity grows with
the sequence, or it is fixed in the graph and bounds the sequence, unless the cache rolls (position p in slot
p mod capacity). Recurrent states [batch, ...] have constant size, usually zero at the start of a sequence, and are
double-buffered: a run reads one side and writes the other.
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
from .buffers import Buffer, Kind, kind_of
from .session import Session

_ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class BoundState:
    """One cache or state of a graph: input `past`, output `present`.

    `shape` is that of one batch row, None for the capacity of a cache that grows. `initial` fills a recurrent state at
    the start of a sequence.
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
    def limit(self) -> int | None:
        """Return the number of tokens that a cache of fixed capacity can hold; None for other caches and states."""
        return self.shape[1] if self.growth is Growth.TEXT else None

    def nbytes(self, capacity: int) -> int:
        """Return the bytes of one batch row, with `capacity` slots in a cache that grows and both recurrent buffers."""
        size = math.prod(capacity if n is None else n for n in self.shape) * np.dtype(self.kind[1]).itemsize
        return 2 * size if self.recurrent else size


def read_states(
    name: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    carried: Iterable[StateRecord],
    head_dim: int | None = None,
) -> list[BoundState]:
    """Return a `BoundState` for each of `carried`, with its type and shape from ONNX Runtime's `inputs` of graph
    `name`.

    `head_dim` is the last size of caches if the graph leaves it dynamic. Raises WeftError when a state is not an input
    and an output of the graph, or has a dynamic axis other than its capacity.
    """
    states = []
    for state in carried:
        past, present, recurrent = state.input, state.output, state.growth is Growth.CONSTANT
        if past not in inputs:
            raise WeftError(f"{name}: the graph does not take {past}, which its manifest records; compile again")
        if present not in outputs:
            raise WeftError(f"{name}: the graph takes {past} but does not return {present}")
        shape = [n if isinstance(n, int) else None for n in inputs[past].shape[1:]]
        if not recurrent and len(shape) == 3 and shape[2] is None:
            shape[2] = head_dim
        if None in (shape if recurrent else [*shape[:1], *shape[2:]]):
            axes = "sizes" if recurrent else "heads and head size"
            raise WeftError(f"{name}: {past} is {inputs[past].shape}, but its {axes} must be fixed numbers")
        aliases = tuple(output for output in outputs if output.startswith(f"{present}."))
        kind = kind_of(name, inputs[past])
        states.append(BoundState(past, present, kind, tuple(shape), state.growth, state.initial, aliases))
    return states


class Memory:
    """The caches and states of one batch; `side` (0 or 1) is the buffer that recurrent states are read from next."""

    def __init__(self, session: Session, states: Sequence[BoundState], batch: int, capacity: int) -> None:
        self.side, self.sides = 0, 1 + any(state.recurrent for state in states)
        self._states = states
        self._at = np.zeros(batch, np.int64)  # the side that holds each row's recurrent states
        self._buffers: list[tuple[Buffer, Buffer]] = []
        room = _allocate(session, states, batch, capacity)
        for state in states:
            shape = (batch, *(capacity if n is None else n for n in state.shape))
            sides = [Buffer(session, shape, state.kind, next(room)).drop_host() for _ in range(1 + state.recurrent)]
            self._buffers.append((sides[0], sides[-1]))
        if any(state.initial for state in states):
            self.clear()

    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for caches and states."""
        return sum(buffer.nbytes for sides in self._buffers for buffer in dict.fromkeys(sides))

    def bind(self, binding: Any, side: int, first: int = 0, rows: int | None = None) -> None:
        """Bind `rows` rows (default: all) from `first` on; recurrent states are read from `side`, written to the
        opposite side."""
        for state, buffers in zip(self._states, self._buffers, strict=True):
            buffers[side].bind_input(binding, state.past, first, rows)
            for output in (state.present, *state.aliases):
                buffers[1 - side].bind_output(binding, output, first, rows)

    def swap_sides(self, first: int = 0, rows: int | None = None) -> None:
        """Swap the sides after a run of `rows` rows from `first` on (default: all), so that the next run reads the new
        states."""
        self.side = (self.side + 1) % self.sides
        self._at[first : None if rows is None else first + rows] = self.side

    def bring(self, first: int, rows: int, side: int | None = None) -> None:
        """Set the side that is read next to `side` (default: unchanged), and copy to it the recurrent states of `rows`
        rows from `first` on that are on the opposite side."""
        self.side = self.side if side is None else side
        for row in np.flatnonzero(self._at[first : first + rows] != self.side) + first:
            for buffers in self._recurrent():
                values = buffers[self.side].pull()
                values[row] = buffers[1 - self.side].pull()[row]
                buffers[self.side].write(values)
            self._at[row] = self.side

    def vacate(self, row: int) -> None:
        """Set the recurrent states of one row to their values at the start of a sequence."""
        for state, buffers in zip(self._states, self._buffers, strict=True):
            if state.recurrent:
                values = buffers[self.side].pull()
                values[row] = state.initial
                buffers[self.side].write(values)
        self._at[row] = self.side

    def move(self, row: int, to: int, used: int) -> None:
        """Copy the recurrent states and the first `used` cache slots of `row` to row `to`."""
        self.bring(row, 1)
        for state, sides in zip(self._states, self._buffers, strict=True):
            values = sides[self.side].pull()
            used_slots = values if state.recurrent else values[:, :, :used]
            used_slots[to] = used_slots[row]
            sides[self.side].write(values)
        self._at[to] = self.side

    def _recurrent(self) -> Iterator[tuple[Buffer, Buffer]]:
        return (sides for state, sides in zip(self._states, self._buffers, strict=True) if state.recurrent)

    def clear(self) -> None:
        """Reset recurrent states to the start of a sequence. Caches need no reset: no row reads beyond its length."""
        self.side = 0
        self._at[:] = 0
        for state, sides in zip(self._states, self._buffers, strict=True):
            for buffer in sides if state.recurrent else ():
                buffer.write(np.full(buffer.shape, state.initial, state.kind[1]))

    def gather(self, rows: Ints, used: int) -> None:
        """Copy the recurrent states and the first `used` cache slots of row `rows[r]` to every row r."""
        moved = np.flatnonzero(rows != np.arange(rows.size))
        if not moved.size:
            return
        for state, sides in zip(self._states, self._buffers, strict=True):
            # Only this side: the other one is overwritten before it is read again.
            buffer = sides[self.side]
            values = buffer.pull()
            used_slots = values if state.recurrent else values[:, :, :used]
            # Advanced indexing copies the right side first, so rows may swap places.
            used_slots[moved] = used_slots[rows[moved]]
            buffer.write(values)

    def take(self, other: Memory, used: int) -> None:
        """Copy the recurrent states and the first `used` cache slots of `other`, which has the same batch size and at
        most the same capacity."""
        other.bring(0, other._at.size)
        self.side, self._at = other.side, other._at.copy()
        for state, mine, theirs in zip(self._states, self._buffers, other._buffers, strict=True):
            to, values = mine[self.side], theirs[self.side].pull()
            if state.recurrent or to.shape == values.shape:
                to.write(values)
            else:
                used_slots = to.pull()
                used_slots[:, :, :used] = values[:, :, :used]
                to.write(used_slots)


def _allocate(
    session: Session, states: Sequence[BoundState], batch: int, capacity: int
) -> Iterator[NDArray[np.uint8] | None]:
    """Yield memory for each buffer of each state: on the CPU parts of one block, for which numpy requests huge pages;
    on other devices None."""
    sides = [1 + state.recurrent for state in states]
    sizes = [batch * s.nbytes(capacity) // n for s, n in zip(states, sides, strict=True) for _ in range(n)]
    if session.device != "cpu":
        yield from [None] * len(sizes)
        return
    starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    block = np.zeros(starts[-1] + _ALIGNMENT, np.uint8)
    block = block[-block.ctypes.data % _ALIGNMENT :]
    for start, size in zip(starts, sizes, strict=False):
        yield block[start : start + size]
