"""The parts of a scope as boxes in columns and rows.

What every path from the first to the last part passes (the dominators of the last one) stands in a column: in a
Transformer that is its residual stream, or the projections, attention and output of an attention. What lies between two
of these falls into branches that do not read each other, side by side, each a column of its own. A value that goes from
one to the next beside branches keeps the line of the column: so the stream stays straight. Branches that cannot be
taken apart stand in rows by how far they are from the first part (Sugiyama 1981), with room for the lines that pass.

Nothing here knows how large parts are: `place` does, and may be asked again when one is opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from ..model.outline import Part
from .wiring import END as END
from .wiring import START as START
from .wiring import Wiring, aside, linked, wired

RAILS = 2  # values that may come along the right side of a scope
LONGEST = 12  # rows that a line may pass; beyond, its name stands where it is read


@dataclass(frozen=True)
class Item:
    """The part of that number."""

    index: int


@dataclass(frozen=True)
class Pass:
    """Room for the line from part `source` to part `target` in a row between them."""

    source: int
    target: int


@dataclass(frozen=True)
class Column:
    """Boxes one under the other, on one line."""

    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Branches:
    """Columns side by side; with a `bypass` the line of the column that they are in goes on at their left."""

    boxes: tuple[Column, ...]
    bypass: bool


@dataclass(frozen=True)
class Rows:
    """Rows of parts, each read by those below only; above row i is room for `lanes[i]` lines to go across, and for
    `lanes[-1]` below the last one."""

    rows: tuple[tuple[Item | Pass, ...], ...]
    lanes: tuple[int, ...]


Box = Item | Pass | Column | Branches | Rows


@dataclass(frozen=True)
class Line:
    """A line from part to part, along which `values` go. START and END are the edges of the scope.

    It is straight if both parts stand in one column. Else `bend` is where it crosses to the column of its target: at
    the top ("fork") or the bottom ("merge") of the box at `region`, a path of places in boxes from that of the scope;
    or ("rows") above every row on its way, in one of the `lanes` there. A "rail" comes from START along the right side
    of the scope, in the lane that `region` tells, and into the right side of its target.
    """

    source: int
    target: int
    values: tuple[str, ...]
    bend: str = ""
    region: tuple[int, ...] = ()
    lanes: tuple[tuple[int, int], ...] = ()  # (row that it crosses above, lane)


@dataclass
class Arrangement:
    """The parts of a scope, numbered, where they stand, and the lines between them.

    `notes` are values that a part reads and no line brings, `gives` those that leave the scope and no line takes.
    `rails` is how many values come along the right side.
    """

    parts: list[Part]
    box: Column
    lines: list[Line]
    notes: dict[int, list[str]] = field(default_factory=dict)
    gives: dict[int, list[str]] = field(default_factory=dict)
    rails: int = 0


def arrange(parts: Sequence[Part], entering: Iterable[str], leaving: Iterable[str]) -> Arrangement:
    """`parts`, drawn in a scope that is given the values `entering` and makes those `leaving`.

    The first of the values entering that are read comes in at the top; others come along the right side, or are notes
    beside their readers.
    """
    parts, entering, leaving = list(parts), list(entering), list(leaving)
    whole = wired(parts, entering, leaving)
    best = _arranged(parts, whole)
    # Only where lines tangle, because every try arranges the whole scope again.
    if _tangled(best.box):
        ends = aside(parts, whole)
        for within in ([], *([i] for i in ends if len(ends) > 1), ends):
            fewer = _arranged(parts, wired(parts, entering, leaving, within))
            best = min(best, fewer, key=lambda arrangement: _tangled(arrangement.box))
    return best


def _tangled(box: Box) -> int:
    """Count the grid cells of rows, the measure of a tangle."""
    if isinstance(box, Rows):
        return sum(map(len, box.rows))
    return sum(map(_tangled, box.boxes)) if isinstance(box, (Column, Branches)) else 0


def _arranged(parts: list[Part], wiring: Wiring) -> Arrangement:
    """`parts` with their lines and notes."""
    links, notes = wiring.links, wiring.notes
    arranger = _Arranger(linked(parts, links))
    box = arranger.column(frozenset(range(len(parts))))
    places = dict(_places(box, ()))
    lines = []
    for (a, b), values in links.items():
        if (a, b) not in arranger.cut:
            lines.append(_line(a, b, tuple(values), places, arranger.lanes))
        elif b == END:
            wiring.gives.setdefault(a, []).extend(values)
        else:
            notes.setdefault(b, []).extend(values)
    rails = list(_rails(wiring, parts, places, box))[:RAILS]
    rails.sort(key=lambda name: min(places[i] for i in wiring.side[name]), reverse=True)  # the lowest outermost
    for k, name in enumerate(rails):
        for i in wiring.side[name]:
            lines.append(Line(START, i, (name,), "rail", (k,)))
            if parts[i].layered:  # others say what comes from there
                notes[i].remove(name)
    return Arrangement(parts, box, lines, notes, wiring.gives, len(rails))


def _rails(wiring: Wiring, parts: Sequence[Part], places: Mapping[int, tuple[int, ...]], box: Box) -> Iterator[str]:
    """The values beside the main one that can come to all their readers from the right, past nothing else."""
    for name, readers in wiring.side.items():
        if all(len(parts[i].read) > 1 and _rightmost(box, places[i]) for i in readers):
            yield name


def _rightmost(box: Box, path: Sequence[int]) -> bool:
    """Return whether nothing is to the right of the box at `path`."""
    for place in path:
        if not isinstance(box, (Column, Branches)) or (isinstance(box, Branches) and place + 1 < len(box.boxes)):
            return False
        box = box.boxes[place]
    return True


def _places(box: Box, path: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield every part's path: its index in each of the nested boxes that contain it."""
    if isinstance(box, Item):
        yield box.index, path
    elif isinstance(box, Rows):
        for r, row in enumerate(box.rows):
            for c, x in enumerate(row):
                yield from _places(x, (*path, r, c))
    elif not isinstance(box, Pass):
        for i, inner in enumerate(box.boxes):
            yield from _places(inner, (*path, i))


