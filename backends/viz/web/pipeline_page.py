"""The page of a pipeline: the graph before and after every pass, with the pass's documentation, checks and changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.recipes.spelling import spell
from weft.passes.report import PassRecord

from ..compare.networks import compare_networks
from ..layout.scene import build_scene
from ..model.network import Network
from ..model.part_costs import compute_totals
from . import plain
from .diff import convert_totals, list_signs, select_open_parts
from .page import render_page

LINES = 40  # maximum number of trace lines on a page


@dataclass(frozen=True)
class PipelineStep:
    """A pass of the pipeline: its record in the report, and the network after it."""

    record: PassRecord
    after: Network


def render_steps(start: Network, steps: Sequence[PipelineStep], tokens: int) -> str:
    """Return the HTML page for `steps` of a pipeline, beginning with the graph `start`; FLOPs are for `tokens` tokens.
    Parts that are equal in several steps are stored once."""
    pool = _Pool()
    before, records = start, []
    counted = compute_totals(start, tokens)
    for step in steps:
        comparison, now = compare_networks(before, step.after), compute_totals(step.after, tokens)
        views = [pool.add_view(side) for side in (comparison.before, comparison.after)]
        records.append(_convert_record(step.record) | convert_totals(comparison, counted, now) | {"views": views})
        before, counted = step.after, now
    passes = {"pool": [json.loads(text) for text in pool.shapes], "views": pool.views, "steps": records}
    return render_page(build_scene(start), (), {"root": None, "panels": None, "kinds": list_signs(), "passes": passes})


def _convert_record(record: PassRecord) -> dict[str, Any]:
    applied = record.applied
    arguments = {a.name: getattr(applied, a.name) for a in applied.arguments()}
    return {
        "text": str(applied),
        "name": applied.name,
        "about": applied.documentation().summary.replace("`", ""),
        "arguments": {name: spell(value) for name, value in arguments.items()},
        "effect": applied.effect,
        "shown": record.evidence,
        "difference": record.difference,
        "idle": record.idle.removeprefix(f"{applied} rewrote nothing: "),
        "rewrites": record.rewrites,
        "lines": record.summary[:LINES],
        "more": max(0, len(record.summary) - LINES),
    }


class _Pool:
    """A pool of shapes as JSON data without duplicates; inner shapes are replaced by their numbers."""

    def __init__(self) -> None:
        self.shapes: dict[str, int] = {}
        self.views: list[tuple[int, list[str]]] = []
        self.view_ids: dict[str, int] = {}

    def add_view(self, network: Network) -> int:
        """Return the index in `views` of (root, open shapes) of `network`, adding it if it is not there."""
        # Keyed by repr, because its mappings are not hashable.
        key = repr(network)
        if key not in self.view_ids:
            root = build_scene(network)
            self.view_ids[key] = len(self.views)
            self.views.append((self.add_shape(plain.convert_shape(root)), sorted(select_open_parts(root))))
        return self.view_ids[key]

    def add_shape(self, shape: dict[str, Any]) -> int:
        """Return the index of a shape in the pool, adding it if it is not there."""
        once = shape.get("repeat", {}).get("once", {})
        compact = self.add_inner(shape)
        if "inner" in once:
            compact = compact | {"repeat": shape["repeat"] | {"once": self.add_inner(once)}}
        return self.shapes.setdefault(json.dumps(compact, separators=(",", ":")), len(self.shapes))

    def add_inner(self, shape: dict[str, Any]) -> dict[str, Any]:
        """Return a shape with its inner shapes replaced by their numbers."""
        return shape | {"inner": [self.add_shape(s) for s in shape["inner"]]} if "inner" in shape else shape
