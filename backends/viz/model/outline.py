"""The operations of a network as a tree of scopes, equal parts in a row folded into repeats."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
import numpy as np

from .network import Network, Vertex

NUMBERED = re.compile(r"[._]\d+([._]|$)")
SIZE = re.compile(r"[A-Za-z_][^,\[\]]*")


@dataclass
class Part:
    """A part of the picture. `name` is what its scope calls it, `path` the name that no other part has.

    A leaf has `vertices`: an operation, and the views of what it makes. A group has `children`. A repeat is a group
    whose children come `count` times, one time after the other or side by side (`parallel`); `others` are the children
    of the second time onward. `reach` is "local" or "global" where some layers of the model have a window and some not.
    `shared` are values that every time of a repeat around the part reads.
    """

    name: str
    path: str
    vertices: tuple[Vertex, ...] = ()
    children: list[Part] = field(default_factory=list)
    count: int = 1
    others: list[list[Part]] = field(default_factory=list)
    reach: str = ""
    shared: frozenset[str] = frozenset()

    @property
    def parallel(self) -> bool:
        """Return whether no repetition reads results of the one before."""
        values = {name for part in self.children for name in part.made}
        return not any(name in values for part in (self.others or [[]])[0] for name in part.read)

    @property
    def body(self) -> Part:
        """The part whose children are drawn: of a repeat of single layers, the first layer."""
        return self.children[0] if self.count > 1 and len(self.children) == 1 and self.children[0].children else self

    @property
    def times(self) -> str:
        """The number of times that the part is computed, to write behind its title: " × 12"; "" if once."""
        return f" × {self.count}" if self.count > 1 else ""

    def all_vertices(self) -> Iterator[Vertex]:
        """Every operation of the part, those of all repetitions among them."""
        yield from self.vertices
        for part in itertools.chain(self.children, *self.others):
            yield from part.all_vertices()

    # A part whose values were asked for is not to change any more.

    @cached_property
    def made(self) -> dict[str, None]:
        """The values that operations of the part make, in order."""
        return dict.fromkeys(name for v in self.all_vertices() for name in v.makes)

    @cached_property
    def read(self) -> dict[str, None]:
        """The values that the part reads and does not make, in order."""
        return dict.fromkeys(name for v in self.all_vertices() for name in v.reads if name not in self.made)

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """The inputs of the model that belong to layers in the part, or to its own."""
        return tuple(name for v in self.all_vertices() for name in v.takes)

    @cached_property
    def asks(self) -> frozenset[str]:
        """The inputs of the model that are read in the part."""
        return frozenset(name for v in self.all_vertices() for name in v.asks)

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """The outputs of the model that belong to layers in the part, or to its own."""
        return tuple(name for v in self.all_vertices() for name in v.gives)

    @cached_property
    def weight(self) -> int:
        """Weight of the part in the model: its parameter bytes, and one per operation."""
        return sum(1 + sum(w.bytes for w in v.weights) for v in self.all_vertices())

    @cached_property
    def layered(self) -> bool:
        """Return whether the part is a layer or contains layers."""
        return self.count > 1 or (self.name.isdigit() and bool(self.children)) or any(p.layered for p in self.children)

    def parts(self) -> Iterator[Part]:
        """The part and all that are drawn within it, of repeats the first time only."""
        yield self
        for child in self.children:
            yield from child.parts()


def outline(network: Network) -> Part:
    """The tree of `network`, its inputs and outputs as leaves of the root, but for those of single layers."""
    own, outputs = carried(network)
    leaves = [
        Part(name, name, (_end(network, name, "input", (), (name,), t),))
        for name, t in network.inputs.items()
        if name not in own
    ]
    leaves += _leaves(network, own, outputs)
    for name, (value, kind) in network.outputs.items():
        if name not in outputs.get(value, ()):
            leaves.append(Part(name, f"out.{name}", (_end(network, f"out.{name}", "output", (value,), (), kind),)))
    root = Part(network.name, "", children=_grouped(leaves, ""))
    if {"local", "global"} <= {_reach(v) for v in root.all_vertices()}:
        _tell_reach(root)
    return root


def _reach(v: Vertex) -> str:
    """Describe an attention's span, a window or the whole text; empty for other operations."""
    return "" if not v.meant.attends else "local" if v.meant.attrs.get("window") else "global"


def _tell_reach(part: Part) -> None:
    """Say of every layer in `part`, and of every repeat of layers alike, which reach it has."""
    for child in itertools.chain(part.children, *part.others):
        _tell_reach(child)
    if part.layered:
        spans = {_reach(v) for v in part.all_vertices()} - {""}
        inner = {child.reach for child in part.children if child.layered}
        if len(inner) < 2:
            part.reach = next(iter(inner), "local" if "local" in spans else "global" if spans else "")


