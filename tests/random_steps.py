"""Random steps of recurrences, some of them affine in their states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.frontends.dsl import State, building, scan
from weft.ir import Graph, TensorType, Value, dtypes, ops
from weft.ir.types import sizes

ROWS = ((4,), (2, 3), (2, 3, 2))


class RandomStep:
    """A recurrence drawn from a seed: one or two states of a shape, ops that keep them affine, and others if `bent`."""

    def __init__(self, seed: int, bent: bool) -> None:
        self.rng, self.bent = np.random.default_rng(seed), bent
        self.row = ROWS[int(self.rng.integers(len(ROWS)))]
        self.states = int(self.rng.integers(1, 3))

    def graph(self) -> Graph:
        """The recurrence as a graph of its inputs x, gate and weight."""
        batch, seq, row = sizes.sym("batch"), sizes.sym("seq"), self.row
        with building(Graph("random")) as graph:
            x = graph.add_input("x", TensorType(dtypes.f32, (batch, seq, *row)))
            gate = graph.add_input("gate", TensorType(dtypes.f32, (batch, seq, *row[:-1], 1)))
            weight = graph.add_input("weight", TensorType(dtypes.f32, (row[-1],)))

            def step(states: Sequence[Value], x: Value, gate: Value) -> tuple[Any, Any]:
                free = [x, ops.sigmoid(gate), weight]
                new = [self.changed(h, free) for h in states]
                seen = new[0] * self.free(free) + self.free(free)
                outputs = (seen, ops.sum(states[-1] * x, axes=(1,)))
                return tuple(new), outputs if self.rng.random() < 0.5 else outputs[0]

            state = {f"h{i}": State(row, float(i) / 2) for i in range(self.states)}
            made = scan(step, x, gate, state=state)
            for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
                graph.add_output(f"y{i}", y)
        return graph

    def feeds(self, batch: int, seq: int) -> dict[str, np.ndarray]:
        def drawn(*shape: int) -> np.ndarray:
            return self.rng.standard_normal(shape)

        row = self.row
        return {"x": drawn(batch, seq, *row), "gate": drawn(batch, seq, *row[:-1], 1), "weight": drawn(row[-1])}

    def free(self, free: list[Value]) -> Value:
        """A value that depends on no state, of numbers that let no state grow for ever."""
        one, two = (free[int(self.rng.integers(len(free)))] for _ in range(2))
        kinds = (
            lambda: ops.tanh(one + two),
            lambda: ops.sigmoid(one) * ops.tanh(two),
            lambda: 0.5 * ops.sigmoid(one),
        )
        return kinds[int(self.rng.integers(len(kinds)))]()

    def changed(self, h: Value, free: list[Value]) -> Value:
        """The state after some ops, of which the last keeps it in bounds."""
        for _ in range(int(self.rng.integers(2, 5))):
            h = self.op(h, free)
        return h * self.free(free) * 0.7 + free[0]

    def op(self, h: Value, free: list[Value]) -> Value:
        f, g = self.free(free), self.free(free)
        shape, flat = h.shape, (h.shape[0], math.prod(self.row))
        affine = (
            lambda: h * f,
            lambda: f * h + g,
            lambda: g - h,
            lambda: -h,
            lambda: 0.5 * h + 0.25,
            lambda: h / (1.5 + f),
            lambda: ops.where(f > 0, h, g + h * 0.5),
            lambda: ops.where(ops.expand(f + free[0] * 0, shape=shape) > 0, h * g, free[0]),
            lambda: ops.reshape(ops.reshape(h * f, shape=flat) * 0.9 - 0.1, shape=shape),
            lambda: ops.squeeze(ops.unsqueeze(h, axes=(1,)) + 0.5, axes=(1,)),
            lambda: h * f + h * g,
        )
        bends = (
            lambda: ops.tanh(h),
            lambda: ops.maximum(h, f),
            lambda: h * ops.sigmoid(h),
            lambda: ops.sum(h, axes=(len(shape) - 1,), keepdims=True) * f + free[0] * 0,
            lambda: h * ops.sum(f + free[0], axes=(len(shape) - 1,), keepdims=True) * 0.3 + ops.square(h) * 0.1,
        )
        kinds = (*affine, *bends) if self.bent else affine
        return kinds[int(self.rng.integers(len(kinds)))]()
