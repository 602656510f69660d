"""Buffers of caches and states: one block of memory, rows that move, and double-buffered recurrent states."""

from __future__ import annotations

import itertools

import numpy as np

from weft.backends.runtime.ort.bound_states import BoundState, StateBuffers
from weft.backends.runtime.ort.session import Session
from weft.ir.schema.states import Growth


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