def _end(network: Network, name: str, op: str, reads: tuple[str, ...], makes: tuple[str, ...], kind: str) -> Vertex:
    """An input or output as an operation."""
    return Vertex(name, op, "", reads, makes, (), (kind,), mark=network.marks.get(name))


def carried(network: Network) -> tuple[dict[str, None], dict[str, list[str]]]:
    """Find per-layer inputs and outputs, such as caches and states, whose names contain layer numbers."""
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


def _leaves(network: Network, own: Mapping[str, None], outputs: Mapping[str, Sequence[str]]) -> list[Part]:
    """A leaf for every operation, but for views, which belong to what they view where that is in their scope."""
    makers: dict[str, Part] = {}
    leaves = []
    for vertex in network.vertices:
        takes = tuple(name for name in vertex.reads if name in own)
        asks = tuple(name for name in vertex.reads if name in network.inputs)
        gives = tuple(name for value in vertex.makes for name in outputs.get(value, ()))
        vertex = replace(vertex, asks=asks, takes=takes, gives=gives) if asks or gives else vertex
        source = makers.get(vertex.reads[0]) if len(vertex.reads) == 1 else None
        if source is not None and source.vertices[0].scope == vertex.scope and _belongs(vertex, source.vertices[0]):
            source.vertices += (vertex,)
        else:
            source = Part(vertex.name.removeprefix(f"{vertex.scope}."), vertex.name, (vertex,))
            leaves.append(source)
        makers |= dict.fromkeys(vertex.makes, source)
    return _summed(leaves, [value for value, _ in network.outputs.values()])


def _belongs(vertex: Vertex, source: Vertex) -> bool:
    """Return whether an operation is drawn with its source: a view, or the bias after a linear."""
    return vertex.view or (vertex.meant.op == "add" and bool(vertex.weights) and source.meant.op == "linear")


def _summed(leaves: list[Part], outputs: Sequence[str]) -> list[Part]:
    """`leaves`, a sum that only another sum of its scope reads as one with that."""
    readers: dict[str, list[Part]] = {}
    for leaf in leaves:
        for name in dict.fromkeys(name for v in leaf.vertices for name in v.reads):
            readers.setdefault(name, []).append(leaf)
    gone = []
    for leaf in leaves:
        first = leaf.vertices[0]
        into = readers.get(first.makes[0], []) if first.makes else []  # broken files have ops without outputs
        if first.meant.op == "add" and len(into) == 1 and len(leaf.vertices) == 1 and first.makes[0] not in outputs:
            outer = into[0].vertices
            if outer[0].meant.op == "add" and outer[0].scope == first.scope:
                into[0].vertices = (*outer[:1], first, *outer[1:])
                gone.append(leaf)
    return [leaf for leaf in leaves if leaf not in gone]


def _grouped(leaves: Sequence[Part], scope: str) -> list[Part]:
    """The children of the group of `scope` that holds `leaves`."""
    groups = _untangled(_keyed(leaves, scope))
    place = {leaf.path: i for i, leaf in enumerate(leaves)}
    children: list[Part] = []
    for key, members in sorted(groups.items(), key=lambda item: place[item[1][0].path]):
        if key.startswith(" "):
            children += members
            continue
        inside, name = _grouped(sorted(members, key=lambda leaf: place[leaf.path]), key), key.rpartition(".")[2]
        alone = len(inside) == 1 and inside[0].vertices and not name.isdigit()
        children += [_called(inside[0], name)] if alone else [Part(name, key, children=inside)]
    return _folded(_opened(children))


def _keyed(leaves: Sequence[Part], scope: str) -> dict[str, list[Part]]:
    """`leaves` by the scopes in `scope` that they are in; one that is in none, by a blank and its path."""
    stem = f"{scope}." if scope else ""
    groups: dict[str, list[Part]] = {}
    for leaf in leaves:
        own = leaf.vertices[0].scope
        inner = own.removeprefix(stem).partition(".")[0] if own.startswith(stem) else ""
        groups.setdefault(stem + inner if inner else f" {leaf.path}", []).append(leaf)
    return groups


