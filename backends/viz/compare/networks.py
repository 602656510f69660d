"""Two networks side by side: which operations of them correspond, and what is new, gone or changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ..model.marks import CHANGED, KEPT, NEW, REMOVED, SIGNS, Change, Mark
from ..model.network import Network, Vertex
from .changes import QUOTED, Recipe, changes, gist, without_keys
from .layers import layer_of, renamed


@dataclass(frozen=True)
class Comparison:
    """Two networks whose operations, inputs and outputs have marks; `pairs` are the operations that correspond, by
    their names."""

    before: Network
    after: Network
    pairs: Mapping[str, str]

    @property
    def counts(self) -> dict[str, int]:
        """Count operations by sign; operations present in both networks count once."""
        every = [v.mark.sign for v in self.after.vertices if v.mark]
        every += [v.mark.sign for v in self.before.vertices if v.mark and v.mark.sign == REMOVED]
        return {sign: every.count(sign) for sign in SIGNS}


def compare(before: Network, after: Network) -> Comparison:
    """`before` and `after` with marks.

    Operations correspond that have one name, which passes keep; in lists of layers that are not equally long, one name
    in layers that correspond. Of those left, the ones of one kind in one scope that share most neighbours and weights.
    Recipes tell weights apart, but for the names of tensors where two checkpoints have none in common.
    """
    pairs = _Matcher(before, after).pairs()
    names, recipe = _values(before, after, pairs), _recipes(before, after)
    ours, theirs = ({v.name: v for v in network.vertices} for network in (before, after))
    marks = {a: _mark(ours[a], theirs[b], names, recipe) for a, b in pairs.items()}
    left = {a: replace(mark, other=pairs[a]) for a, mark in marks.items()}
    right = {b: replace(marks[a], other=a) for a, b in pairs.items()}
    starts, ends = _ends(before), _ends(after)
    for name in {**starts, **ends}:
        left[name] = right[name] = _end(starts.get(name), ends.get(name), names)
    silent = {name: replace(mark, words=()) for name, mark in left.items()}  # what was is said of what is
    return Comparison(_marked(before, silent, REMOVED), _marked(after, right, NEW), pairs)


def _marked(network: Network, marks: Mapping[str, Mark], alone: str) -> Network:
    """`network` with its `marks` by name; what has none is `alone`, a sign."""
    vertices = tuple(replace(v, mark=marks.get(v.name, Mark(alone))) for v in network.vertices)
    return replace(network, vertices=vertices, marks={name: marks[name] for name in _ends(network)})


def _mark(before: Vertex, after: Vertex, names: Mapping[str, str], recipe: Recipe) -> Mark:
    """The mark of an operation that is in both networks."""
    differences = changes(before, after, names, recipe)
    return Mark(CHANGED, gist(before, after, differences), tuple(differences)) if differences else Mark()


def _ends(network: Network) -> dict[str, tuple[str, str]]:
    """Inputs and outputs by the names that marks have for them: values and types."""
    inputs = {name: (name, kind) for name, kind in network.inputs.items()}
    return inputs | {f"out.{name}": output for name, output in network.outputs.items()}


def _end(before: tuple[str, str] | None, after: tuple[str, str] | None, names: Mapping[str, str]) -> Mark:
    """The mark of an input or output: a value and its type before and after."""
    if before is None or after is None:
        return Mark(NEW if before is None else REMOVED)
    if before[1] != after[1]:
        return Mark(CHANGED, (f"was {before[1]}",), (Change("type", before[1], after[1]),))
    if names.get(before[0], before[0]) != after[0]:
        return Mark(CHANGED, ("another value",), (Change("value", before[0], after[0]),))
    return Mark(KEPT)


def _values(before: Network, after: Network, pairs: Mapping[str, str]) -> dict[str, str]:
    """Map values of `before` to their names in `after`; "" for values that `after` lacks."""
    theirs = {v.name: v for v in after.vertices}
    renamed: dict[str, str] = {}
    for v in before.vertices:
        if v.name in pairs:
            renamed |= zip(v.makes, theirs[pairs[v.name]].makes, strict=False)
    called = {*renamed.values()}
    for v in before.vertices:
        for name in v.makes:
            renamed.setdefault(name, "" if name in called else name)
    return renamed


def _recipes(before: Network, after: Network) -> Recipe:
    """Choose how weight recipes are compared: without tensor names if the two networks share none."""

    def keys(network: Network) -> set[str]:
        return {match.group() for v in network.vertices for w in v.weights for match in QUOTED.finditer(w.recipe)}

    if keys(before).isdisjoint(keys(after)):
        return lambda w: without_keys(w.recipe)
    return lambda w: w.recipe


class _Matcher:
    """Finds the operations that correspond."""

    def __init__(self, before: Network, after: Network) -> None:
        self.before, self.after = before, after
        self.layers = renamed(before, after)
        self.found: dict[str, str] = {}
        self.taken: set[str] = set()

    def pairs(self) -> dict[str, str]:
        """The names of operations of `before`, with those of `after` that they correspond to."""
        theirs = {v.name for v in self.after.vertices}
        # Names as in the corresponding layer first: where layers were removed, a plain name is that of another one.
        for called in (self.called, lambda name, scope: name):
            for v in self.before.vertices:
                self.take(v.name, called(v.name, v.scope), theirs)
        ours, others = _neighbours(self.before), _neighbours(self.after)
        gone, come = _gone(self.before, self.after), _gone(self.after, self.before)
        kinds: dict[tuple[str, str], list[Vertex]] = {}
        for v in come:
            kinds.setdefault((v.scope, v.op), []).append(v)
        for v in gone:
            if v.name not in self.found:
                around = {self.found.get(name, name) for name in ours[v.name]}
                alike = kinds.get((self.called(v.scope, v.scope), v.op), ())
                near = {o.name: len(around & others[o.name]) + _shared(v, o) for o in alike if o.name not in self.taken}
                best = max(near, key=near.__getitem__, default="")
                self.take(v.name, best if near.get(best) else "", theirs)
        return self.found

    def take(self, name: str, other: str, there: Collection[str]) -> None:
        """Let `name` correspond to `other`, if that is there and both are free."""
        if name not in self.found and other in there and other not in self.taken:
            self.found[name] = other
            self.taken.add(other)

    def called(self, name: str, scope: str) -> str:
        """Rename something of `scope` as in the corresponding layer; "" if there is none."""
        layer = layer_of(scope)
        other = self.layers.get(layer, layer)
        if not layer or not name.startswith(layer):
            return name
        return other and other + name.removeprefix(layer)


def _shared(v: Vertex, other: Vertex) -> int:
    """Count the weights that two operations make with the same recipe."""
    return len({w.recipe for w in v.weights} & {w.recipe for w in other.weights})


def _gone(network: Network, other: Network) -> list[Vertex]:
    """The operations of `network` of whose values the other one has none: what others make there is not theirs."""
    there = {name for v in other.vertices for name in v.makes}
    return [v for v in network.vertices if there.isdisjoint(v.makes)]


def _neighbours(network: Network) -> dict[str, set[str]]:
    """The operations that every one reads from and is read by."""
    maker = {name: v.name for v in network.vertices for name in v.makes}
    neighbours: dict[str, set[str]] = {v.name: set() for v in network.vertices}
    for v in network.vertices:
        for source in {maker[name] for name in v.reads if name in maker}:
            neighbours[v.name].add(source)
            neighbours[source].add(v.name)
    return neighbours
