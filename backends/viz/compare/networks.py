"""Comparison of two networks: corresponding operations, marks for new, removed and changed ones, and the differences of
two operations: all of them for a panel, a summary for the box.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...alignment.layer_alignment import find_layer, match_layers
from ..model.labels import choose_title, describe_sizes
from ..model.network import CHANGED, KEPT, NEW, REMOVED, SIGNS, Change, Mark, Network, Vertex, Weight


@dataclass(frozen=True)
class Comparison:
    """Two networks with comparison marks on operations, inputs and outputs; marks of `before` have no `words`. `pairs`
    maps names of operations of `before` to the names of the corresponding operations of `after`."""

    before: Network
    after: Network
    pairs: Mapping[str, str]

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of operations with each sign of `SIGNS`; corresponding operations count once."""
        signs = [v.mark.sign for v in self.after.vertices if v.mark]
        signs += [v.mark.sign for v in self.before.vertices if v.mark and v.mark.sign == REMOVED]
        return {sign: signs.count(sign) for sign in SIGNS}


def compare_networks(before: Network, after: Network) -> Comparison:
    """Return both networks with marks on their operations, inputs and outputs.

    Operations correspond by name; in lists of layers with another name or length, by name within aligned layers.
    Operations whose result names do not occur in the other network correspond by scope, operator and the largest number
    of common neighbours and weights (at least one).
    """
    pairs = _NetworkMatcher(before, after).match_all()
    names, recipe = _map_values(before, after, pairs), _choose_recipe_text(before, after)
    ours, theirs = ({v.name: v for v in network.vertices} for network in (before, after))
    marks = {a: _mark_operation(ours[a], theirs[b], names, recipe) for a, b in pairs.items()}
    old_marks = {a: replace(mark, other=pairs[a]) for a, mark in marks.items()}
    new_marks = {b: replace(marks[a], other=a) for a, b in pairs.items()}
    starts, ends = _list_inputs_outputs(before), _list_inputs_outputs(after)
    for name in {**starts, **ends}:
        old_marks[name] = new_marks[name] = _mark_input_output(starts.get(name), ends.get(name), names)
    silent = {name: replace(mark, words=()) for name, mark in old_marks.items()}  # words describe only the new side
    return Comparison(_add_marks(before, silent, REMOVED), _add_marks(after, new_marks, NEW), pairs)


def mark_place(before: Network, after: Network, names: Collection[str], text: str) -> Comparison:
    """Return both networks with the mark "changed" and `text` on the operations that compute a value of `names`."""
    mark = Mark(CHANGED, (text,), (Change("first difference", "", text),))

    def add(network: Network) -> Network:
        marks = dict.fromkeys(_list_inputs_outputs(network), Mark())
        places = [v.name for v in network.vertices if {*v.makes, *v.file_names} & {*names}]
        return _add_marks(network, marks | dict.fromkeys(places, mark), KEPT)

    return Comparison(add(before), add(after), {})


def _add_marks(network: Network, marks: Mapping[str, Mark], default: str) -> Network:
    vertices = tuple(replace(v, mark=marks.get(v.name, Mark(default))) for v in network.vertices)
    return replace(network, vertices=vertices, marks={name: marks[name] for name in _list_inputs_outputs(network)})


def _mark_operation(before: Vertex, after: Vertex, names: Mapping[str, str], recipe: Recipe) -> Mark:
    differences = find_changes(before, after, names, recipe)
    return Mark(CHANGED, summarize_changes(before, after, differences), tuple(differences)) if differences else Mark()


def _list_inputs_outputs(network: Network) -> dict[str, tuple[str, str]]:
    """Map each input name, and "out." + each output name, to (name of the value, type)."""
    inputs = {name: (name, kind) for name, kind in network.inputs.items()}
    return inputs | {f"out.{name}": output for name, output in network.outputs.items()}


def _mark_input_output(before: tuple[str, str] | None, after: tuple[str, str] | None, names: Mapping[str, str]) -> Mark:
    """Return the mark of an input or output, given its (value name, type) in each network; None means absent."""
    if before is None or after is None:
        return Mark(NEW if before is None else REMOVED)
    if before[1] != after[1]:
        return Mark(CHANGED, (f"was {before[1]}",), (Change("type", before[1], after[1]),))
    if names.get(before[0], before[0]) != after[0]:
        return Mark(CHANGED, ("another value",), (Change("value", before[0], after[0]),))
    return Mark(KEPT)


