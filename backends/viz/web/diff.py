"""Pictures of a comparison: both networks side by side, in one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from weft.ir.readable import count, size

from ..compare.networks import Comparison
from ..formats.sheet import Sheet
from ..formats.style import SIGNS as LOOKS
from ..layout import opening
from ..layout.font import width
from ..layout.scene import BADGE, ICON, MARGIN, TITLE, Shape, shapes
from ..model.labels import Label
from ..model.marks import KEPT, SIGNS, kind
from ..model.network import Vertex
from ..model.outline import Part, outline
from ..model.totals import Totals

SIDES = ("before", "after")


def side_by_side(comparison: Comparison) -> Shape:
    """The shapes of both networks in one picture, the keys of each with its side before them."""
    networks = dict(zip(SIDES, (comparison.before, comparison.after), strict=True))
    sides = [_within(outline(n), side) for side, n in networks.items()]
    name = " and ".join(dict.fromkeys(n.name for n in networks.values()))
    root = shapes(Part(name, "", children=sides))
    apart = comparison.before.name != comparison.after.name
    for i, (side, n) in enumerate(networks.items()):
        root.inner[i] = _headed(root.inner[i], n.name if apart else f"{n.name} · {side}")
    return root


def _headed(shape: Shape, title: str) -> Shape:
    """`shape` under another title, as what holds a picture."""
    head = width(title, TITLE, True) + 2 * MARGIN + ICON + BADGE
    return replace(shape, label=Label(title, shape.label.lines, kind(KEPT)), head=head)


def _within(part: Part, side: str) -> Part:
    """`part` with the name of a side before every path and value."""

    def at(name: str) -> str:
        return f"{side}.{name}" if name else side

    def moved(v: Vertex) -> Vertex:
        across = SIDES[side == SIDES[0]]
        mark = v.mark and replace(v.mark, other=v.mark.other and f"{across}.{v.mark.other}")
        reads, makes = (tuple(map(at, names)) for names in (v.reads, v.makes))
        return replace(v, name=at(v.name), scope=at(v.scope), reads=reads, makes=makes, mark=mark)

    return replace(
        part,
        path=at(part.path),
        vertices=tuple(map(moved, part.vertices)),
        children=[_within(p, side) for p in part.children],
        others=[[_within(p, side) for p in time] for time in part.others],
    )


def opened(root: Shape, depth: int | None = None, parts: Iterable[str] = ()) -> set[str]:
    """The keys of open parts, as `opening.opened` has them; without a depth also of those that have in them both what
    changed and what did not."""
    mixed = {s.key for s in root.all() if s.arrangement is not None and (s.key in SIDES or _mixed(s.part))}
    return opening.opened(root, depth, parts) | (mixed if depth is None else set())


def _mixed(part: Part) -> bool:
    signs = {v.mark.sign for v in part.all_vertices() if v.mark}
    return KEPT in signs and len(signs) > 1


def data(comparison: Comparison, before: Totals, after: Totals) -> dict[str, Any]:
    """A comparison in numbers for a page, but for those that it counts itself, for a length and dtype.

    Of weights these are how many can be had in any dtype, and the bytes of the others.
    """
    return {
        "counts": comparison.counts,
        "operations": [before.operations, after.operations],
        "parameters": [before.parameters, after.parameters],
        "weights": [[t.open, t.weights - 4 * t.open] for t in (before, after)],
    }


def kinds() -> dict[str, list[str]]:
    """The signs in the place of kinds, for the legend of a page."""
    return {kind(sign): [sign, LOOKS[kind(sign)].mark] for sign in SIGNS}


def sheet(comparison: Comparison, before: Totals, after: Totals) -> Sheet:
    """Write the fact sheet beside a comparison."""
    names = [n.name for n in (comparison.before, comparison.after)]
    title = f"{names[0]}, before and after" if names[0] == names[1] else " and ".join(names)
    about = ", ".join(f"{n:,} {sign}" for sign, n in comparison.counts.items() if n)
    return Sheet(title, f"operations: {about}", tuple(_rows(before, after)))


def _rows(before: Totals, after: Totals) -> Iterator[tuple[str, str]]:
    """Yield each number before and after; caches and states only if there are any."""
    rows: list[tuple[str, Callable[[Totals], int], Callable[[int], str]]] = [
        ("Operations", lambda t: t.operations, "{:,}".format),
        ("Parameters", lambda t: t.parameters, "{:,}".format),
        (f"FLOPs, {after.tokens:,} tokens", lambda t: t.flops, count),
        ("KV cache per token", lambda t: t.cache, size),
        ("State of a text", lambda t: t.state, size),
        ("Weights", lambda t: t.weights, size),
    ]
    for name, number, spelled in rows:
        old, new = number(before), number(after)
        was, now = (f" in {' and '.join(t.dtypes)}" if name == "Weights" and t.dtypes else "" for t in (before, after))
        if old != new or was != now:
            by = f"{'+' if new > old else '−'}{spelled(abs(new - old))}"
            yield name, f"{spelled(old)}{was}, then {spelled(new)}{now} ({by})"
        elif new:
            yield name, f"{spelled(new)}{now}"