def _untangled(leaves: dict[str, list[Part]]) -> dict[str, list[Part]]:
    """`leaves`, so that no parts read each other in a circle.

    Operations that a group reads and that read the group are drawn in it, wherever they belong. Of groups that read
    each other, the smallest is no box of its own.
    """
    # Every round draws operations into a group or takes a group apart; operations alone make no circle, so it ends.
    while loops := _loops(leaves):
        for loop in loops:
            groups = sorted((key for key in loop if key[0] != " "), key=lambda key: (len(leaves[key]), key))
            if len(groups) == 1:
                leaves[groups[0]] += [leaf for key in sorted(loop - {*groups}) for leaf in leaves.pop(key)]
                continue
            for key in groups[: max(1, len(groups) // 8)]:  # of hundreds one by one, the time would grow by the square
                leaves |= _keyed(leaves.pop(key), key)
    return leaves


def _called(leaf: Part, scope: str) -> Part:
    """`leaf`, alone in its scope: it has the name of that where its own tells no more than its operator."""
    leaf.name = scope if leaf.name[:1].isupper() else leaf.name
    return leaf


def _loops(groups: Mapping[str, Sequence[Part]]) -> list[set[str]]:
    """Sets of keys whose parts read each other in a circle."""
    home = {name: key for key, members in groups.items() for leaf in members for name in leaf.made}
    between = nx.DiGraph()
    for key, members in groups.items():
        for leaf in members:
            for name in leaf.read:
                if (source := home.get(name, key)) != key:
                    between.add_edge(source, key)
    return [loop for loop in nx.strongly_connected_components(between) if len(loop) > 1]


def _opened(children: list[Part]) -> list[Part]:
    """`children`, the numbered ones of a list of layers in the place of the list."""
    opened: list[Part] = []
    for child in children:
        numbered = child.children and all(c.name.isdigit() or c.count > 1 for c in child.children)
        opened += child.children if numbered and not child.name.isdigit() else [child]
    return opened


def _folded(parts: list[Part]) -> list[Part]:
    """`parts`, numbered ones that are equal in a row, or come in an equal sequence, as repeats."""
    folded: list[Part] = []
    for numbered, run in itertools.groupby(parts, lambda p: p.name.isdigit() and bool(p.children)):
        members = list(run)
        folded += _compressed(members) if numbered else members
    return folded


def _repeats(prints: Sequence[str]) -> list[tuple[int, int]]:
    """The longest repetition that begins at each place, and its shortest period; (1, 1) where there is none.

    From the end on, in all periods at once: an operation of arrays for each place.
    """
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(p, len(numbers)) for p in prints], np.int64)
    spans, same = list[tuple[int, int]](), np.zeros(0, np.int64)  # places that equal those a period later, in a row
    for i in reversed(range(len(codes))):
        same = (np.concatenate([same, [0]]) + 1)[: len(codes) - 1 - i] * (codes[i + 1 :] == codes[i])
        periods = np.arange(1, len(same) + 1)
        lengths = np.where(same >= periods, same // periods * periods + periods, 1)
        best = int(lengths.argmax()) if lengths.size else 0
        spans.append((int(lengths[best]), best + 1) if lengths.size and lengths[best] > 1 else (1, 1))
    return spans[::-1]


def _compressed(parts: list[Part]) -> list[Part]:
    """The shortest way to say a sequence: at every place the period that covers most of what follows."""
    spans = _repeats([fingerprint(p) for p in parts])
    folded: list[Part] = []
    i = 0
    while i < len(parts):
        length, period = spans[i]
        if length == 1:
            folded.append(parts[i])
        else:
            rounds = [parts[j : j + period] for j in range(i, i + length, period)]
            body = _compressed(rounds[0]) if period > 1 else rounds[0]
            others = [_compressed(r) if period > 1 else r for r in rounds[1:]]
            _share(rounds)
            path = f"{rounds[0][0].path}-{rounds[-1][-1].name}"
            folded.append(Part(f"{rounds[0][0].name}-{rounds[-1][-1].name}", path, (), body, len(rounds), others))
        i += length
    return folded


def _share(rounds: Sequence[Sequence[Part]]) -> None:
    """Tell the parts of every time of a repeat which values all times read."""
    first, second = ({name for part in body for name in part.read} for body in rounds[:2])
    waiting = [part for body in rounds for part in body]
    for part in waiting:
        part.shared |= first & second
        waiting += itertools.chain(part.children, *part.others)


def fingerprint(part: Part) -> str:
    """Equal for parts that differ in the names of scopes and weights only."""
    order: dict[str, int] = {}
    text = [part.name if part.vertices else ""]
    for v in part.all_vertices():
        attrs, types = ((name, _sized(text)) for name, text in v.attrs.items()), map(_sized, v.types)
        local = v.scope.removeprefix(part.path), v.op, tuple(attrs), tuple(types), v.roles
        # Values by the order in which they first come, whatever they are called.
        reads = [order.setdefault(name, len(order)) for name in v.reads]
        text.append(f"{local} {reads} {[(w.shape, w.dtype) for w in v.weights]} {v.mark and v.mark.alike}")
        order |= {name: len(order) + i for i, name in enumerate(v.makes)}
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _sized(text: str) -> str:
    """A type, or an attribute that is a list, without the names of sizes: files may tell them in one layer only."""
    start = text.find("[")
    return text if start < 0 else text[:start] + SIZE.sub("?", text[start:])
