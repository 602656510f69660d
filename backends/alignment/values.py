"""Alignment of the values of two traces: by name, by contents, and by the values that they depend on."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from weft.ir.recipes.readers import Array

from .traces import ValueTrace, arrange, compute_error, is_distinctive

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
