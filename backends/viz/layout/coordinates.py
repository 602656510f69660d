"""Positions of shapes and lines, in pixels, for any set of open parts.

web/scripts/ implements the same rules to update the layout when a reader opens or closes a part; a test compares them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .arrange import END, Arrangement, Box, Branches, Column, Item, Line, LineGap
from .scene import ALL, Shape, Size, unroll_repeat

GAP = 22.0  # between boxes of a column; lines cross from column to column in the middle of it
APART = 20.0  # between branches; between parts of a row half of it
LANE = 32.0  # for a line that passes branches
PASS = 8.0  # for a line that passes a row
ACROSS = 7.0  # between lines that cross above a row
PAD = 16.0  # around the contents of an open part
HEAD = 28.0  # the title of an open part
RAIL = 14.0  # for a line along the right side
PORT = 14.0  # from the top of a part to the point at which such a line enters
SPREAD = 26.0  # between lines that enter the same part
OVER = 4.0  # maximum vertical offset of a line from the middle of a gap
BESIDE = 6.0  # maximum offset from the middle of a circle at which a line enters
EDGE = 8.0  # between such lines and the corner of the part

Point = tuple[float, float]


@dataclass
class PlacedShape:
    """A shape with its top left corner, size and axis (the x of its vertical line), in pixels. `inner` and `wires` are
    the shapes and lines inside an open shape, else empty."""

    shape: Shape
    x: float
    y: float
    width: float
    height: float
    axis: float
    open: bool
    inner: list[PlacedShape] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def all(self) -> Iterator[PlacedShape]:
        """Yield this shape, then all shapes in it."""
        yield self
        for inner in self.inner:
            yield from inner.all()


@dataclass(frozen=True)
class Wire:
    """A line from `source` to `target` (None: the edge of the enclosing part), with its corners from end to end."""

    source: Shape | None
    target: Shape | None
    values: tuple[str, ...]
    points: tuple[Point, ...]


@dataclass
class _Inside:
    """Positions inside an open shape, whose `arrangement` is a tree of boxes that ends in rows of parts (`PartRows`).
    A path addresses a box by the index of the child at each level, and parts have their index in the shape."""

    shape: Shape
    arrangement: Arrangement
    spots: dict[int, PlacedShape] = field(default_factory=dict)  # part -> placed part
    spans: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)  # path -> y of top and bottom
    tops: dict[tuple[int, ...], list[float]] = field(default_factory=dict)  # path -> y of each row, and below the last
    rooms: dict[tuple[int, int, int], float] = field(default_factory=dict)  # (source, target, row) -> x of their wire


def place_shapes(root: Shape, opened: Collection[str]) -> PlacedShape:
    """Return `root` placed at (0, 0). `opened` has the keys of open shapes, and key + ALL for each repeat to unroll."""
    return _Placer(opened).place(root, 0, 0)


class _Placer:
    def __init__(self, opened: Collection[str]) -> None:
        self.opened = opened
        self.sizes: dict[tuple[int, int], Size] = {}
        self.repeated: dict[int, Shape] = {}

    def place(self, shape: Shape, x: float, y: float) -> PlacedShape:
        """Return `shape` placed with its top left corner at (x, y); if it is open, with everything in it."""
        shape, size = self.expand(shape), self.measure(shape)
        result = PlacedShape(shape, x, y, size.width, size.height, x + size.axis, shape.key in self.opened)
        if result.open and shape.arrangement is not None:
            inside = _Inside(shape, shape.arrangement)
            self._place_box(inside, shape.arrangement.box, x + PAD, y + HEAD + GAP, ())
            result.inner = [inside.spots[i] for i in sorted(inside.spots)]
            result.wires = list(_route_wires(result, inside))
        return result

    def expand(self, shape: Shape) -> Shape:
        """Return `shape`, unrolled if it is a repeat whose key + ALL is in `opened`."""
        if shape.part.count < 2 or shape.key + ALL not in self.opened:
            return shape
        if id(shape) not in self.repeated:
            self.repeated[id(shape)] = unroll_repeat(shape)
        return self.repeated[id(shape)]

    def measure(self, shape: Shape) -> Size:
        """Return the size of `shape`: the size of its contents with borders if it is open, else its closed size."""
        shape = self.expand(shape)
        if shape.arrangement is None or shape.key not in self.opened:
            return shape.closed
        inner = self._measure_box(shape, shape.arrangement.box)
        wide = max(inner.width + 2 * PAD, shape.head) + RAIL * shape.arrangement.rails
        return Size(wide, HEAD + GAP + inner.height + GAP, PAD + inner.axis)

    def _measure_box(self, shape: Shape, box: Box) -> Size:
        # By identity: shapes are mutable, hence not hashable, and they outlive the placer.
        key = id(shape), id(box)
        if key not in self.sizes:
            self.sizes[key] = self._compute_size(shape, box)
        return self.sizes[key]

    def _compute_size(self, shape: Shape, box: Box) -> Size:
        if isinstance(box, Item):
            return self.measure(shape.inner[box.index])
        if isinstance(box, LineGap):
            return Size(PASS, 0, PASS / 2)
        if isinstance(box, Column):
            return _stack_sizes([self._measure_box(shape, b) for b in box.boxes])
        if isinstance(box, Branches):
            size = _join_sizes([self._measure_box(shape, b) for b in box.boxes], APART)
            return Size(size.width + LANE, size.height, LANE / 2) if box.bypass else size
        size = _stack_sizes([_join_sizes([self._measure_box(shape, x) for x in row], APART / 2) for row in box.rows])
        return Size(size.width, size.height + ACROSS * sum(box.lanes), size.axis)

    def _place_box(self, inside: _Inside, box: Box, x: float, y: float, path: tuple[int, ...]) -> None:
        """Place `box`, whose path is `path`, with its top left corner at (x, y); store its positions in `inside`."""
        shape = inside.shape
        if isinstance(box, Item):
            inside.spots[box.index] = self.place(shape.inner[box.index], x, y)
            return
        size = self._measure_box(shape, box)
        inside.spans[path] = y, y + size.height
        if isinstance(box, Column):
            for i, b in enumerate(box.boxes):
                inner = self._measure_box(shape, b)
                self._place_box(inside, b, x + size.axis - inner.axis, y, (*path, i))
                y += inner.height + GAP
        elif isinstance(box, Branches):
            x += LANE if box.bypass else 0
            for i, b in enumerate(box.boxes):
                self._place_box(inside, b, x, y, (*path, i))
                x += self._measure_box(shape, b).width + APART
        elif not isinstance(box, LineGap):
            tops = inside.tops[path] = []
            for r, row in enumerate(box.rows):
                y += ACROSS * box.lanes[r]
                tops.append(y)
                sizes = [self._measure_box(shape, b) for b in row]
                row_size = _join_sizes(sizes, APART / 2)
                left = x + size.axis - row_size.axis
                for c, (b, inner) in enumerate(zip(row, sizes, strict=True)):
                    if isinstance(b, LineGap):
                        inside.rooms[b.source, b.target, r] = left + inner.axis
                    else:
                        self._place_box(inside, b, left, y, (*path, r, c))
                    left += inner.width + APART / 2
                y += row_size.height + GAP
            tops.append(y + ACROSS * box.lanes[-1])


def _stack_sizes(sizes: Sequence[Size]) -> Size:
    axis = max(s.axis for s in sizes)
    height = sum(s.height for s in sizes) + GAP * (len(sizes) - 1)
    return Size(axis + max(s.width - s.axis for s in sizes), height, axis)


def _join_sizes(sizes: Sequence[Size], gap: float) -> Size:
    """Return the size of boxes in a row. Its axis is that of the middle box; of an even number, the center."""
    width = sum(s.width for s in sizes) + gap * (len(sizes) - 1)
    half = len(sizes) // 2
    middle = sum(s.width + gap for s in sizes[:half]) + sizes[half].axis if len(sizes) % 2 else width / 2
    return Size(width, max(s.height for s in sizes), middle)


# -- lines


def _route_wires(around: PlacedShape, inside: _Inside) -> Iterator[Wire]:
    """Yield the lines inside the open shape `around`; `inside` are the positions of its boxes."""
    shifts = _spread_ends(around, inside)
    lanes = _assign_lanes(around, inside, shifts)
    for line in inside.arrangement.lines:
        a, b = inside.spots.get(line.source), inside.spots.get(line.target)
        start = (around.axis, around.y + HEAD) if a is None else (a.axis, a.bottom)
        shift = shifts.get((line.source, line.target), 0)
        end = (around.axis + shift, around.bottom) if b is None else (b.axis + shift, b.y)
        if b is not None and b.shape.label.symbol:  # onto the circle
            end = end[0], b.y + b.height / 2 - math.sqrt(b.height**2 / 4 - (end[0] - b.axis) ** 2)
        lane = lanes.get((line.source, line.target), 0)
        if b is not None and line.bend == "rail":
            points = _route_rail(around, b, line.region[0])
        elif b is not None and line.bend == "merge" and _is_beside_circle(start[0], b):
            points = _route_into_circle(start, b, lane * BESIDE)
        else:
            points = _route_line(line, start, end, inside, lane * OVER)
        corners = tuple(_drop_straight_points(points))
        yield Wire(None if a is None else a.shape, None if b is None else b.shape, line.values, corners)


def _route_rail(around: PlacedShape, target: PlacedShape, lane: int) -> list[Point]:
    """Return the points of a line along the right side of `around` into `target`; lane 0 is the outermost."""
    inward = around.shape.arrangement.rails - 1 - lane if around.shape.arrangement is not None else 0
    x, y = around.x + around.width - PAD / 2 - RAIL * lane, target.y + PORT + ACROSS * inward
    return [(x, around.y + HEAD), (x, y), (target.x + target.width, y)]


def _is_beside_circle(x: float, target: PlacedShape) -> bool:
    return bool(target.shape.label.symbol) and abs(x - target.axis) > 1


def _route_into_circle(start: Point, circle: PlacedShape, lower: float) -> list[Point]:
    """Return the points of a line from `start` into the left or right of `circle`, `lower` pixels below its middle."""
    y, round_ = (circle.y + circle.bottom) / 2 + lower, circle.height / 2
    across = math.sqrt(round_**2 - lower**2)
    return [start, (start[0], y), (circle.axis + (across if start[0] > circle.axis else -across), y)]


def _assign_lanes(
    around: PlacedShape, inside: _Inside, shifts: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Map (source, target) of each "merge" line that bends to the offset of its horizontal segment, −1 (highest) to 1
    (lowest). Of the lines that reach a target from one side, that from farthest away is lowest, so that none cross."""
    arrivals: dict[tuple[int, int, bool], list[tuple[float, int]]] = {}
    for line in inside.arrangement.lines:
        a, b = inside.spots.get(line.source), inside.spots.get(line.target, around)
        if a is None or line.bend != "merge":
            continue
        circle = _is_beside_circle(a.axis, b)
        way = b.axis + (0 if circle else shifts[line.source, line.target]) - a.axis
        level = 0 if circle else round(inside.spans[line.region][1])
        if abs(way) > 0.5:  # it does not go straight down
            arrivals.setdefault((line.target, level, way > 0), []).append((-abs(way), line.source))
    lanes = {}
    for (target, _, _), lines in arrivals.items():
        for i, (_, source) in enumerate(sorted(lines)):
            lanes[source, target] = ((len(lines) - 1) / 2 - i) / max(1, (len(lines) - 1) / 2)
    return lanes


