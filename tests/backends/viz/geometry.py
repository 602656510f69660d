"""What must not be in a picture: overlapping boxes, lines through boxes, lines that are neither upright nor level."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from weft.backends.viz.place import Placed, Wire

SLACK = 0.01


def faults(placed: Placed) -> Iterator[str]:
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
    for inner in placed.inner:
        yield from faults(inner)


def _crosses(wire: Wire, box: Placed) -> bool:
    """Whether the line is anywhere inside of the box, its border left out."""
    for (x0, y0), (x1, y1) in itertools.pairwise(wire.points):
        across = min(x0, x1) < box.x + box.width - SLACK and max(x0, x1) > box.x + SLACK
        along = min(y0, y1) < box.bottom - SLACK and max(y0, y1) > box.y + SLACK
        if across and along:
            return True
    return False


def _named(wire: Wire) -> str:
    ends = [None if s is None else s.key for s in (wire.source, wire.target)]
    return f"the line of {wire.values} from {ends[0]} to {ends[1]}"
