"""Traces: the operations that a model executed on some inputs, with the contents of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from weft.ir.recipes.readers import Array

FEWEST = 8  # elements of a value whose contents identify it
RARE = 10  # times that a layout with features on another axis than the last must fit better than others

Constant = tuple[tuple[int, ...], Callable[[], Array]]  # shape, function that returns the contents


@dataclass(frozen=True, eq=False)
class Operation:
    """One executed operation. `name`: of the node, or the path of its module. `reads`, `makes`: names of values and
    constants, "" if absent. ``run(operands, attrs)`` computes its results for other operands or attributes."""

    op: str
    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    attrs: Mapping[str, Any]
    run: Callable[[Sequence[Array | None], Mapping[str, Any]], Sequence[Array]]


@dataclass
class ValueTrace:
    """An execution of a model: `operations` in topological order, contents of inputs and results by name.

    `constants`: weights and tables by name. `outputs`: output → its value. `labels`: another
    name, such as the path of a module → the value. `dtype`: of activations; `rounded`: these are rounded to 8 bits.
    """

    operations: list[Operation] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    dtype: str = "f32"
    rounded: bool = False
    _loaded: dict[str, Array] = field(default_factory=dict)

    @cached_property
    def makers(self) -> dict[str, Operation]:
        """Return the operation that computes each value, keyed by the name of the value."""
        return {name: operation for operation in self.operations for name in operation.makes if name}

    def load(self, name: str) -> Array | None:
        """Return the contents of a value or constant; None if it is absent."""
        if name in self.constants and name not in self._loaded:
            self._loaded[name] = self.constants[name][1]()
        return self.values[name] if name in self.values else self._loaded.get(name)

    def find_ancestors(self, names: Iterable[str], stops: Collection[str] = ()) -> set[str]:
        """Return `names` and all values that they are computed from, up to and including those in `stops`."""
        pending, ancestors = list(names), set(names)
        while pending:
            for x in self.makers[name].reads if (name := pending.pop()) in self.makers else ():
                if x in self.values and x not in ancestors:
                    ancestors.add(x)
                    pending += [x] if x not in stops else []
        return ancestors


def is_distinctive(x: Array) -> bool:
    """Return whether the contents of `x` identify it: floats, not too few, not constant, all finite."""
    return x.dtype.kind == "f" and x.size >= FEWEST and bool(np.isfinite(x).all()) and x.min() < x.max()


@np.errstate(all="ignore")
def arrange(x: Array, like: Array) -> tuple[Array, Array] | None:
    """Return (x, like) in one shape, [..., features]; None if their shapes do not correspond.

    Axes of size 1 do not count. Axes of `x` are permuted, merged or split, in the way that fits the contents of `like`
    best. If one has fewer rows or features than the other, the last rows and the first features of both are returned.
    """
    a, b = (tuple(n for n in v.shape if n != 1) for v in (x, like))
    if x.size != like.size:
        shapes = [s if len(s) == 2 else (1, *s) for s in (a, b)]
        if any(len(s) != 2 for s in shapes) or all(m != n for m, n in zip(*shapes, strict=True)):
            return None
        rows, width = map(min, *shapes)
        pair = [v.reshape(s)[s[0] - rows :, :width] for v, s in zip((x, like), shapes, strict=True)]
        return pair[0], pair[1]
    layouts = [(1, x.reshape(like.shape))]
    if a != b and min(len(a), len(b)) > 1:
        for p in itertools.permutations(range(len(a))):
            layouts.append((1 if p[-1] == len(a) - 1 else RARE, x.reshape(a).transpose(p).reshape(like.shape)))
        for p in itertools.permutations(range(len(b))):
            moved = x.reshape([b[i] for i in p]).transpose(np.argsort(p))
            layouts.append((1 if p[-1] == len(b) - 1 else RARE, moved.reshape(like.shape)))
    return min(layouts, key=lambda layout: layout[0] * float(np.abs(layout[1] - like).sum()))[1], like


@np.errstate(all="ignore")
def compute_error(actual: Array, expected: Array, by_row: bool = False) -> float:
    """Return max |actual − expected| / max |expected|; with `by_row` the largest of this over rows (the last axis)."""
    difference = np.where(actual == expected, 0.0, np.abs(actual - expected))  # equal infinities do not differ
    axis = -1 if by_row and expected.ndim else None
    scale = np.maximum(np.abs(expected).max(axis), np.finfo(np.float32).tiny)
    return float((difference.max(axis) / scale).max())
