"""Arrangement of the parts of a scope as boxes in columns and rows.

The parts that lie on every path from the first to the last part (the dominators of the last part) form a column. In a
Transformer that is the residual stream. The parts between two neighbours in a column are split into branches that do
not read each other; each branch is a column again. A value that bypasses the branches stays on the vertical line of the
column. A branch that cannot be split is arranged in rows by distance from the first part (Sugiyama 1981).

Sizes of parts are unknown here: `coordinates` computes them, again whenever a part is opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from ..model.outline import PicturePart

START, END = -1, -2
RAILS = 2  # maximum number of values that come along the right side of a scope
LONGEST = 12  # rows that a line may pass; a longer one is replaced by its name at the reader

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


@dataclass(frozen=True)
class Item:
    """A box with a single part, at `index` in `Arrangement.parts`."""

    index: int


@dataclass(frozen=True)
class LineGap:
    """A gap in a row, through which the line from part `source` to part `target` passes."""

    source: int
    target: int


@dataclass(frozen=True)
class Column:
    """Boxes stacked from top to bottom, aligned at their axes (the lines on which values enter and leave)."""

    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Branches:
    """Columns from left to right; with `bypass` the line of the enclosing column continues to the left of them."""

    boxes: tuple[Column, ...]
    bypass: bool


@dataclass(frozen=True)
class PartRows:
    """Rows of parts from top to bottom; the readers of a part are in lower rows. There is room for `lanes[i]`
    horizontal lines above row i, and for `lanes[-1]` below the last row."""

    rows: tuple[tuple[Item | LineGap, ...], ...]
    lanes: tuple[int, ...]


Box = Item | LineGap | Column | Branches | PartRows


@dataclass(frozen=True)
class Line:
    """A line from part `source` to part `target` that carries `values`. START and END are the edges of the scope.

    `bend` names the place where the line runs horizontally; `region` is the path of a box (indices into nested boxes):
    "": nowhere, because both parts are in the same column.
    "fork": above the box at `region`, which contains the target.
    "merge": below the box at `region`, which contains the source.
    "rows": above rows of the `PartRows` at `region`; `lanes` lists these rows, with the lane above each.
    "rail": along the right side of the scope in lane `region[0]`, from START into the right side of the target.
    """

    source: int
    target: int
    values: tuple[str, ...]
    bend: str = ""
    region: tuple[int, ...] = ()
    lanes: tuple[tuple[int, int], ...] = ()  # (row that it crosses above, lane)


@dataclass
class Arrangement:
    """The numbered parts of a scope, their boxes, and the lines between them.

    `notes`: part number → values that the part reads without a line; for a part without layers, also those on rails.
    `unwired_results`: part number → results of the part that leave the scope without a line.
    `rails`: the number of values on lines along the right side.
    """

    parts: list[PicturePart]
    box: Column
    lines: list[Line]
    notes: dict[int, list[str]] = field(default_factory=dict)
    unwired_results: dict[int, list[str]] = field(default_factory=dict)
    rails: int = 0


def arrange(parts: Sequence[PicturePart], entering: Iterable[str], leaving: Iterable[str]) -> Arrangement:
    """Return an arrangement of `parts` in a scope that reads the values `entering` and produces the values `leaving`.

    The first of `entering` that any part reads gets a line from the top. Of the others, at most RAILS that are computed
    (not inputs of the model) and read on the right get lines along that side; the rest become notes on their readers.
    """
    parts, entering, leaving = list(parts), list(entering), list(leaving)
    wiring = wire_parts(parts, entering, leaving)
    best = _arrange_wired(parts, wiring)
    # Only if lines tangle, because every attempt arranges the entire scope again.
    if _count_cells(best.box):
        ends = find_exits(parts, wiring)
        for within in ([], *([i] for i in ends if len(ends) > 1), ends):
            fewer = _arrange_wired(parts, wire_parts(parts, entering, leaving, within))
            best = min(best, fewer, key=lambda arrangement: _count_cells(arrangement.box))
    return best


def _count_cells(box: Box) -> int:
    """Return the number of cells in all `PartRows` within `box`, a measure of how much lines tangle."""
    if isinstance(box, PartRows):
        return sum(map(len, box.rows))
    return sum(map(_count_cells, box.boxes)) if isinstance(box, (Column, Branches)) else 0


def _arrange_wired(parts: list[PicturePart], wiring: Wiring) -> Arrangement:
    """Return the arrangement of `parts` with the lines of `wiring`. Lines that would pass LONGEST or more rows move to
    the notes of `wiring`, or to its `unwired_results` if they leave the scope."""
    links, notes = wiring.links, wiring.notes
    arranger = _Arranger(link_parts(parts, links))
    box = arranger.arrange_column(frozenset(range(len(parts))))
    paths = dict(_list_paths(box, ()))
    lines = []
    for (a, b), values in links.items():
        if (a, b) not in arranger.cut:
            lines.append(_route_line(a, b, tuple(values), paths, arranger.lanes))
        elif b == END:
            wiring.unwired_results.setdefault(a, []).extend(values)
        else:
            notes.setdefault(b, []).extend(values)
    rails = [
        name
        for name, readers in wiring.side.items()
        if all(len(parts[i].read) > 1 and _is_rightmost(box, paths[i]) for i in readers)
    ][:RAILS]
    rails.sort(key=lambda name: min(paths[i] for i in wiring.side[name]), reverse=True)  # the lowest outermost
    for k, name in enumerate(rails):
        for i in wiring.side[name]:
            lines.append(Line(START, i, (name,), "rail", (k,)))
            if parts[i].has_layers:  # other parts keep the note next to the line
                notes[i].remove(name)
    return Arrangement(parts, box, lines, notes, wiring.unwired_results, len(rails))


def _is_rightmost(box: Box, path: Sequence[int]) -> bool:
    """Return whether no box is to the right of the box at `path` inside `box`; False for a box in `PartRows`."""
    for index in path:
        if not isinstance(box, (Column, Branches)) or (isinstance(box, Branches) and index + 1 < len(box.boxes)):
            return False
        box = box.boxes[index]
    return True


def _list_paths(box: Box, path: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (part number, path) for every part in `box` at `path`; a path lists the index in each nested box."""
    if isinstance(box, Item):
        yield box.index, path
    elif isinstance(box, PartRows):
        for r, row in enumerate(box.rows):
            for c, x in enumerate(row):
                yield from _list_paths(x, (*path, r, c))
    elif not isinstance(box, LineGap):
        for i, inner in enumerate(box.boxes):
            yield from _list_paths(inner, (*path, i))


