"""Defects of a layout: overlapping boxes, lines through boxes or along lines of other values, slanted lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from weft.backends.viz.layout.coordinates import PlacedShape, Point, Wire

SLACK = 0.01
CORNER = 1.0  # pixels that lines of different values may share


def faults(placed: PlacedShape) -> Iterator[str]:
    """Every fault of `placed` and of what is in it."""
    for i, a in enumerate(placed.inner):
        if a.x < placed.x or a.x + a.width > placed.x + placed.width + SLACK or a.bottom > placed.bottom + SLACK:
            yield f"{a.shape.key} is not within {placed.shape.key}"
        for b in placed.inner[i + 1 :]:
            if a.x < b.x + b.width and b.x < a.x + a.width and a.y < b.bottom and b.y < a.bottom:
                yield f"{a.shape.key} and {b.shape.key} overlap"
        yield from (f"{_named(w)} goes through {a.shape.key}" for w in placed.wires if _crosses(w, a))
    for w in placed.wires:
        if any(abs(p[0] - q[0]) > SLACK and abs(p[1] - q[1]) > SLACK for p, q in itertools.pairwise(w.points)):
            yield f"{_named(w)} is slanted"
    for v, w in itertools.combinations(placed.wires, 2):
        fan = v.source is w.source and v.source is not None  # what one part makes may leave it together
        times = placed.shape.part.count > 1 and (
            v.source is w.source or v.target is w.target
        )  # as may inputs of layers
        if not fan and not times and not {*v.values} & {*w.values} and _together(v, w) > CORNER:
            yield f"{_named(v)} lies on {_named(w)} in {placed.shape.key}"
    for inner in placed.inner:
        yield from faults(inner)


def _crosses(wire: Wire, box: PlacedShape) -> bool:
    """Check that the line crosses the interior of the box; of a circle, of its inscribed square."""
    edge = box.width * (1 - math.sqrt(0.5)) / 2 if box.shape.label.symbol else SLACK
    for (x0, y0), (x1, y1) in itertools.pairwise(wire.points):
        across = min(x0, x1) < box.x + box.width - edge and max(x0, x1) > box.x + edge
        along = min(y0, y1) < box.bottom - edge and max(y0, y1) > box.y + edge
        if across and along:
            return True
    return False


def _together(a: Wire, b: Wire) -> float:
    """Return the length that two lines run on top of each other."""
    pieces = itertools.product(itertools.pairwise(a.points), itertools.pairwise(b.points))
    return sum(_shared(p, q, k) for p, q in pieces for k in (0, 1))


def _shared(a: tuple[Point, Point], b: tuple[Point, Point], k: int) -> float:
    """Return the overlap of two segments that share the same constant coordinate k."""
    level = [point[k] for point in (*a, *b)]
    if max(level) - min(level) > SLACK:
        return 0
    (a0, a1), (b0, b1) = (sorted(point[1 - k] for point in piece) for piece in (a, b))
    return max(0, min(a1, b1) - max(a0, b0))


def _named(wire: Wire) -> str:
    ends = [None if s is None else s.key for s in (wire.source, wire.target)]
    return f"the line of {wire.values} from {ends[0]} to {ends[1]}"
