"""Links between parts, for formats with a layout engine of their own (DOT, Mermaid)."""

from __future__ import annotations

from collections.abc import Iterator

from ..model.outline import Part
from .positions import Placed


def links(placed: Placed) -> list[tuple[str, str]]:
    """Pairs of keys of closed parts, the second of which reads what the first makes.

    What a repeat makes that is drawn once comes from the parts of its first time.
    """
    closed = [p for p in placed.all() if not p.open]
    makers = {name: p.shape.key for p in closed for name in p.shape.part.made}
    # What values of later times of a repeat are called in its first time.
    first = {
        other: one
        for part in (p.shape.part for p in placed.all() if p.open)
        for body in part.others
        for one, other in zip(_made(part.children), _made(body), strict=True)
    }
    edges: dict[tuple[str, str], None] = {}
    for p in closed:
        for name in p.shape.part.read:
            while name not in makers and name in first:
                name = first[name]
            if name in makers:
                edges[makers[name], p.shape.key] = None
    return list(edges)


def ids(placed: Placed) -> dict[str, str]:
    """A short name for every part by its key: n1, n2, …"""
    return {p.shape.key: f"n{i}" for i, p in enumerate(placed.all())}


def _made(parts: list[Part]) -> Iterator[str]:
    return (name for part in parts for v in part.all_vertices() for name in v.makes)
