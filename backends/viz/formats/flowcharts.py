"""Pictures for programs with a layout engine of their own: DOT for Graphviz, and Mermaid flowcharts, which many sites
render inside Markdown. Open parts are clusters or subgraphs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from ..layout.coordinates import PlacedShape
from ..layout.font import join_lines
from ..model.outline import PicturePart
from .style import EVERY, LIGHT, Sheet, describe_picture

SPECIAL_DOT, SPECIAL_MERMAID = re.compile(r'["\\]'), re.compile(r"""["#&<>`\\\[\]{}|]""")
OPEN = "open"  # the Mermaid class of open parts

# From a part, its id and its title to its line, or for an open part to its first and its last line.
FormatPart = Callable[[PlacedShape, str, str], tuple[str, ...]]


def render_dot(placed: PlacedShape, sheet: Sheet) -> str:
    """Return the picture `placed` as a directed graph in the DOT language, titled as `sheet`."""
    title = _quote(sheet.title)
    lines = [
        f"digraph {title} {{",
        f'  graph [label={title}, labelloc=t, fontname="Inter, Helvetica", fontsize=14]',
        '  node [shape=box, style="rounded,filled", fontname="Inter, Helvetica", fontsize=11]',
        f"  edge [color={_quote(LIGHT.line)}, arrowsize=0.7]",
        *_list_lines(placed, "  ", " -> ", _format_dot_part),
        "}",
    ]
    return "\n".join([*lines, ""])


def render_mermaid(placed: PlacedShape, sheet: Sheet) -> str:
    """Return the picture `placed` as a Mermaid flowchart: open parts are subgraphs, kinds of parts are classes."""
    named = _assign_ids(placed)
    open_names = [named[p.shape.key] for p in placed.all() if p.open and p is not placed]
    kinds = {p.shape.label.kind for p in placed.all() if p is not placed and not p.open}
    looks = {_class_name(k): (look.fill, look.edge) for k, look in EVERY.items() if k in kinds}
    looks[OPEN] = LIGHT.open, LIGHT.soft
    lines = [
        "---",
        f"title: {json.dumps(sheet.title, ensure_ascii=False)}",
        "---",
        "flowchart TD",
        f"    accTitle: {join_lines(sheet.title)}",
        f"    accDescr: {join_lines(describe_picture(placed.shape, sheet))}",
        *_list_lines(placed, "    ", " --> ", _format_mermaid_part),
        *(f"    classDef {k} fill:{fill},stroke:{edge},color:{LIGHT.ink}" for k, (fill, edge) in looks.items()),
        *([f"    class {','.join(open_names)} {OPEN}"] if open_names else []),
    ]
    return "\n".join([*lines, ""])


def _list_lines(placed: PlacedShape, indent: str, arrow: str, format_part: FormatPart) -> Iterator[str]:
    """Yield the lines of all parts in `placed`, indented by their depth, and of the links between them."""
    named = _assign_ids(placed)

    def walk(parts: list[PlacedShape], depth: int) -> Iterator[str]:
        for p in parts:
            first, *last = format_part(p, named[p.shape.key], p.shape.label.title + p.shape.part.times)
            yield from (depth * indent + line for line in first.splitlines())
            yield from walk(p.inner, depth + 1)
            yield from (depth * indent + line for line in last)

    yield from walk(placed.inner, 1)
    yield from (f"{indent}{named[a]}{arrow}{named[b]}" for a, b in find_links(placed))


def _format_dot_part(p: PlacedShape, name: str, title: str) -> tuple[str, ...]:
    label, look = p.shape.label, EVERY[p.shape.label.kind]
    colours = f"color={_quote(look.edge)}, fillcolor={_quote(look.fill)}"
    if p.open:
        frame = f"color={_quote(look.edge)}, fillcolor={_quote(LIGHT.open)}"
        graph = f'  graph [label={_quote(title)}, labeljust=l, style="rounded,filled", {frame}]'
        return f"subgraph cluster_{name} {{\n{graph}", "}"
    if label.symbol:
        return (f"{name} [label={_quote(label.symbol)}, shape=circle, style=filled, width=0.3, {colours}]",)
    return (f"{name} [label={_quote(title, *label.lines)}, tooltip={_quote(p.shape.key)}, {colours}]",)


def _format_mermaid_part(p: PlacedShape, name: str, title: str) -> tuple[str, ...]:
    label, title = p.shape.label, _escape(title)
    if p.open:
        return f'subgraph {name}["{title}"]', "end"
    if label.symbol:
        return (f'{name}(("{_escape(label.symbol)}")):::{_class_name(label.kind)}',)
    lines = [f"<b>{title}</b>", *map(_escape, label.lines)]
    return (f'{name}["{"<br/>".join(lines)}"]:::{_class_name(label.kind)}',)


def _quote(*lines: str) -> str:
    return '"' + r"\n".join(SPECIAL_DOT.sub(r"\\\g<0>", join_lines(line)) for line in lines) + '"'


def _class_name(kind: str) -> str:
    return "k_" + kind.replace("-", "_")


def _escape(text: str) -> str:
    return SPECIAL_MERMAID.sub(lambda m: f"#{ord(m[0])};", join_lines(text))


def _assign_ids(placed: PlacedShape) -> dict[str, str]:
    """Map the key of every part to a short id: n0 for the root, then n1, n2, …"""
    return {p.shape.key: f"n{i}" for i, p in enumerate(placed.all())}


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


def _list_results(parts: list[PicturePart]) -> Iterator[str]:
    return (name for part in parts for v in part.all_vertices() for name in v.makes)
