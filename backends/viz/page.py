"""The page: one file with everything in it, which opens without a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader

from . import facts, place
from .arrange import Box, Branches, Column, Item, Pass
from .labels import KINDS
from .network import Vertex
from .scene import ALL, ICON, LEADING, LINE, TITLE, Shape, times
from .text import FONT

NUMBERS = ("GAP", "APART", "LANE", "PASS", "ACROSS", "PAD", "HEAD", "SPREAD", "EDGE")


def page(root: Shape, opened: Collection[str]) -> str:
    """The page that shows `root`, at first with the shapes in `opened` open."""
    data = {
        "root": shape(root),
        "opened": sorted(opened),
        "kinds": KINDS,
        "sizes": {name: getattr(place, name) for name in NUMBERS}
        | {"TITLE": TITLE, "LINE": LINE, "LEADING": LEADING, "ICON": ICON, "ALL": ALL},
    }
    environment = Environment(loader=PackageLoader(__package__, ""), autoescape=False, trim_blocks=True)
    here = files(__package__)
    return environment.get_template("page.html.j2").render(
        title=root.label.title,
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/"),
        script=(here / "page.js").read_text(encoding="utf-8"),
        style=(here / "page.css").read_text(encoding="utf-8"),
        fonts={w: base64.b64encode((FONT / f"inter-{w}.ttf").read_bytes()).decode() for w in ("400", "600")},
    )


def shape(s: Shape) -> dict[str, Any]:
    """A shape and all that may be drawn in it, as plain data."""
    found: dict[str, Any] = {
        "key": s.key,
        "title": s.label.title,
        "lines": s.label.lines,
        "kind": s.label.kind,
        "closed": [round(s.closed.width, 2), s.closed.height, round(s.closed.axis, 2)],
    }
    optional = {
        "symbol": s.label.symbol,
        "notes": s.notes,
        "ops": [_vertex(v) for v in s.part.vertices],
        "facts": facts.data(facts.facts(s.part)),
    }
    found |= {name: value for name, value in optional.items() if value}
    if s.arrangement is not None:
        found["head"] = round(s.head, 2)
        found["box"] = _box(s.arrangement.box)
        found["wires"] = [[x.source, x.target, x.values, x.bend, x.region, x.lanes] for x in s.arrangement.lines]
        found["inner"] = [shape(i) for i in s.inner]
    if s.part.count > 1:
        found["repeat"] = _repeat(s)
    return found


def _repeat(s: Shape) -> dict[str, Any]:
    """How often a part is computed, and what one time of it looks like when closed.

    The number at place `depth` of a key, counted by its dots, grows by `period` from one time to the next.
    """
    inner = times(s).inner
    first, second = inner[0], inner[1]
    number = [int(i.key.rpartition(".")[2].partition("-")[0]) for i in (first, second)]
    return {
        "count": s.part.count,
        "closed": [round(first.closed.width, 2), first.closed.height, round(first.closed.axis, 2)],
        "head": round(first.head, 2),
        "depth": first.key.count("."),
        "period": number[1] - number[0],
        "parallel": s.part.parallel,
        "once": shape(first)
        if len(s.part.children) > 1
        else {**shape(first), "inner": None, "box": None, "wires": None},
    }


def _box(box: Box) -> Any:
    """A box as plain data: a number, ["c", …] for a column, ["b" or "p", …] for branches without and with a bypass,
    ["r", lanes, rows], ["|", source, target] for a line that passes."""
    if isinstance(box, Item):
        return box.index
    if isinstance(box, Pass):
        return ["|", box.source, box.target]
    if isinstance(box, Column):
        return ["c", *map(_box, box.boxes)]
    if isinstance(box, Branches):
        return ["p" if box.bypass else "b", *map(_box, box.boxes)]
    return ["r", box.lanes, *([_box(x) for x in row] for row in box.rows)]


def _vertex(v: Vertex) -> dict[str, Any]:
    return {
        "name": v.name,
        "op": v.op,
        "attrs": dict(v.attrs),
        "reads": list(zip(v.roles, v.reads, strict=False)),
        "makes": list(zip(v.makes, v.types, strict=False)),
        "weights": [[w.name, w.shape, w.dtype, w.bytes, w.recipe] for w in v.weights],
    }