def _line(
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

    def column(self, members: frozenset[int]) -> Column:
        """Some parts, whatever is around them read as one start and one end."""
        inner = self.graph.subgraph(members)
        flow: nx.DiGraph = nx.DiGraph(inner)
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
            above = n
            while above not in spine:
                above = over[above]
            owner[n] = above
        boxes: list[Box] = []
        for a, b in itertools.pairwise(spine):
            if a != START:
                boxes.append(Item(a))
            between = frozenset(n for n in members if owner[n] == a and n != a)
            if between:
                boxes.append(self._between(between, flow, flow.has_edge(a, b), between == members))
        return Column(tuple(boxes))

    def _between(self, members: frozenset[int], flow: nx.DiGraph, bypass: bool, whole: bool) -> Branches | Rows:
        apart = sorted(nx.weakly_connected_components(self.graph.subgraph(members)), key=min)
        # As a column these members would be asked about again, without end.
        if whole and not bypass and len(apart) == 1:
            return self._rows(members)
        return Branches(tuple(self.column(frozenset(branch)) for branch in apart), bypass)

    def _rows(self, members: frozenset[int]) -> Rows:
        inner = self.graph.subgraph(members)
        rank = {n: i for i, layer in enumerate(nx.topological_generations(inner)) for n in layer}
        # What only later parts read stands above the first of them.
        for n in reversed(list(nx.topological_sort(inner))):
            below = [rank[m] for m in inner.successors(n)]
            if below and not set(inner.predecessors(n)):
                rank[n] = min(below) - 1
        rows: list[list[Item | Pass]] = [[] for _ in range(max(rank.values()) + 1)]
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
                rows[r].append(Pass(a, b))
            above = range(first, last + 1)
            self.lanes[a, b] = tuple((r, crossed[r].setdefault(a, len(crossed[r]))) for r in above)
        return Rows(tuple(map(tuple, _ordered(rows, self.graph))), tuple(map(len, crossed)))


def _ordered(rows: list[list[Item | Pass]], graph: nx.DiGraph) -> list[list[Item | Pass]]:
    """The rows, each in the order of the mean place of what it reads, then of what reads it: lines cross less."""

    def joined(x: Item | Pass, row: Mapping[object, float], above: bool) -> list[float]:
        """The places in `row`, above or below, of what `x` has a line to."""
        if isinstance(x, Pass):
            ends: list[Item | Pass] = [x, Item(x.source if above else x.target)]
            return [row[end] for end in ends if end in row][:1]
        if above:
            return [row[s] for p in graph.predecessors(x.index) for s in (Item(p), Pass(p, x.index)) if s in row]
        return [row[s] for p in graph.successors(x.index) for s in (Item(p), Pass(x.index, p)) if s in row]

    # Barycentre heuristic (Sugiyama 1981): the fewest crossings are NP-hard to find (Garey and Johnson 1983).
    for _ in range(4):
        for above, order in ((True, range(1, len(rows))), (False, range(len(rows) - 2, -1, -1))):
            for r in order:
                beside = rows[r - 1 if above else r + 1]
                place: dict[object, float] = {x: (i + 0.5) / len(beside) for i, x in enumerate(beside)}
                own = {x: (i + 0.5) / len(rows[r]) for i, x in enumerate(rows[r])}
                columns = {x: joined(x, place, above) for x in rows[r]}
                mean = {x: sum(c) / len(c) if c else own[x] for x, c in columns.items()}
                rows[r].sort(key=mean.__getitem__)
    return rows