def _map_values(before: Network, after: Network, pairs: Mapping[str, str]) -> dict[str, str]:
    """Map each result name in `before` to its name in `after`. The results of two operations in `pairs` correspond in
    order. Any other result keeps its name, or maps to "" if a result of a pair has that name in `after`."""
    theirs = {v.name: v for v in after.vertices}
    new_names: dict[str, str] = {}
    for v in before.vertices:
        if v.name in pairs:
            new_names |= zip(v.makes, theirs[pairs[v.name]].makes, strict=False)
    used = {*new_names.values()}
    for v in before.vertices:
        for name in v.makes:
            new_names.setdefault(name, "" if name in used else name)
    return new_names


def _choose_recipe_text(before: Network, after: Network) -> Recipe:
    """Return a function from a weight to its recipe; it omits tensor names if the networks have none in common."""

    def keys(network: Network) -> set[str]:
        return {match.group() for v in network.vertices for w in v.weights for match in QUOTED.finditer(w.recipe)}

    if keys(before).isdisjoint(keys(after)):
        return lambda w: strip_tensor_names(w.recipe)
    return lambda w: w.recipe


class _NetworkMatcher:
    """A matcher of corresponding operations of two networks, by the rules of `compare_networks`."""

    def __init__(self, before: Network, after: Network) -> None:
        self.before, self.after = before, after
        self.layers = match_layers(_count_by_layer(before), _count_by_layer(after))
        self.matches: dict[str, str] = {}
        self.matched: set[str] = set()

    def match_all(self) -> dict[str, str]:
        """Map the names of operations of `before` to the names of the corresponding operations of `after`."""
        theirs = {v.name for v in self.after.vertices}
        # Names as in the corresponding layer first: where layers were removed, a plain name is that of another one.
        for translate in (self.translate_name, lambda name, scope: name):
            for v in self.before.vertices:
                self.match_pair(v.name, translate(v.name, v.scope), theirs)
        ours, others = _find_neighbours(self.before), _find_neighbours(self.after)
        gone, come = _find_unique(self.before, self.after), _find_unique(self.after, self.before)
        kinds: dict[tuple[str, str], list[Vertex]] = {}
        for v in come:
            kinds.setdefault((v.scope, v.op), []).append(v)
        for v in gone:
            if v.name not in self.matches:
                around = {self.matches.get(name, name) for name in ours[v.name]}
                alike = kinds.get((self.translate_name(v.scope, v.scope), v.op), ())
                recipes = {w.recipe for w in v.weights}
                near = {
                    o.name: len(around & others[o.name]) + len(recipes & {w.recipe for w in o.weights})
                    for o in alike
                    if o.name not in self.matched
                }
                best = max(near, key=near.__getitem__, default="")
                self.match_pair(v.name, best if near.get(best) else "", theirs)
        return self.matches

    def match_pair(self, name: str, other: str, there: Collection[str]) -> None:
        """Record that `name` and `other` correspond if both are unmatched and `other` is in `there` (of `after`)."""
        if name not in self.matches and other in there and other not in self.matched:
            self.matches[name] = other
            self.matched.add(other)

    def translate_name(self, name: str, scope: str) -> str:
        """Return `name` with the layer of `scope` named as in `after`; "" if that was removed, `name` without one."""
        layer = find_layer(scope)
        other = self.layers.get(layer, layer)
        if not layer or not name.startswith(layer):
            return name
        return other and other + name.removeprefix(layer)


def _count_by_layer(network: Network) -> dict[str, Counter[str]]:
    """Count the operations of each layer: by name and operator, and again with attributes, types and weights."""
    layers: dict[str, Counter[str]] = {}
    for v in network.vertices:
        if layer := find_layer(v.scope):
            local = f"{v.name.removeprefix(layer)} {v.op}"
            weights = [(w.shape, w.dtype, w.recipe) for w in v.weights]
            layers.setdefault(layer, Counter()).update((local, f"{local} {dict(v.attrs)} {v.types} {weights}"))
    return layers


def _find_unique(network: Network, other: Network) -> list[Vertex]:
    there = {name for v in other.vertices for name in v.makes}
    return [v for v in network.vertices if there.isdisjoint(v.makes)]


def _find_neighbours(network: Network) -> dict[str, set[str]]:
    maker = {name: v.name for v in network.vertices for name in v.makes}
    neighbours: dict[str, set[str]] = {v.name: set() for v in network.vertices}
    for v in network.vertices:
        for source in {maker[name] for name in v.reads if name in maker}:
            neighbours[v.name].add(source)
            neighbours[source].add(v.name)
    return neighbours


UNSET = "not set"
QUOTED = re.compile(r"(['\"])(?:\\.|(?!\1).)*\1")

Recipe = Callable[[Weight], str]


