"""Choose the values drawn as lines between the parts of a scope, and those written as notes beside a part.

An input of the model that many read has a line to the first of its readers, for others it is a note. The heaviest path,
by the bytes of weights and the operations on it, is the stream of the scope. Where lines beside it would make a tangle,
a table that comes from none of it (a position bias, say) has a line to its first reader only, and of the values that
leave the scope only the one at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from ..model.outline import Part

START, END = -1, -2

Link = tuple[int, int]


@dataclass
class Wiring:
    """Lines by the numbers of the parts that they join, with their values; START and END are the edges of the scope.

    `notes` are values that parts read without a line, `gives` those that leave the scope without one, `side` the values
    that come into the scope beside the main one and are made by operations, with their readers.
    """

    links: dict[Link, list[str]] = field(default_factory=dict)
    notes: dict[int, list[str]] = field(default_factory=dict)
    gives: dict[int, list[str]] = field(default_factory=dict)
    side: dict[str, list[int]] = field(default_factory=dict)


def wired(
    parts: Sequence[Part], entering: Iterable[str], leaving: Iterable[str], within: Collection[int] | None = None
) -> Wiring:
    """Connect `parts` in a scope that reads the values `entering` and makes the values `leaving`.

    The first of the values entering that are read comes in at the top. `within`: parts without a line out of the scope;
    then tables beside the stream have one line too.
    """
    wiring = Wiring()
    makes = {name: i for i, part in enumerate(parts) for name in part.made}
    outside: dict[str, list[int]] = {name: [] for name in entering}
    for i, part in enumerate(parts):
        for name in part.read:
            if name in makes:
                wiring.links.setdefault((makes[name], i), []).append(name)
            elif name in outside:
                outside[name].append(i)
    main = next((name for name in outside if outside[name]), None)
    asked = {name for part in parts for name in part.asks}
    for name, readers in outside.items():
        drawn = [i for i in readers if not _counts(parts[i])] or readers if name == main else []
        wiring.links |= {(START, i): [name] for i in drawn}
        for i in (i for i in readers if i not in drawn):
            wiring.notes.setdefault(i, []).append(name)
        if readers and name != main and name not in asked:
            wiring.side[name] = readers
    for name in leaving:
        if name in makes:
            wiring.links.setdefault((makes[name], END), []).append(name)
    for i in within or ():
        wiring.gives[i] = wiring.links.pop((i, END))
    _spare(parts, wiring, range(len(parts)) if within is None else _stream(parts, wiring.links))
    return wiring


def aside(parts: Sequence[Part], wiring: Wiring) -> list[int]:
    """The parts with a line out of the scope, but for the end of the stream."""
    end = _stream(parts, wiring.links)[-1:]
    return [a for a, b in wiring.links if b == END and a not in end]


def linked(parts: Sequence[Part], links: Iterable[Link]) -> nx.DiGraph:
    """The numbers of all `parts` as a graph whose edges are `links`."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(len(parts)))
    graph.add_edges_from(links)
    return graph


def _stream(parts: Sequence[Part], links: Iterable[Link]) -> list[int]:
    """The heaviest path, START and END left out."""
    graph = linked(parts, links)
    best: dict[int, tuple[int, int | None]] = {}
    # The heaviest path of an acyclic graph takes one pass in topological order.
    for n in nx.topological_sort(graph):
        over = max(graph.predecessors(n), key=lambda p: best[p][0], default=None)
        own = parts[n].weight if n >= 0 else 0
        best[n] = own + (best[over][0] if over is not None else 0), over
    at: int | None = END if END in best else max(best, key=lambda n: best[n][0], default=None)
    parts_aside = []
    while at is not None:
        parts_aside.append(at)
        at = best[at][1]
    return [n for n in reversed(parts_aside) if n >= 0]


def _spare(parts: Sequence[Part], wiring: Wiring, stream: Sequence[int]) -> None:
    """Let inputs, and parts that come from none of the stream, have one line: to their first reader.

    Of an input, to the first that reads more than its shape.
    """
    graph = linked(parts, wiring.links)
    for i, part in enumerate(parts):
        readers = sorted(b for a, b in wiring.links if a == i)
        entered = part.vertices[:1] and part.vertices[0].op == "input"
        if len(readers) < 2 or not (entered or _apart(graph, i, stream)):
            continue
        first = next((b for b in readers if b >= 0 and not _counts(parts[b])), readers[0])
        for b in readers:
            if b != first and b != END:
                wiring.notes.setdefault(b, []).extend(wiring.links.pop((i, b)))


def _counts(part: Part) -> bool:
    """Return whether a part uses only the shape of its inputs."""
    return bool(part.vertices) and part.vertices[0].op == "iota"


def _apart(graph: nx.DiGraph, i: int, stream: Sequence[int]) -> bool:
    """Return whether part `i` depends neither on the stream nor on its input."""
    above = nx.ancestors(graph, i) | {i}
    return START not in above and not above & {*stream}
