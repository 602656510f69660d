"""Choice of the values drawn as lines between the parts of a scope, and of those written as notes on a part.

An input of the model gets a line to its first reader and notes on its other readers. The stream of a scope is the path
with the largest total of weight bytes and operations. If lines next to the stream tangle, a part that does not depend
on the stream (such as a position bias) gets a line only to one reader, and results that are not at the end of the
stream may leave the scope without a line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from ..model.outline import PicturePart

START, END = -1, -2

Link = tuple[int, int]


@dataclass
class Wiring:
    """The lines of a scope, and its values without a line. START and END are the edges of the scope.

    `links`: (number of the producer, number of the reader) → values on the line between these parts.
    `notes`: part number → values that the part reads without a line.
    `unwired_results`: part number → values that leave the scope without a line.
    `side`: value that enters the scope → numbers of its readers; without the value at the top and inputs of the model.
    """

    links: dict[Link, list[str]] = field(default_factory=dict)
    notes: dict[int, list[str]] = field(default_factory=dict)
    unwired_results: dict[int, list[str]] = field(default_factory=dict)
    side: dict[str, list[int]] = field(default_factory=dict)


def wire_parts(
    parts: Sequence[PicturePart], entering: Iterable[str], leaving: Iterable[str], within: Collection[int] | None = None
) -> Wiring:
    """Return the wiring of `parts` in a scope that reads the values `entering` and produces the values `leaving`.

    The first of `entering` that any part reads enters at the top; the others become notes. With `within`, the parts
    with these indices lose their lines out of the scope, and parts independent of the stream keep one line.
    """
    wiring = Wiring()
    makes = {name: i for i, part in enumerate(parts) for name in part.results}
    outside: dict[str, list[int]] = {name: [] for name in entering}
    for i, part in enumerate(parts):
        for name in part.read:
            if name in makes:
                wiring.links.setdefault((makes[name], i), []).append(name)
            elif name in outside:
                outside[name].append(i)
    main = next((name for name in outside if outside[name]), None)
    asked = {name for part in parts for name in part.model_inputs}
    for name, readers in outside.items():
        drawn = [i for i in readers if not _reads_shape(parts[i])] or readers if name == main else []
        wiring.links |= {(START, i): [name] for i in drawn}
        for i in (i for i in readers if i not in drawn):
            wiring.notes.setdefault(i, []).append(name)
        if readers and name != main and name not in asked:
            wiring.side[name] = readers
    for name in leaving:
        if name in makes:
            wiring.links.setdefault((makes[name], END), []).append(name)
    for i in within or ():
        wiring.unwired_results[i] = wiring.links.pop((i, END))
    _drop_lines(parts, wiring, range(len(parts)) if within is None else _find_stream(parts, wiring.links))
    return wiring


def find_exits(parts: Sequence[PicturePart], wiring: Wiring) -> list[int]:
    """Return the numbers of the parts with a line out of the scope, except the last part of the stream."""
    end = _find_stream(parts, wiring.links)[-1:]
    return [a for a, b in wiring.links if b == END and a not in end]


def link_parts(parts: Sequence[PicturePart], links: Iterable[Link]) -> nx.DiGraph:
    """Return a graph whose nodes are the numbers of `parts` and whose edges are `links`."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(len(parts)))
    graph.add_edges_from(links)
    return graph


def _find_stream(parts: Sequence[PicturePart], links: Iterable[Link]) -> list[int]:
    """Return the numbers of the parts on the path with the largest total weight (if any line leads to END, to END)."""
    graph = link_parts(parts, links)
    best: dict[int, tuple[int, int | None]] = {}
    # The heaviest path of an acyclic graph takes one pass in topological order.
    for n in nx.topological_sort(graph):
        heaviest = max(graph.predecessors(n), key=lambda p: best[p][0], default=None)
        weight = parts[n].weight if n >= 0 else 0
        best[n] = weight + (best[heaviest][0] if heaviest is not None else 0), heaviest
    at: int | None = END if END in best else max(best, key=lambda n: best[n][0], default=None)
    path = []
    while at is not None:
        path.append(at)
        at = best[at][1]
    return [n for n in reversed(path) if n >= 0]


def _drop_lines(parts: Sequence[PicturePart], wiring: Wiring, stream: Sequence[int]) -> None:
    """Keep one line from each model input and from each part independent of `stream`: to the first reader that uses
    more than the shape, else to the first reader. Lines to END also stay; the others become notes of `wiring`."""
    graph = link_parts(parts, wiring.links)
    for i, part in enumerate(parts):
        readers = sorted(b for a, b in wiring.links if a == i)
        entered = part.vertices[:1] and part.vertices[0].op == "input"
        if len(readers) < 2 or not (entered or _is_independent(graph, i, stream)):
            continue
        first = next((b for b in readers if b >= 0 and not _reads_shape(parts[b])), readers[0])
        for b in readers:
            if b != first and b != END:
                wiring.notes.setdefault(b, []).extend(wiring.links.pop((i, b)))


def _reads_shape(part: PicturePart) -> bool:
    """Return whether the first operation of a part is `iota`, which uses only the shape of its input."""
    return bool(part.vertices) and part.vertices[0].op == "iota"


def _is_independent(graph: nx.DiGraph, i: int, stream: Sequence[int]) -> bool:
    """Return whether part `i` is not in `stream` and depends neither on a part of `stream` nor on a line from START."""
    above = nx.ancestors(graph, i) | {i}
    return START not in above and not above & {*stream}