def find_changes(before: Vertex, after: Vertex, names: Mapping[str, str], recipe: Recipe) -> list[Change]:
    """Return all differences of the operations `before` and `after` (operator, attributes, operands, types, weights).

    `names` maps value names of the first network to the second's. Weights are compared by type and by the text that
    `recipe` returns. If the operators differ, attributes that only one operation has are omitted.
    """
    return [
        *_compare_texts("operation", before.op, after.op),
        *(c for name in {**before.attrs, **after.attrs} for c in _compare_attribute(name, before, after)),
        *_compare_operands(before, after, names),
        *_compare_texts("makes", ", ".join(before.types), ", ".join(after.types)),
        *_compare_weights(before.weights, after.weights, recipe),
    ]


def strip_tensor_names(text: str) -> str:
    """Return the recipe `text` with every quoted string, such as the name of a checkpoint tensor, replaced by ''."""
    return QUOTED.sub("''", text)


def summarize_changes(before: Vertex, after: Vertex, differences: Sequence[Change]) -> tuple[str, ...]:
    """Return at most two lines that summarize `differences` in an operation's box ("was RMSNorm", "other weights")."""
    lines = []
    kinds = {c.what.partition(" ")[0] for c in differences}
    old, new = describe_sizes(before.weft_op), describe_sizes(after.weft_op)
    if before.op != after.op:
        lines.append(f"was {choose_title(before.weft_op)}")
    elif old != new and old:
        lines.append(f"was {old}")
    else:
        lines += [f"{c.what} was {c.before}" for c in differences if c.what in {**before.attrs, **after.attrs}][:2]
    if not lines and "reads" in kinds:
        lines.append(_summarize_operands(before.roles, after.roles))
    elif not lines and "makes" in kinds:
        lines.append(f"was {_describe_type(before.types, after.types)}")
    recipes = [c.what.removesuffix(": recipe") for c in differences if c.what.endswith(": recipe")]
    if recipes and before.op == after.op and old == new:
        others = [name.removeprefix("weight ").replace("_", " ") for name in recipes if name != "weight"]
        lines.append(f"other {_join_first(others)}" if len(others) == len(recipes) else "other weights")
    return tuple(lines[:2])


def _compare_texts(what: str, before: str, after: str) -> Iterator[Change]:
    if before != after:
        yield Change(what, before, after)


def _compare_attribute(name: str, before: Vertex, after: Vertex) -> Iterator[Change]:
    old, new = (str(v.attrs.get(name, UNSET)) for v in (before, after))
    if before.op == after.op or UNSET not in (old, new):
        yield from _compare_texts(name, old, new)


def _compare_operands(before: Vertex, after: Vertex, names: Mapping[str, str]) -> Iterator[Change]:
    ours = _group_by_role(before, [names.get(name, name) for name in before.reads])
    theirs = _group_by_role(after, after.reads)
    earlier = _group_by_role(before, before.reads)
    for role in {**ours, **theirs}:
        if ours.get(role) != theirs.get(role):
            old, new = (", ".join(operands.get(role, ())) or UNSET for operands in (earlier, theirs))
            yield Change(f"reads {role}", old, new, named=True)


def _group_by_role(v: Vertex, names: Sequence[str]) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for i, name in enumerate(names):
        roles.setdefault(v.roles[i] if i < len(v.roles) else "", []).append(name)
    return roles


def _compare_weights(before: Sequence[Weight], after: Sequence[Weight], recipe: Recipe) -> Iterator[Change]:
    for i in range(max(len(before), len(after))):
        a, b = (w[i] if i < len(w) else None for w in (before, after))
        name = (b or a or before[0]).name.rpartition(".")[2]
        what = name if name == "weight" else f"weight {name}"
        old, new = (f"{w.dtype}{w.shape}" if w else "none" for w in (a, b))
        yield from _compare_texts(f"{what}: type", old, new)
        if a is None or b is None or recipe(a) != recipe(b):
            old, new = (w.recipe if w else "none" for w in (a, b))
            yield Change(f"{what}: recipe", old, new, named=True)


def _summarize_operands(before: Sequence[str], after: Sequence[str]) -> str:
    added, removed = ([role for role in a if role not in b] for a, b in ((after, before), (before, after)))
    if added:
        return f"reads {_join_first(added)} too"
    return f"reads no {_join_first(removed)} now" if removed else "reads other values"


def _join_first(names: Sequence[str]) -> str:
    return ", ".join([*names[:2], *(["…"] if len(names) > 2 else [])])


def _describe_type(before: Sequence[str], after: Sequence[str]) -> str:
    """Return the first type of `before` that differs (only the dtype if the shapes are equal). If only the number of
    types differs, return all of `before`."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    if not pairs:
        return ", ".join(before)
    (old, shape), (_, new_shape) = (text.partition("[")[::2] for text in pairs[0])
    return old if shape == new_shape else pairs[0][0]
