"""A picture as Mermaid: a flowchart in Markdown, which many sites draw where they show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from ..layout.font import one_line
from ..layout.links import ids, links
from ..layout.positions import Placed
from .sheet import Sheet, in_words
from .style import EVERY, LIGHT

SPECIAL = re.compile(r"""["#&<>`\\\[\]{}|]""")
OPEN = "open"  # the class of open parts


def mermaid(placed: Placed, sheet: Sheet) -> str:
    """The flowchart of `placed`: open parts as subgraphs, kinds as classes."""
    named = ids(placed)
    opened = [named[p.shape.key] for p in placed.all() if p.open and p is not placed]
    lines = [
        "---",
        f"title: {json.dumps(sheet.title, ensure_ascii=False)}",
        "---",
        "flowchart TD",
        f"    accTitle: {one_line(sheet.title)}",
        f"    accDescr: {one_line(in_words(placed.shape, sheet))}",
        *(line for p in placed.inner for line in _boxes(p, named, 1)),
        *(f"    {named[a]} --> {named[b]}" for a, b in links(placed)),
        *_classes({p.shape.label.kind for p in placed.all() if p is not placed and not p.open}),
        *([f"    class {','.join(opened)} {OPEN}"] if opened else []),
    ]
    return "\n".join([*lines, ""])


def _boxes(p: Placed, named: Mapping[str, str], depth: int) -> Iterator[str]:
    """A part, and what is in it where it is open."""
    label, title = p.shape.label, _escaped(p.shape.label.title + p.shape.part.times)
    indent, name = "    " * depth, named[p.shape.key]
    if p.open:
        yield f'{indent}subgraph {name}["{title}"]'
        for inner in p.inner:
            yield from _boxes(inner, named, depth + 1)
        yield f"{indent}end"
    elif label.symbol:
        yield f'{indent}{name}(("{_escaped(label.symbol)}")):::{_class(label.kind)}'
    else:
        lines = [f"<b>{title}</b>", *map(_escaped, label.lines)]
        yield f'{indent}{name}["{"<br/>".join(lines)}"]:::{_class(label.kind)}'


def _classes(kinds: set[str]) -> Iterator[str]:
    for kind, look in EVERY.items():
        if kind in kinds:
            yield f"    classDef {_class(kind)} fill:{look.fill},stroke:{look.edge},color:{LIGHT.ink}"
    yield f"    classDef {OPEN} fill:{LIGHT.open},stroke:{LIGHT.soft},color:{LIGHT.ink}"


def _class(kind: str) -> str:
    return "k_" + kind.replace("-", "_")


def _escaped(text: str) -> str:
    """`text` within quotes, where letters of the syntax are spelled by their numbers."""
    return SPECIAL.sub(lambda m: f"#{ord(m[0])};", one_line(text))
