"""A picture for Graphviz: open parts as clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..layout.font import one_line
from ..layout.links import ids, links
from ..layout.positions import Placed
from .sheet import Sheet
from .style import EVERY, LIGHT

SPECIAL = re.compile(r'["\\]')


def dot(placed: Placed, sheet: Sheet) -> str:
    """`placed` as a directed graph in the language DOT."""
    named, title = ids(placed), _quoted(sheet.title)
    lines = [
        f"digraph {title} {{",
        f'  graph [label={title}, labelloc=t, fontname="Inter, Helvetica", fontsize=14]',
        '  node [shape=box, style="rounded,filled", fontname="Inter, Helvetica", fontsize=11]',
        f"  edge [color={_quoted(LIGHT.line)}, arrowsize=0.7]",
        *(line for p in placed.inner for line in _boxes(p, named, 1)),
        *(f"  {named[a]} -> {named[b]}" for a, b in links(placed)),
        "}",
    ]
    return "\n".join([*lines, ""])


def _boxes(p: Placed, named: Mapping[str, str], depth: int) -> Iterator[str]:
    """A part, and what is in it where it is open."""
    label, title = p.shape.label, p.shape.label.title + p.shape.part.times
    indent, name, look = "  " * depth, named[p.shape.key], EVERY[p.shape.label.kind]
    colours = f"color={_quoted(look.edge)}, fillcolor={_quoted(look.fill)}"
    if p.open:
        yield f"{indent}subgraph cluster_{name} {{"
        frame = f"color={_quoted(look.edge)}, fillcolor={_quoted(LIGHT.open)}"
        yield f'{indent}  graph [label={_quoted(title)}, labeljust=l, style="rounded,filled", {frame}]'
        for inner in p.inner:
            yield from _boxes(inner, named, depth + 1)
        yield f"{indent}}}"
    elif label.symbol:
        yield f"{indent}{name} [label={_quoted(label.symbol)}, shape=circle, style=filled, width=0.3, {colours}]"
    else:
        yield f"{indent}{name} [label={_quoted(title, *label.lines)}, tooltip={_quoted(p.shape.key)}, {colours}]"


def _quoted(*lines: str) -> str:
    return '"' + r"\n".join(SPECIAL.sub(r"\\\g<0>", one_line(line)) for line in lines) + '"'
