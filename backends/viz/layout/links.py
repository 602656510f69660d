"""Links between parts, for formats with their own layout engine (DOT, Mermaid)."""

from __future__ import annotations

from collections.abc import Iterator

from ..model.outline import PicturePart
from .coordinates import PlacedShape


def find_links(placed: PlacedShape) -> list[tuple[str, str]]:
    """Return (key of the producer, key of the reader) for each pair of closed parts that a value connects, once each.
    If a repeat is drawn as its first round only, that round counts as the producer of the results of all rounds."""
    closed = [p for p in placed.all() if not p.open]
    makers = {name: p.shape.key for p in closed for name in p.shape.part.results}
    # Values of later rounds of a repeat -> their names in the first round.
    first: dict[str, str] = {}
    for part in (p.shape.part for p in placed.all() if p.open):
        for body in part.later_rounds:
            first |= zip(_list_results(body), _list_results(part.children), strict=True)
    edges: dict[tuple[str, str], None] = {}
    for p in closed:
        for name in p.shape.part.read:
            while name not in makers and name in first:
                name = first[name]
            if name in makers:
                edges[makers[name], p.shape.key] = None
    return list(edges)


def assign_ids(placed: PlacedShape) -> dict[str, str]:
    """Map the key of every part to a short id: n0 for the root, then n1, n2, …"""
    return {p.shape.key: f"n{i}" for i, p in enumerate(placed.all())}


def _list_results(parts: list[PicturePart]) -> Iterator[str]:
    return (name for part in parts for v in part.all_vertices() for name in v.makes)
