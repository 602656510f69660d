"""The operations of a network as a tree of scopes, with consecutive equal parts folded into repeats."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
import numpy as np

from .network import Network, Vertex

NUMBERED = re.compile(r"[._]\d+([._]|$)")
SIZE = re.compile(r"[A-Za-z_][^,\[\]]*")


@dataclass
class PicturePart:
    """A part of the picture: `name` is its name within its scope, `path` its unique name.

    A leaf has `vertices`: an operation and the views of its results. A group has `children`. A repeat is a group whose
    children occur in `count` rounds (iterations), in sequence or in parallel.
    `later_rounds`: the children of each round from the second on.
    `reach`: "local" or "global" in a model where only some layers have a window, else "".
    `shared`: values that both the first and the second round of an enclosing repeat read.
    """

    name: str
    path: str
    vertices: tuple[Vertex, ...] = ()
    children: list[PicturePart] = field(default_factory=list)
    count: int = 1
    later_rounds: list[list[PicturePart]] = field(default_factory=list)
    reach: str = ""
    shared: frozenset[str] = frozenset()

    @property
    def parallel(self) -> bool:
        """Return whether the rounds are independent: the second reads no result of the first."""
        values = {name for part in self.children for name in part.results}
        return not any(name in values for part in (self.later_rounds or [[]])[0] for name in part.read)

    @property
    def body(self) -> PicturePart:
        """Return the part whose children are drawn: the first layer of a repeat of single layers, else the part."""
        return self.children[0] if self.count > 1 and len(self.children) == 1 and self.children[0].children else self

    @property
    def times(self) -> str:
        """Return the number of rounds as a suffix of the title, " × 12"; "" for a single round."""
        return f" × {self.count}" if self.count > 1 else ""

    def all_vertices(self) -> Iterator[Vertex]:
        """Yield every operation of the part, including all rounds of repeats."""
        yield from self.vertices
        for part in itertools.chain(self.children, *self.later_rounds):
            yield from part.all_vertices()

    # These properties are cached: a part must not change after their first use.

    @cached_property
    def results(self) -> dict[str, None]:
        """Return the names of the values that operations of the part produce, in order, as keys."""
        return dict.fromkeys(name for v in self.all_vertices() for name in v.makes)

    @cached_property
    def read(self) -> dict[str, None]:
        """Return the names of the values that the part reads but does not produce, in order, as keys."""
        return dict.fromkeys(name for v in self.all_vertices() for name in v.reads if name not in self.results)

    @cached_property
    def layer_inputs(self) -> tuple[str, ...]:
        """Return the inputs of the model that belong to a layer, such as caches, and are read in the part."""
        return tuple(name for v in self.all_vertices() for name in v.layer_inputs)

    @cached_property
    def model_inputs(self) -> frozenset[str]:
        """Return the inputs of the model that are read in the part."""
        return frozenset(name for v in self.all_vertices() for name in v.model_inputs)

    @cached_property
    def layer_outputs(self) -> tuple[str, ...]:
        """Return the outputs of the model that belong to a layer and are produced in the part."""
        return tuple(name for v in self.all_vertices() for name in v.layer_outputs)

    @cached_property
    def weight(self) -> int:
        """Return the weight of the part in layout: its parameter bytes plus its number of operations."""
        return sum(1 + sum(w.bytes for w in v.weights) for v in self.all_vertices())

    @cached_property
    def has_layers(self) -> bool:
        """Return whether the part is a layer or contains layers."""
        is_layer = self.name.isdigit() and bool(self.children)
        return self.count > 1 or is_layer or any(part.has_layers for part in self.children)

    def parts(self) -> Iterator[PicturePart]:
        """Yield this part, then all parts in it; of a repeat only the first round."""
        yield self
        for child in self.children:
            yield from child.parts()


def build_outline(network: Network) -> PicturePart:
    """Return the tree of `network`; inputs and outputs that do not belong to a single layer are leaves of the root."""
    layer_inputs, outputs = find_layer_io(network)
    leaves = [
        PicturePart(name, name, (_make_io(network, name, "input", (), (name,), t),))
        for name, t in network.inputs.items()
        if name not in layer_inputs
    ]
    leaves += _make_leaves(network, layer_inputs, outputs)
    for name, (value, kind) in network.outputs.items():
        if name not in outputs.get(value, ()):
            vertex = _make_io(network, f"out.{name}", "output", (value,), (), kind)
            leaves.append(PicturePart(name, vertex.name, (vertex,)))
    root = PicturePart(network.name, "", children=_group_leaves(leaves, ""))
    if {"local", "global"} <= {_find_reach(v) for v in root.all_vertices()}:
        _set_reach(root)
    return root


def _find_reach(v: Vertex) -> str:
    return "" if not v.weft_op.attends else "local" if v.weft_op.attrs.get("window") else "global"


def _set_reach(part: PicturePart) -> None:
    """Set `reach` of every layer in `part`, and of every repeat whose layers have the same reach."""
    for child in itertools.chain(part.children, *part.later_rounds):
        _set_reach(child)
    if part.has_layers:
        spans = {_find_reach(v) for v in part.all_vertices()} - {""}
        inner = {child.reach for child in part.children if child.has_layers}
        if len(inner) < 2:
            part.reach = next(iter(inner), "local" if "local" in spans else "global" if spans else "")


def _make_io(network: Network, name: str, op: str, reads: tuple[str, ...], makes: tuple[str, ...], kind: str) -> Vertex:
    return Vertex(name, op, "", reads, makes, (), (kind,), mark=network.marks.get(name))


def find_layer_io(network: Network) -> tuple[dict[str, None], dict[str, list[str]]]:
    """Return the model's inputs (as keys) and outputs (value → names) that belong to a single layer, such as caches.
    Their names contain a number, and only operations in numbered scopes use them."""
    layered, inside, outside = set[str](), set[str](), set[str]()
    for v in network.vertices:
        within = any(word.isdigit() for word in v.scope.split("."))
        (inside if within else outside).update(v.reads)
        layered.update(v.makes if within else ())
    inputs = {name: None for name in network.inputs if name in inside - outside and NUMBERED.search(name)}
    outputs: dict[str, list[str]] = {}
    for name, (value, _) in network.outputs.items():
        if value in layered - outside and NUMBERED.search(name):
            outputs.setdefault(value, []).append(name)
    return inputs, outputs


def _make_leaves(network: Network, layer_inputs: Collection[str], outputs: dict[str, list[str]]) -> list[PicturePart]:
    """Return a leaf per operation, but views and biases of linears join the leaf of their operand, and a sum joins the
    sum that is its only reader, if both are in the same scope."""
    makers: dict[str, PicturePart] = {}
    leaves = []
    for vertex in network.vertices:
        of_layer = tuple(name for name in vertex.reads if name in layer_inputs)
        inputs = tuple(name for name in vertex.reads if name in network.inputs)
        results = tuple(name for value in vertex.makes for name in outputs.get(value, ()))
        if inputs or results:
            vertex = replace(vertex, model_inputs=inputs, layer_inputs=of_layer, layer_outputs=results)
        source = makers.get(vertex.reads[0]) if len(vertex.reads) == 1 else None
        if source is not None and source.vertices[0].scope == vertex.scope and _is_part_of(vertex, source.vertices[0]):
            source.vertices += (vertex,)
        else:
            source = PicturePart(vertex.name.removeprefix(f"{vertex.scope}."), vertex.name, (vertex,))
            leaves.append(source)
        makers |= dict.fromkeys(vertex.makes, source)
    return _merge_sums(leaves, [value for value, _ in network.outputs.values()])


def _is_part_of(vertex: Vertex, source: Vertex) -> bool:
    return vertex.view or (vertex.weft_op.op == "add" and bool(vertex.weights) and source.weft_op.op == "linear")


def _merge_sums(leaves: list[PicturePart], outputs: Sequence[str]) -> list[PicturePart]:
    """Merge each sum into its only reader, if that is a sum of the same scope; return the remaining leaves."""
    readers: dict[str, list[PicturePart]] = {}
    for leaf in leaves:
        for name in dict.fromkeys(name for v in leaf.vertices for name in v.reads):
            readers.setdefault(name, []).append(leaf)
    merged = []
    for leaf in leaves:
        first = leaf.vertices[0]
        sum_readers = readers.get(first.makes[0], []) if first.makes else []  # broken files have ops without outputs
        is_single = len(sum_readers) == len(leaf.vertices) == 1
        if first.weft_op.op == "add" and is_single and first.makes[0] not in outputs:
            outer = sum_readers[0].vertices
            if outer[0].weft_op.op == "add" and outer[0].scope == first.scope:
                sum_readers[0].vertices = (*outer[:1], first, *outer[1:])
                merged.append(leaf)
    return [leaf for leaf in leaves if leaf not in merged]


def _group_leaves(leaves: Sequence[PicturePart], scope: str) -> list[PicturePart]:
    """Return the child parts of the group `scope`, which contains `leaves`, with equal layers folded into repeats."""
    groups = _break_cycles(_split_by_scope(leaves, scope))
    order = {leaf.path: i for i, leaf in enumerate(leaves)}
    children: list[PicturePart] = []
    for key, members in sorted(groups.items(), key=lambda item: order[item[1][0].path]):
        if key.startswith(" "):
            children += members
            continue
        inside, name = _group_leaves(sorted(members, key=lambda leaf: order[leaf.path]), key), key.rpartition(".")[2]
        if len(inside) == 1 and inside[0].vertices and not name.isdigit():
            inside[0].name = name if inside[0].name[:1].isupper() else inside[0].name  # not only an operator
            children += inside
        else:
            children.append(PicturePart(name, key, children=inside))
    return _fold_repeats(_inline_lists(children))


def _split_by_scope(leaves: Sequence[PicturePart], scope: str) -> dict[str, list[PicturePart]]:
    """Return `leaves` keyed by the child scope of `scope` that contains them, or by " " + path if none does."""
    stem = f"{scope}." if scope else ""
    groups: dict[str, list[PicturePart]] = {}
    for leaf in leaves:
        leaf_scope = leaf.vertices[0].scope
        inner = leaf_scope.removeprefix(stem).partition(".")[0] if leaf_scope.startswith(stem) else ""
        groups.setdefault(stem + inner if inner else f" {leaf.path}", []).append(leaf)
    return groups


def _break_cycles(leaves: dict[str, list[PicturePart]]) -> dict[str, list[PicturePart]]:
    """Regroup `leaves` (scope → parts) in place until no groups read each other in a cycle; return it. If a cycle has
    only one group, its other members, single operations, move into this group. Otherwise the smallest eighth of its
    groups (at least one) is split into child scopes."""
    # Every round moves operations into a group or dissolves one; single operations form no cycle, so it ends.
    while loops := _find_cycles(leaves):
        for loop in loops:
            groups = sorted((key for key in loop if key[0] != " "), key=lambda key: (len(leaves[key]), key))
            if len(groups) == 1:
                leaves[groups[0]] += [leaf for key in sorted(loop - {*groups}) for leaf in leaves.pop(key)]
                continue
            for key in groups[: max(1, len(groups) // 8)]:  # one by one, hundreds of groups would take quadratic time
                leaves |= _split_by_scope(leaves.pop(key), key)
    return leaves


def _find_cycles(groups: Mapping[str, Sequence[PicturePart]]) -> list[set[str]]:
    home = {name: key for key, members in groups.items() for leaf in members for name in leaf.results}
    between = nx.DiGraph()
    for key, members in groups.items():
        for leaf in members:
            for name in leaf.read:
                if (source := home.get(name, key)) != key:
                    between.add_edge(source, key)
    return [loop for loop in nx.strongly_connected_components(between) if len(loop) > 1]


def _inline_lists(children: list[PicturePart]) -> list[PicturePart]:
    parts: list[PicturePart] = []
    for child in children:
        numbered = child.children and all(c.name.isdigit() or c.count > 1 for c in child.children)
        parts += child.children if numbered and not child.name.isdigit() else [child]
    return parts


def _fold_repeats(parts: list[PicturePart]) -> list[PicturePart]:
    """Return `parts` with runs of equal numbered parts, and of equal sequences of them, folded to repeats."""
    folded: list[PicturePart] = []
    for numbered, run in itertools.groupby(parts, lambda p: p.name.isdigit() and bool(p.children)):
        members = list(run)
        folded += _fold_repetitions(members) if numbered else members
    return folded


def _find_repetitions(prints: Sequence[str]) -> list[tuple[int, int]]:
    """Return for each index (items covered, items per round) of the longest repetition that begins there, with the
    fewest items per round if several are equally long; (1, 1) if none begins there. The loop runs from the end for all
    periods at once, so it takes one array operation per index."""
    ids: dict[str, int] = {}
    codes = np.array([ids.setdefault(p, len(ids)) for p in prints], np.int64)
    spans, same = list[tuple[int, int]](), np.zeros(0, np.int64)  # by period: how many items in a row repeat after it
    for i in reversed(range(len(codes))):
        same = (np.concatenate([same, [0]]) + 1)[: len(codes) - 1 - i] * (codes[i + 1 :] == codes[i])
        periods = np.arange(1, len(same) + 1)
        lengths = np.where(same >= periods, same // periods * periods + periods, 1)
        best = int(lengths.argmax()) if lengths.size else 0
        spans.append((int(lengths[best]), best + 1) if lengths.size and lengths[best] > 1 else (1, 1))
    return spans[::-1]


def _fold_repetitions(parts: list[PicturePart]) -> list[PicturePart]:
    """Return `parts` with repetitions folded, greedily: at each index the repetition that covers the most parts."""
    spans = _find_repetitions([hash_structure(p) for p in parts])
    folded: list[PicturePart] = []
    i = 0
    while i < len(parts):
        length, period = spans[i]
        if length == 1:
            folded.append(parts[i])
        else:
            rounds = [parts[j : j + period] for j in range(i, i + length, period)]
            body = _fold_repetitions(rounds[0]) if period > 1 else rounds[0]
            others = [_fold_repetitions(r) if period > 1 else r for r in rounds[1:]]
            _mark_shared(rounds)
            name, path = (f"{start}-{rounds[-1][-1].name}" for start in (rounds[0][0].name, rounds[0][0].path))
            folded.append(PicturePart(name, path, (), body, len(rounds), others))
        i += length
    return folded


def _mark_shared(rounds: Sequence[Sequence[PicturePart]]) -> None:
    """Add the values that both the first and the second of `rounds` read to `shared` of every part in all rounds."""
    first, second = ({name for part in body for name in part.read} for body in rounds[:2])
    pending = [part for body in rounds for part in body]
    for part in pending:
        part.shared |= first & second
        pending += itertools.chain(part.children, *part.later_rounds)


def hash_structure(part: PicturePart) -> str:
    """Return a hash that is equal for parts with equal operations, inner scopes, attributes, types, marks, and shapes
    and dtypes of weights, and for leaves equal names. Other names, sizes and recipes do not count."""
    order: dict[str, int] = {}
    text = [part.name if part.vertices else ""]
    for v in part.all_vertices():
        attrs, types = ((name, _hide_sizes(text)) for name, text in v.attrs.items()), map(_hide_sizes, v.types)
        local = v.scope.removeprefix(part.path), v.op, tuple(attrs), tuple(types), v.roles
        # Values by order of first appearance instead of by name.
        reads = [order.setdefault(name, len(order)) for name in v.reads]
        text.append(f"{local} {reads} {[(w.shape, w.dtype) for w in v.weights]} {v.mark and v.mark.alike}")
        order |= {name: len(order) + i for i, name in enumerate(v.makes)}
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _hide_sizes(text: str) -> str:
    """Return `text` (a type or list) with named sizes replaced by "?": files may name them in some layers only."""
    start = text.find("[")
    return text if start < 0 else text[:start] + SIZE.sub("?", text[start:])
