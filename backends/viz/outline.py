"""The operations of a network as a tree of scopes, equal parts in a row folded into repeats."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx

from .network import Network, Vertex


@dataclass
class Part:
    """A part of the picture. `name` is what its scope calls it, `path` the name that no other part has.

    A leaf has `vertices`: an operation, and the views of what it makes. A group has `children`. A repeat is a group
    whose children come `count` times, one time after the other or side by side (`parallel`); `others` are the children
    of the second time onward.
    """

    name: str
    path: str
    vertices: tuple[Vertex, ...] = ()
    children: list[Part] = field(default_factory=list)
    count: int = 1
    others: list[list[Part]] = field(default_factory=list)

    @property
    def parallel(self) -> bool:
        """Whether no time reads what the time before it made."""
        made = {name for part in self.children for v in part.all_vertices() for name in v.makes}
        return not any(name in made for part in (self.others or [[]])[0] for name in reads(part))

    def all_vertices(self) -> Iterator[Vertex]:
        """Every operation of the part, those of all repetitions among them."""
        yield from self.vertices
        for part in itertools.chain(self.children, *self.others):
            yield from part.all_vertices()

    def parts(self) -> Iterator[Part]:
        """The part and all that are drawn within it, of repeats the first time only."""
        yield self
        for child in self.children:
            yield from child.parts()


def outline(network: Network) -> Part:
    """The tree of `network`, its inputs and outputs as leaves of the root."""
    leaves = [
        Part(name, name, (Vertex(name, "input", "", (), (name,), (), (t,)),)) for name, t in network.inputs.items()
    ]
    leaves += _leaves(network)
    for name, (value, kind) in network.outputs.items():
        leaves.append(Part(name, f"out.{name}", (Vertex(f"out.{name}", "output", "", (value,), (), (), (kind,)),)))
    return Part(network.name, "", children=_grouped(leaves, ""))


def _leaves(network: Network) -> list[Part]:
    """A leaf for every operation, but for views, which belong to what they view where that is in their scope."""
    made: dict[str, Part] = {}
    leaves = []
    for vertex in network.vertices:
        source = made.get(vertex.reads[0]) if vertex.view and len(vertex.reads) == 1 else None
        if source is not None and source.vertices[0].scope == vertex.scope:
            source.vertices += (vertex,)
        else:
            source = Part(vertex.name.removeprefix(f"{vertex.scope}."), vertex.name, (vertex,))
            leaves.append(source)
        made |= dict.fromkeys(vertex.makes, source)
    return _summed(leaves, [value for value, _ in network.outputs.values()])


def _summed(leaves: list[Part], outputs: Sequence[str]) -> list[Part]:
    """`leaves`, a sum that only another sum of its scope reads as one with that."""
    readers: dict[str, list[Part]] = {}
    for leaf in leaves:
        for name in reads(leaf):
            readers.setdefault(name, []).append(leaf)
    gone = []
    for leaf in leaves:
        first = leaf.vertices[0]
        into = readers.get(first.makes[0], [])
        if first.op == "add" and len(into) == 1 and len(leaf.vertices) == 1 and first.makes[0] not in outputs:
            outer = into[0].vertices
            if outer[0].op == "add" and outer[0].scope == first.scope:
                into[0].vertices = (*outer[:1], first, *outer[1:])
                gone.append(leaf)
    return [leaf for leaf in leaves if leaf not in gone]


def _grouped(leaves: Sequence[Part], scope: str) -> list[Part]:
    """The children of the group of `scope` that holds `leaves`."""
    depth = scope.count(".") + 1 if scope else 0
    found: dict[str, list[Part]] = {}
    for leaf in leaves:
        inner = leaf.vertices[0].scope.split(".")[: depth + 1] if leaf.vertices[0].scope else []
        key = ".".join(inner) if len(inner) > depth else f" {leaf.path}"
        found.setdefault(key, []).append(leaf)
    groups = {key: held for key, held in found.items() if not key.startswith(" ")}
    for key in _tangled(found):
        groups.pop(key, None)  # what is computed before and after others is no box of its own
    children: list[Part] = []
    for key, held in found.items():
        if key not in groups:
            children += held
            continue
        inside = _grouped(held, key)
        alone = len(inside) == 1 and inside[0].vertices
        children += inside if alone else [Part(key.rpartition(".")[2], key, children=inside)]
    return _folded(_opened(children))


def _tangled(found: dict[str, list[Part]]) -> set[str]:
    """The keys whose parts read each other in a circle."""
    home = {name: key for key, held in found.items() for leaf in held for v in leaf.vertices for name in v.makes}
    between = nx.DiGraph()
    for key, held in found.items():
        for leaf in held:
            for name in reads(leaf):
                if (source := home.get(name, key)) != key:
                    between.add_edge(source, key)
    return {key for loop in nx.strongly_connected_components(between) if len(loop) > 1 for key in loop}


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
        held = list(run)
        folded += _compressed(held) if numbered else held
    return folded


def _compressed(parts: list[Part]) -> list[Part]:
    """The shortest way to say a sequence: at every place the period that covers most of what follows."""
    prints = [fingerprint(p) for p in parts]
    made: list[Part] = []
    i = 0
    while i < len(parts):
        length, period = 1, 1
        for p in range(1, (len(parts) - i) // 2 + 1):
            end = i + p
            while end + p <= len(parts) and prints[end : end + p] == prints[i : i + p]:
                end += p
            if end - i > max(p, length):
                length, period = end - i, p
        if length == 1:
            made.append(parts[i])
        else:
            rounds = [parts[j : j + period] for j in range(i, i + length, period)]
            body = _compressed(rounds[0]) if period > 1 else rounds[0]
            others = [_compressed(r) if period > 1 else r for r in rounds[1:]]
            path = f"{rounds[0][0].path}-{rounds[-1][-1].name}"
            made.append(Part(f"{rounds[0][0].name}-{rounds[-1][-1].name}", path, (), body, len(rounds), others))
        i += length
    return made


def fingerprint(part: Part) -> str:
    """Equal for parts that differ in the names of scopes and weights only."""
    order: dict[str, int] = {}
    text = [part.name if part.vertices else ""]
    for v in part.all_vertices():
        local = v.scope.removeprefix(part.path), v.op, tuple(v.attrs.items()), v.types, v.roles
        reads = [order.setdefault(name, len(order)) for name in v.reads]
        text.append(f"{local} {reads} {[(w.shape, w.dtype) for w in v.weights]}")
        order |= {name: len(order) + i for i, name in enumerate(v.makes)}
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def reads(part: Part) -> list[str]:
    """The values that a part reads and does not make, in order."""
    made = {name for v in part.all_vertices() for name in v.makes}
    return list(dict.fromkeys(name for v in part.all_vertices() for name in v.reads if name not in made))
