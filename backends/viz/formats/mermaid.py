"""Pictures as Mermaid flowcharts, which many sites render inside Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from ..layout.coordinates import PlacedShape
from ..layout.font import join_lines
from ..layout.links import assign_ids, find_links
from .sheet import Sheet, describe_picture
from .style import EVERY, LIGHT

SPECIAL = re.compile(r"""["#&<>`\\\[\]{}|]""")
OPEN = "open"  # the class of open parts


def render_mermaid(placed: PlacedShape, sheet: Sheet) -> str:
    """Return the picture `placed` as a Mermaid flowchart: open parts are subgraphs, kinds of parts are classes."""
    named = assign_ids(placed)
    open_names = [named[p.shape.key] for p in placed.all() if p.open and p is not placed]
    lines = [
        "---",
        f"title: {json.dumps(sheet.title, ensure_ascii=False)}",
        "---",
        "flowchart TD",
        f"    accTitle: {join_lines(sheet.title)}",
        f"    accDescr: {join_lines(describe_picture(placed.shape, sheet))}",
        *(line for p in placed.inner for line in _format_part(p, named, 1)),
        *(f"    {named[a]} --> {named[b]}" for a, b in find_links(placed)),
        *_format_classes({p.shape.label.kind for p in placed.all() if p is not placed and not p.open}),
        *([f"    class {','.join(open_names)} {OPEN}"] if open_names else []),
    ]
    return "\n".join([*lines, ""])


def _format_part(p: PlacedShape, named: Mapping[str, str], depth: int) -> Iterator[str]:
    """Yield the lines of a part: a node, or a subgraph if open; `named`: shape key → id, `depth`: indentation."""
    label, title = p.shape.label, _escape(p.shape.label.title + p.shape.part.times)
    indent, name = "    " * depth, named[p.shape.key]
    if p.open:
        yield f'{indent}subgraph {name}["{title}"]'
        for inner in p.inner:
            yield from _format_part(inner, named, depth + 1)
        yield f"{indent}end"
    elif label.symbol:
        yield f'{indent}{name}(("{_escape(label.symbol)}")):::{_class_name(label.kind)}'
    else:
        lines = [f"<b>{title}</b>", *map(_escape, label.lines)]
        yield f'{indent}{name}["{"<br/>".join(lines)}"]:::{_class_name(label.kind)}'


def _format_classes(kinds: set[str]) -> Iterator[str]:
    for kind, look in EVERY.items():
        if kind in kinds:
            yield f"    classDef {_class_name(kind)} fill:{look.fill},stroke:{look.edge},color:{LIGHT.ink}"
    yield f"    classDef {OPEN} fill:{LIGHT.open},stroke:{LIGHT.soft},color:{LIGHT.ink}"


def _class_name(kind: str) -> str:
    return "k_" + kind.replace("-", "_")


def _escape(text: str) -> str:
    return SPECIAL.sub(lambda m: f"#{ord(m[0])};", join_lines(text))
