"""Traces: the operations that a model executed on some inputs, with the contents of their results; and the alignment of
the values of two traces by name, by contents, and by the values that they depend on.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from weft.ir.recipes.readers import Array

FEWEST = 8  # elements of a value whose contents identify it
LEAST = 1e-6  # size of a row relative to the largest row, below which its error is relative to this share
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
    x, like = np.atleast_1d(x), np.atleast_1d(like)
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
    """Return max |actual − expected| / max |expected|; with `by_row` the largest of this over rows (the last axis),
    where max |expected| of a row counts as at least `LEAST` times that of the whole array."""
    difference = np.where(actual == expected, 0.0, np.abs(actual - expected))  # equal infinities do not differ
    axis, sizes = -1 if by_row and expected.ndim else None, np.abs(expected)
    least = LEAST * sizes.max(where=np.isfinite(sizes), initial=0.0)
    scale = np.maximum(sizes.max(axis), max(least, np.finfo(np.float32).tiny))
    return float((difference.max(axis) / scale).max())


ALIKE = 0.3  # least cosine of two different values that correspond by their contents


@dataclass
class AlignedTrace:
    """A trace, and its values that correspond to some of another trace.

    `classes`: values that agree, with a name that values of equal contents share in both traces. `keys`: values with a
    name in common, with this name. `partners`: the value of the other trace with this name.
    """

    trace: ValueTrace
    classes: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    partners: dict[str, str] = field(default_factory=dict)
    _cuts: dict[str, set[frozenset[str]]] = field(default_factory=dict)

    def find_suspects(self) -> list[str]:
        """Return the float values that lead to an output but to no value that agrees, in topological order.

        All results of an operation must lead to one. A value that equals one of its operands, such as a sum with 0, is
        no evidence for its other operands.
        """
        fine, wanted = set(self.classes), self.trace.find_ancestors(self.trace.outputs.values())
        for operation in reversed(self.trace.operations):
            makes = wanted.intersection(operation.makes)
            if makes and makes <= fine:
                common = {self.classes.get(x) for x in makes} - {None}
                fine.update([x for x in operation.reads if self.classes.get(x) in common] or operation.reads)
        results = (x for operation in self.trace.operations for x in operation.makes)
        return [x for x in results if x in wanted - fine and self.trace.values[x].dtype.kind == "f"]

    def find_first_named(self) -> str | None:
        """Return the first value that leads to an output and differs from the value of the same name."""
        wanted = self.trace.find_ancestors(self.trace.outputs.values())
        return next(
            (x for x in self.trace.makers if x in wanted and x in self.partners and x not in self.classes), None
        )

    def find_cuts(self, name: str) -> set[frozenset[str]]:
        """Return the set of nearest values with a class or common name that `name` depends on, by class or name.

        There are two sets if an operation on the way has another result of the same size that agrees, such as the sum
        that a fused norm returns: with the operands of this operation, or with this result instead.
        """
        if name not in self._cuts:
            cuts = (self._find_cut(name, fused) for fused in (False, True))
            self._cuts[name] = {frozenset(self.classes.get(x) or self.keys[x] for x in cut) for cut in cuts}
        return self._cuts[name]

    def _find_cut(self, name: str, fused: bool) -> set[str]:
        pending, seen, cut, values = [name], {name}, set[str](), self.trace.values
        while pending:
            x = pending.pop()
            if x != name and (x in self.classes or x in self.keys):
                cut.add(x)
            elif (operation := self.trace.makers.get(x)) is not None:
                twins = [y for y in operation.makes if y in self.classes and values[y].size == values[x].size]
                reads = twins if fused and twins else operation.reads
                pending += [y for y in reads if y in values and y not in seen]
                seen.update(pending)
        return cut

    def list_alike(self, suspects: list[str], size: int, cuts: set[frozenset[str]]) -> list[str]:
        """Return the `suspects` with `size` elements that depend on one of `cuts`."""
        alike = (x for x in suspects if self.trace.values[x].size == size and is_distinctive(self.trace.values[x]))
        return [x for x in alike if self.find_cuts(x) & cuts]


def align_traces(a: ValueTrace, b: ValueTrace, tolerance: float) -> tuple[AlignedTrace, AlignedTrace]:
    """Align the values of two traces of the same inputs.

    Values with equal names or labels correspond. They agree if all rows are equal up to the relative error `tolerance`.
    Values without a name in common also agree if their contents are equal, in any layout (see `arrange`).
    """
    ours, theirs = pair = AlignedTrace(a), AlignedTrace(b)

    def check(name: str, partner: str) -> None:
        x, y = a.values[name], b.values[partner]
        arranged = arrange(x, y) if x.size == y.size and is_distinctive(x) and is_distinctive(y) else None
        if arranged is not None and compute_error(*arranged, by_row=True) <= tolerance:
            common = theirs.classes.get(partner) or ours.classes.get(name, name)
            ours.classes.setdefault(name, common)
            theirs.classes.setdefault(partner, common)

    names, labels = ({name: name for name in t.values} | t.labels | t.outputs for t in (a, b))
    for name, partner in ((name, labels[label]) for label, name in names.items() if label in labels):
        if a.values[name].dtype.kind == b.values[partner].dtype.kind == "f":
            if name not in ours.keys and partner not in theirs.keys:
                ours.keys[name] = theirs.keys[partner] = theirs.partners[partner] = name
                ours.partners[name] = partner
            check(name, partner)
    differing = {name for name, partner in ours.partners.items() if name == partner and name not in ours.classes}
    free = [{n: x for n, x in t.values.items() if n not in differing and is_distinctive(x)} for t in (a, b)]
    norms = sorted((x.size, _compute_norm(x), name) for name, x in free[1].items())
    for name, x in free[0].items():
        norm, slack = _compute_norm(x), tolerance * math.sqrt(x.size) * float(np.abs(x).max())
        first, last = bisect_left(norms, (x.size, norm - slack)), bisect_right(norms, (x.size, norm + slack))
        for _, _, partner in norms[first:last]:
            check(name, partner)
    for packed, parts in (pair, pair[::-1]):
        _match_parts(packed, parts, tolerance)
    for name, partner in list(ours.partners.items()):  # modules of one name may return results of different operations
        if (name in ours.classes) != (partner in theirs.classes):
            del ours.partners[name], ours.keys[name], theirs.partners[partner], theirs.keys[partner]
    return pair


def _match_parts(packed: AlignedTrace, parts: AlignedTrace, tolerance: float) -> None:
    """Let values of `parts` agree that are features of one value of `packed`, such as packed queries, keys and values.

    Only values are tried that have no counterpart, but are computed from values that agree.
    """
    wide = [y.reshape(-1, y.shape[-1]) for y in packed.trace.values.values() if is_distinctive(y)]
    for name, operation in parts.trace.makers.items():
        x, reads = parts.trace.values[name], {y for y in operation.reads if y in parts.trace.values}
        if (
            name not in parts.classes
            and name not in parts.keys
            and is_distinctive(x)
            and set() < reads <= {*parts.classes}
        ):
            x = x.reshape(-1, x.shape[-1])
            for y in (y for y in wide if len(y) == len(x) and y.shape[1] > x.shape[1]):
                at = int(np.abs(y - x[:, :1]).max(0).argmin())
                part = y[:, at : at + x.shape[1]]
                if part.shape == x.shape and compute_error(part, x, by_row=True) <= tolerance:
                    parts.classes[name] = name


def find_counterpart(e: AlignedTrace, o: AlignedTrace, name: str, suspects: tuple[list[str], list[str]]) -> str | None:
    """Return the value of `o` that corresponds to the suspect `name` of `e`; None if unknown.

    It has the same name. Otherwise it is a suspect of the same size that depends on the same values that agree, and is
    more similar to `name` than to other suspects of `e`; of several the last, because one operation of `e` may be
    several of `o`. If none is similar to any, it is the first.
    """
    if name in e.partners:
        return e.partners[name]
    size, cuts, last, first = e.trace.values[name].size, e.find_cuts(name), None, None
    rivals = {name, *e.list_alike(suspects[0], size, cuts)}
    for candidate in o.list_alike(suspects[1], size, cuts):
        if candidate not in o.keys:
            cosines = {x: _compute_cosine(e.trace.values[x], o.trace.values[candidate]) for x in rivals}
            last = candidate if cosines[name] >= max(ALIKE, *cosines.values()) else last
            first = first or (candidate if max(cosines.values()) < ALIKE else None)
    return last or first


def _compute_cosine(x: Array, y: Array) -> float:
    moved, like = (v.astype(np.float64) for v in arrange(x, y) or (x, y))
    return float(np.vdot(moved, like)) / max(_compute_norm(x) * _compute_norm(y), np.finfo(np.float64).tiny)


def _compute_norm(x: Array) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))  # in f32, masks overflow