def _route_line(line: Line, start: Point, end: Point, inside: _Inside, lower: float) -> list[Point]:
    """Return the points of `line`; the horizontal segment of a "merge" is `lower` below the gap's middle."""
    (x0, _), (x1, _) = start, end
    if line.bend == "rows":
        points, x = [start], x0
        for r, lane in line.lanes:
            y = inside.tops[line.region][r] - ACROSS * (lane + 1)
            to = inside.rooms.get((line.source, line.target, r), x1)
            points += [(x, y), (to, y)]
            x = to
        return [*points, end]
    if line.bend:
        top, bottom = inside.spans[line.region]
        y = top - GAP / 2 if line.bend == "fork" else bottom + GAP / 2 + lower
        return [start, (x0, y), (x1, y), end]
    return [start, end]


def _spread_ends(around: PlacedShape, inside: _Inside) -> dict[tuple[int, int], float]:
    """Map (source, target) of lines except rails to the offset of their ends, which differ, from the axis."""
    lines = [line for line in inside.arrangement.lines if line.bend != "rail"]
    offsets = {(line.source, line.target): 0.0 for line in lines}
    for target, spot in [*inside.spots.items(), (END, around)]:
        coming = [line for line in lines if line.target == target]
        if spot.shape.label.symbol:  # other lines enter the circle at its sides
            coming = [line for line in coming if line.bend == "rows"]
        if len(coming) < 2:
            continue
        at = {line.source: _find_column(line, spot, inside, around) for line in coming}
        order = sorted(at, key=at.__getitem__)
        # A line straight from above keeps the middle; the others arrive at its sides.
        straight = [i for i, s in enumerate(order) if abs(at[s] - spot.axis) < 0.5]
        zero = straight[0] if straight else (len(order) - 1) / 2
        room = min(spot.axis - spot.x, spot.x + spot.width - spot.axis) - (BESIDE if spot.shape.label.symbol else EDGE)
        step = min(SPREAD, room / max(zero, len(order) - 1 - zero))
        for i, s in enumerate(order):
            offsets[s, target] = (i - zero) * step
    return offsets


def _find_column(line: Line, target: PlacedShape, inside: _Inside, around: PlacedShape) -> float:
    """Return the x from which `line` reaches `target`: for a fork the axis of `target`, else that of its source."""
    if line.bend == "fork":  # it bends above
        return target.axis
    return inside.spots[line.source].axis if line.source in inside.spots else around.axis


def _drop_straight_points(points: Sequence[Point]) -> Iterator[Point]:
    distinct = [p for p, q in itertools.pairwise(points) if max(abs(p[0] - q[0]), abs(p[1] - q[1])) >= 0.01]
    distinct.append(points[-1])
    yield distinct[0]
    for before, p, after in zip(distinct, distinct[1:], distinct[2:], strict=False):
        if not any(abs(before[i] - p[i]) < 0.01 and abs(p[i] - after[i]) < 0.01 for i in (0, 1)):
            yield p
    yield distinct[-1]