def _route_line(
    a: int,
    b: int,
    values: tuple[str, ...],
    places: Mapping[int, tuple[int, ...]],
    lanes: Mapping[tuple[int, int], tuple[tuple[int, int], ...]],
) -> Line:
    start, end = places.get(a, (-1,)), places.get(b, (-1,))
    k = 0
    while start[k] == end[k] and k + 1 < min(len(start), len(end)):
        k += 1
    if (a, b) in lanes:
        inner = start if len(start) > len(end) or b == END else end
        return Line(a, b, values, "rows", inner[:-2], lanes[a, b])
    if len(start) == k + 1 and len(end) == k + 1:
        return Line(a, b, values)
    return Line(a, b, values, *(("fork", end[: k + 1]) if len(start) == k + 1 else ("merge", start[: k + 1])))


class _Arranger:
    def __init__(self, graph: nx.DiGraph) -> None:
        self.graph = graph
        self.cut: set[tuple[int, int]] = set()
        self.lanes: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def arrange_column(self, members: frozenset[int]) -> Column:
        """Return the column of the parts `members`: the parts on every path through them, and boxes of the parts
        between. Edges from and to other parts count as edges from START and to END."""
        flow: nx.DiGraph = nx.DiGraph(self.graph.subgraph(members))
        flow.add_nodes_from((START, END))
        for n in members:
            before, after = set(self.graph.predecessors(n)), set(self.graph.successors(n))
            if before - members or not before:
                flow.add_edge(START, n)
            if after - members or not after:
                flow.add_edge(n, END)
        over = nx.immediate_dominators(flow, START)
        spine = [END]
        while spine[-1] != START:
            spine.append(over[spine[-1]])
        spine.reverse()  # START … END
        owner = {}
        for n in members:
            ancestor = n
            while ancestor not in spine:
                ancestor = over[ancestor]
            owner[n] = ancestor
        boxes: list[Box] = []
        for a, b in itertools.pairwise(spine):
            if a != START:
                boxes.append(Item(a))
            between = frozenset(n for n in members if owner[n] == a and n != a)
            if between:
                boxes.append(self._split(between, flow, flow.has_edge(a, b), between == members))
        return Column(tuple(boxes))

    def _split(self, members: frozenset[int], flow: nx.DiGraph, bypass: bool, is_whole: bool) -> Branches | PartRows:
        components = sorted(nx.weakly_connected_components(self.graph.subgraph(members)), key=min)
        # As a column these members would recurse without end.
        if is_whole and not bypass and len(components) == 1:
            return self._arrange_rows(members)
        return Branches(tuple(self.arrange_column(frozenset(branch)) for branch in components), bypass)

    def _arrange_rows(self, members: frozenset[int]) -> PartRows:
        inner = self.graph.subgraph(members)
        rank = {n: i for i, layer in enumerate(nx.topological_generations(inner)) for n in layer}
        # A part without producers is placed directly above its first reader.
        for n in reversed(list(nx.topological_sort(inner))):
            below = [rank[m] for m in inner.successors(n)]
            if below and not set(inner.predecessors(n)):
                rank[n] = min(below) - 1
        rows: list[list[Item | LineGap]] = [[] for _ in range(max(rank.values()) + 1)]
        for n in sorted(members):
            rows[rank[n]].append(Item(n))
        crossed: list[dict[int, int]] = [{} for _ in range(len(rows) + 1)]  # above a row: the lane of every source
        for a, b in self.graph.edges:
            if a not in members and b not in members:
                continue
            first, last = rank.get(a, -1) + 1, rank.get(b, len(rows))
            if last - first >= LONGEST:
                self.cut.add((a, b))
                continue
            for r in range(first, last):
                rows[r].append(LineGap(a, b))
            self.lanes[a, b] = tuple((r, crossed[r].setdefault(a, len(crossed[r]))) for r in range(first, last + 1))
        return PartRows(tuple(map(tuple, _order_rows(rows, self.graph))), tuple(map(len, crossed)))


