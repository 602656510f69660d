"""Caches and states that a decoder carries from call to call.

Caches [batch, kv_heads, capacity, width] are written in place, the output into the memory of the input. The capacity
grows with the text; or it is fixed in the graph, and then bounds the text, unless the cache rolls (position p in slot
p mod capacity). States [batch, ...] are of constant size, zero at the start of a sequence, and kept twice: a run reads
one side and writes the other.
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

from ...facts import Carried
from ..arrays import Ints
from .buffers import Buffer, Kind, kind_of
from .session import Session

_ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class State:
    """One cache or state of a graph; `shape` is that of a row, None where it grows with the text. One of constant size
    is filled with `initial` at the start of a text."""

    past: str
    present: str
    kind: Kind
    shape: tuple[int | None, ...]
    growth: Growth
    initial: float = 0.0
    again: tuple[str, ...] = ()  # outputs of other attentions that read the cache, and write the same into it

    @property
    def recurrent(self) -> bool:
        """Return whether the state has constant size and is held twice."""
        return self.growth is Growth.CONSTANT

    @property
    def limit(self) -> int | None:
        """The most tokens it can hold, where it has such a bound."""
        return self.shape[1] if self.growth is Growth.TEXT else None

    def nbytes(self, capacity: int) -> int:
        """Bytes of one row where caches that grow hold `capacity` tokens."""
        size = math.prod(capacity if n is None else n for n in self.shape) * np.dtype(self.kind[1]).itemsize
        return 2 * size if self.recurrent else size


def read_states(
    name: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    carried: Iterable[Carried],
    head_dim: int | None = None,
) -> list[State]:
    """The states `carried` of the graph `name`, from its inputs and outputs as ONNX Runtime describes them.

    `head_dim` is the width of caches where the graph leaves it open. Raises WeftError when one is not taken or not
    returned, or open in another size than its capacity.
    """
    found = []
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
            what = "sizes" if recurrent else "heads and head size"
            raise WeftError(f"{name}: {past} is {inputs[past].shape}, but its {what} must be fixed numbers")
        again = tuple(output for output in outputs if output.startswith(f"{present}."))
        kind = kind_of(name, inputs[past])
        found.append(State(past, present, kind, tuple(shape), state.growth, state.initial, again))
    return found


class Memory:
    """The states of one batch; `side` is the one of the two that recurrent states are read from next."""

    def __init__(self, session: Session, states: Sequence[State], batch: int, capacity: int) -> None:
        self.side, self.sides = 0, 1 + any(state.recurrent for state in states)
        self._states = states
        self._at = np.zeros(batch, np.int64)  # the side that holds each row's recurrent states
        self._buffers: list[tuple[Buffer, Buffer]] = []
        room = _rooms(session, states, batch, capacity)
        for state in states:
            shape = (batch, *(capacity if n is None else n for n in state.shape))
            sides = [Buffer(session, shape, state.kind, next(room)).drop_host() for _ in range(1 + state.recurrent)]
            self._buffers.append((sides[0], sides[-1]))
        if any(state.initial for state in states):
            self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for sides in self._buffers for buffer in dict.fromkeys(sides))

    def bind(self, binding: Any, side: int, first: int = 0, rows: int | None = None) -> None:
        """Bind `rows` rows from `first` on, recurrent states to be read from `side` and written to the other."""
        for state, buffers in zip(self._states, self._buffers, strict=True):
            buffers[side].bind_input(binding, state.past, first, rows)
            for output in (state.present, *state.again):
                buffers[1 - side].bind_output(binding, output, first, rows)

    def turn(self, first: int = 0, rows: int | None = None) -> None:
        """After a run of `rows` rows from `first` on (all by default): what was written is read next."""
        self.side = (self.side + 1) % self.sides
        self._at[first : None if rows is None else first + rows] = self.side

    def bring(self, first: int, rows: int, side: int | None = None) -> None:
        """Bring the recurrent states of `rows` rows from `first` on to the `side` that is read next."""
        self.side = self.side if side is None else side
        for row in np.flatnonzero(self._at[first : first + rows] != self.side) + first:
            for buffers in self._recurrent():
                values = buffers[self.side].pull()
                values[row] = buffers[1 - self.side].pull()[row]
                buffers[self.side].write(values)
            self._at[row] = self.side

    def vacate(self, row: int) -> None:
        """Recurrent states of one row as at the start of a sequence."""
        for state, buffers in zip(self._states, self._buffers, strict=True):
            if state.recurrent:
                values = buffers[self.side].pull()
                values[row] = state.initial
                buffers[self.side].write(values)
        self._at[row] = self.side

    def move(self, row: int, to: int, used: int) -> None:
        """Let row `to` continue what `row` holds; of caches, `used` slots."""
        self.bring(row, 1)
        for state, sides in zip(self._states, self._buffers, strict=True):
            values = sides[self.side].pull()
            held = values if state.recurrent else values[:, :, :used]
            held[to] = held[row]
            sides[self.side].write(values)
        self._at[to] = self.side

    def _recurrent(self) -> Iterator[tuple[Buffer, Buffer]]:
        return (sides for state, sides in zip(self._states, self._buffers, strict=True) if state.recurrent)

    def clear(self) -> None:
        """Recurrent states as at the start of a sequence. Caches need no clearing: no row looks beyond its length."""
        self.side = 0
        self._at[:] = 0
        for state, sides in zip(self._states, self._buffers, strict=True):
            for buffer in sides if state.recurrent else ():
                buffer.write(np.full(buffer.shape, state.initial, state.kind[1]))

    def gather(self, rows: Ints, used: int) -> None:
        """Row r continues what row `rows[r]` holds; of caches, `used` slots."""
        moved = np.flatnonzero(rows != np.arange(rows.size))
        if not moved.size:
            return
        for state, sides in zip(self._states, self._buffers, strict=True):
            # The other side of a state is written before it is read again.
            buffer = sides[self.side]
            values = buffer.pull()
            held = values if state.recurrent else values[:, :, :used]
            # Indexing by numbers copies the right side first, so rows may swap places.
            held[moved] = held[rows[moved]]
            buffer.write(values)

    def take(self, other: Memory, used: int) -> None:
        """The contents of `other`, of as many rows and of no larger capacity; of caches, `used` slots."""
        other.bring(0, other._at.size)
        self.side, self._at = other.side, other._at.copy()
        for state, mine, theirs in zip(self._states, self._buffers, other._buffers, strict=True):
            to, values = mine[self.side], theirs[self.side].pull()
            if state.recurrent or to.shape == values.shape:
                to.write(values)
            else:
                held = to.pull()
                held[:, :, :used] = values[:, :, :used]
                to.write(held)


def _rooms(session: Session, states: Sequence[State], batch: int, capacity: int) -> Iterator[NDArray[np.uint8] | None]:
    """Memory for each side of each state; on the CPU parts of one block, which numpy asks huge pages for."""
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
