"""Pictures of a comparison, with both networks next to each other; and the page of a pipeline, with the graph before
and after every pass, its documentation, checks and changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.ir.readable import format_bytes, format_count
from weft.ir.recipes.spelling import spell
from weft.passes.report import PassRecord

from ..compare.networks import Comparison, compare_networks
from ..formats.style import SIGNS as LOOKS
from ..formats.style import Sheet
from ..layout.scene import Shape, build_scene, build_shape, compute_head, select_open
from ..model.labels import Label
from ..model.network import KEPT, SIGNS, Network, Vertex, sign_to_kind
from ..model.outline import PicturePart, build_outline
from ..model.part_costs import Totals, compute_totals
from . import plain
from .page import render_page

SIDES = ("before", "after")


def join_pictures(comparison: Comparison) -> Shape:
    """Return a shape that contains the shapes of both networks; their keys begin with "before" or "after"."""
    networks = dict(zip(SIDES, (comparison.before, comparison.after), strict=True))
    sides = [_add_prefix(build_outline(n), side) for side, n in networks.items()]
    name = " and ".join(dict.fromkeys(n.name for n in networks.values()))
    root = build_shape(PicturePart(name, "", children=sides))
    differ = comparison.before.name != comparison.after.name
    for i, (side, n) in enumerate(networks.items()):
        title, shape = n.name if differ else f"{n.name} · {side}", root.inner[i]
        label, head = Label(title, shape.label.lines, sign_to_kind(KEPT)), compute_head(title)
        root.inner[i] = replace(shape, label=label, head=head)
    return root


def _add_prefix(part: PicturePart, side: str) -> PicturePart:
    """Return `part` with the prefix `side` ("before" or "after") on every path and value name."""

    def at(name: str) -> str:
        return f"{side}.{name}" if name else side

    def prefix_vertex(v: Vertex) -> Vertex:
        across = SIDES[side == SIDES[0]]
        mark = v.mark and replace(v.mark, other=v.mark.other and f"{across}.{v.mark.other}")
        reads, makes = (tuple(map(at, names)) for names in (v.reads, v.makes))
        return replace(v, name=at(v.name), scope=at(v.scope), reads=reads, makes=makes, mark=mark)

    return replace(
        part,
        path=at(part.path),
        vertices=tuple(map(prefix_vertex, part.vertices)),
        children=[_add_prefix(p, side) for p in part.children],
        later_rounds=[[_add_prefix(p, side) for p in children] for children in part.later_rounds],
    )


def select_open_parts(root: Shape, depth: int | None = None, parts: Iterable[str] = ()) -> set[str]:
    """Return the keys of the parts to open: those of `select_open(root, depth, parts)` and, if `depth` is
    None, both networks and every part with both "kept" and other operations."""
    opened = select_open(root, depth, parts)
    for s in root.all() if depth is None else ():
        is_mixed = {KEPT} < {v.mark.sign for v in s.part.all_vertices() if v.mark}
        if s.arrangement is not None and (s.key in SIDES or is_mixed):
            opened.add(s.key)
    return opened


def convert_totals(comparison: Comparison, before: Totals, after: Totals) -> dict[str, Any]:
    """Return those totals, as [before, after], that do not depend on a sequence length or dtype, for a page.

    "counts" maps signs to numbers of operations. "weights" has for each network [number of f32 elements, for which the
    page may choose any dtype, bytes of all other weights].
    """
    return {
        "counts": comparison.counts,
        "operations": [before.operations, after.operations],
        "parameters": [before.parameters, after.parameters],
        "weights": [[t.open, t.weights - 4 * t.open] for t in (before, after)],
    }


def list_signs() -> dict[str, list[str]]:
    """Return the legend of a comparison page: kind of each sign → [sign, its mark as SVG path data]."""
    return {sign_to_kind(sign): [sign, LOOKS[sign_to_kind(sign)].mark] for sign in SIGNS}


def build_sheet(comparison: Comparison, before: Totals, after: Totals) -> Sheet:
    """Return the fact sheet of a comparison."""
    names = [n.name for n in (comparison.before, comparison.after)]
    title = f"{names[0]}, before and after" if names[0] == names[1] else " and ".join(names)
    about = ", ".join(f"{n:,} {sign}" for sign, n in comparison.counts.items() if n)
    return Sheet(title, f"operations: {about}", tuple(_list_rows(before, after)))


def _list_rows(before: Totals, after: Totals) -> Iterator[tuple[str, str]]:
    """Yield (name, totals before and after as text) for each row of the fact sheet; omit rows whose totals are 0."""
    rows: list[tuple[str, Callable[[Totals], int], Callable[[int], str]]] = [
        ("Operations", lambda t: t.operations, "{:,}".format),
        ("Parameters", lambda t: t.parameters, "{:,}".format),
        (f"FLOPs, {after.tokens:,} tokens", lambda t: t.flops, format_count),
        ("KV cache per token", lambda t: t.cache, format_bytes),
        ("State per text", lambda t: t.state, format_bytes),
        ("Weights", lambda t: t.weights, format_bytes),
    ]
    for name, number, formatted in rows:
        old, new = number(before), number(after)
        was, now = (f" in {' and '.join(t.dtypes)}" if name == "Weights" and t.dtypes else "" for t in (before, after))
        if old != new or was != now:
            by = f"{'+' if new > old else '−'}{formatted(abs(new - old))}"
            yield name, f"{formatted(old)}{was}, then {formatted(new)}{now} ({by})"
        elif new:
            yield name, f"{formatted(new)}{now}"


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
