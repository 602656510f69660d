"""Pictures for Graphviz, with open parts as clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..layout.coordinates import PlacedShape
from ..layout.font import join_lines
from ..layout.links import assign_ids, find_links
from .sheet import Sheet
from .style import EVERY, LIGHT

SPECIAL = re.compile(r'["\\]')


def render_dot(placed: PlacedShape, sheet: Sheet) -> str:
    """Return the picture `placed` as a directed graph in the DOT language, titled as `sheet`."""
    named, title = assign_ids(placed), _quote(sheet.title)
    lines = [
        f"digraph {title} {{",
        f'  graph [label={title}, labelloc=t, fontname="Inter, Helvetica", fontsize=14]',
        '  node [shape=box, style="rounded,filled", fontname="Inter, Helvetica", fontsize=11]',
        f"  edge [color={_quote(LIGHT.line)}, arrowsize=0.7]",
        *(line for p in placed.inner for line in _format_part(p, named, 1)),
        *(f"  {named[a]} -> {named[b]}" for a, b in find_links(placed)),
        "}",
    ]
    return "\n".join([*lines, ""])


def _format_part(p: PlacedShape, named: Mapping[str, str], depth: int) -> Iterator[str]:
    """Yield the lines of a part: a node, or a cluster if open; `named`: shape key → id, `depth`: indentation."""
    label, title = p.shape.label, p.shape.label.title + p.shape.part.times
    indent, name, look = "  " * depth, named[p.shape.key], EVERY[p.shape.label.kind]
    colours = f"color={_quote(look.edge)}, fillcolor={_quote(look.fill)}"
    if p.open:
        yield f"{indent}subgraph cluster_{name} {{"
        frame = f"color={_quote(look.edge)}, fillcolor={_quote(LIGHT.open)}"
        yield f'{indent}  graph [label={_quote(title)}, labeljust=l, style="rounded,filled", {frame}]'
        for inner in p.inner:
            yield from _format_part(inner, named, depth + 1)
        yield f"{indent}}}"
    elif label.symbol:
        yield f"{indent}{name} [label={_quote(label.symbol)}, shape=circle, style=filled, width=0.3, {colours}]"
    else:
        yield f"{indent}{name} [label={_quote(title, *label.lines)}, tooltip={_quote(p.shape.key)}, {colours}]"


def _quote(*lines: str) -> str:
    return '"' + r"\n".join(SPECIAL.sub(r"\\\g<0>", join_lines(line)) for line in lines) + '"'