def _order_rows(rows: list[list[Item | LineGap]], graph: nx.DiGraph) -> list[list[Item | LineGap]]:
    """Sort rows in place by mean positions of producers and readers, against crossings, and return them."""

    def find_neighbours(x: Item | LineGap, row: Mapping[object, float], above: bool) -> list[float]:
        if isinstance(x, LineGap):
            ends: list[Item | LineGap] = [x, Item(x.source if above else x.target)]
            return [row[end] for end in ends if end in row][:1]
        if above:
            return [row[s] for p in graph.predecessors(x.index) for s in (Item(p), LineGap(p, x.index)) if s in row]
        return [row[s] for p in graph.successors(x.index) for s in (Item(p), LineGap(x.index, p)) if s in row]

    # Barycentre heuristic (Sugiyama 1981): the fewest crossings are NP-hard to find (Garey and Johnson 1983).
    for _ in range(4):
        for above, order in ((True, range(1, len(rows))), (False, range(len(rows) - 2, -1, -1))):
            for r in order:
                adjacent = rows[r - 1 if above else r + 1]
                positions: dict[object, float] = {x: (i + 0.5) / len(adjacent) for i, x in enumerate(adjacent)}
                current = {x: (i + 0.5) / len(rows[r]) for i, x in enumerate(rows[r])}
                columns = {x: find_neighbours(x, positions, above) for x in rows[r]}
                mean = {x: sum(c) / len(c) if c else current[x] for x, c in columns.items()}
                rows[r].sort(key=mean.__getitem__)
    return rows
