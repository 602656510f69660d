"""The page of a pipeline: the graph before and after every pass, what the pass declares, has shown and changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.recipes.spelling import spell
from weft.passes.report import Record

from ..compare.networks import compare
from ..layout.scene import scene
from ..model.network import Network
from ..model.totals import totals
from . import plain
from .diff import data, kinds, opened
from .page import page

LINES = 40  # of a trace that a page shows


@dataclass(frozen=True)
class Step:
    """A pass that ran, as the report has it, and the graph that it left."""

    record: Record
    after: Network


def steps_page(start: Network, steps: Sequence[Step], tokens: int) -> str:
    """The page to go through `steps`, which began with the graph `start`; FLOPs are of a text of so many tokens.

    Parts that are the same in several steps are in it once.
    """
    pool = _Pool()
    before, records = start, []
    counted = totals(start, tokens)
    for step in steps:
        comparison, now = compare(before, step.after), totals(step.after, tokens)
        views = [pool.view(side) for side in (comparison.before, comparison.after)]
        records.append(_record(step.record) | data(comparison, counted, now) | {"views": views})
        before, counted = step.after, now
    passes = {"pool": [json.loads(text) for text in pool.shapes], "views": pool.views, "steps": records}
    return page(scene(start), (), {"root": None, "panels": None, "kinds": kinds(), "passes": passes})


def _record(record: Record) -> dict[str, Any]:
    """Convert a pass's record to plain data."""
    applied = record.applied
    arguments = {a.name: getattr(applied, a.name) for a in applied.arguments()}
    return {
        "text": str(applied),
        "name": applied.name,
        "about": applied.documentation().summary.replace("`", ""),
        "arguments": {name: spell(value) for name, value in arguments.items()},
        "effect": applied.effect,
        "shown": record.shown,
        "difference": record.difference,
        "idle": record.idle.removeprefix(f"{applied} rewrote nothing: "),
        "rewrites": record.rewrites,
        "lines": record.summary[:LINES],
        "more": max(0, len(record.summary) - LINES),
    }


class _Pool:
    """Shapes as plain data, every one once: those within it are told by their numbers."""

    def __init__(self) -> None:
        self.shapes: dict[str, int] = {}
        self.views: list[tuple[int, list[str]]] = []
        self.known: dict[str, int] = {}

    def view(self, network: Network) -> int:
        """The number of a picture: of its root, and what is open at first. Equal networks have one."""
        # By its text, because its mappings cannot be hashed.
        key = repr(network)
        if key not in self.known:
            root = scene(network)
            self.known[key] = len(self.views)
            self.views.append((self.number(plain.shape(root)), sorted(opened(root))))
        return self.known[key]

    def number(self, shape: dict[str, Any]) -> int:
        """The number of a shape, which is put into the pool if it is not there."""
        once = shape.get("repeat", {}).get("once", {})
        placed = self.placed(shape)
        if "inner" in once:
            placed = placed | {"repeat": shape["repeat"] | {"once": self.placed(once)}}
        return self.shapes.setdefault(json.dumps(placed, separators=(",", ":")), len(self.shapes))

    def placed(self, shape: dict[str, Any]) -> dict[str, Any]:
        """A shape with the numbers of those within it."""
        return shape | {"inner": [self.number(s) for s in shape["inner"]]} if "inner" in shape else shape
