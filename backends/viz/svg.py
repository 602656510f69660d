"""A picture to print: SVG, with the font that it is measured with in it."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator
from xml.sax.saxutils import escape

from .place import Placed, place
from .scene import LEADING, LINE, TITLE, Shape, noted
from .text import FONT

INK, PAPER = "#1f2430", "#ffffff"
FILL = {
    "stream": PAPER, "embedding": "#d6e4f5", "norm": "#f3ecc8", "attention": "#f6d5bd", "position": "#e9d3e6",
    "feed-forward": "#cfe8dc", "experts": "#bfe0e8", "recurrence": "#e3d9f3", "linear": "#e8edf2", "tensor": "#f1f1ee",
    "input": PAPER,
}  # fmt: skip
STYLE = (
    f"text{{font-family:'Inter W',sans-serif;font-size:{LINE:g}px;fill:{INK};font-kerning:none}}"
    f".t{{font-size:{TITLE:g}px;font-weight:600}}.w{{fill:none;stroke:#3b4252;stroke-width:1.4}}"
    "rect{stroke:#8a93a1}circle{fill:#fff;stroke:#3b4252;stroke-width:1.4}"
)
ARROW = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 1 7 4 0 7z" fill="#3b4252"/></marker></defs>'
)


def svg(root: Shape, opened: Collection[str]) -> str:
    """The picture of `root`, the shapes in `opened` open."""
    placed = place(root, opened)
    w, h = round(placed.width + 2), round(placed.height + 2)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="-1 -1 {w} {h}" role="img">'
    inner = [line for p in placed.inner for line in _drawn(p)] + _wires(placed)
    title = f"<title>{escape(root.label.title)}</title>"
    return "\n".join([head, title, f"<style>{_faces()}{STYLE}</style>", ARROW, *inner, "</svg>", ""])


def _faces() -> str:
    made = ""
    for weight in ("400", "600"):
        data = base64.b64encode((FONT / f"inter-{weight}.ttf").read_bytes()).decode()
        made += f"@font-face{{font-family:'Inter W';font-weight:{weight};src:url(data:font/ttf;base64,{data})}}"
    return made


def _drawn(p: Placed) -> Iterator[str]:
    """A shape and what is in it."""
    text = p.shape.label
    yield f"<g><title>{escape(p.shape.key)}</title>"
    yield from _circle(p) if text.symbol else _box(p)
    for inner in p.inner:
        yield from _drawn(inner)
    yield from _wires(p)
    yield "</g>"


def _circle(p: Placed) -> Iterator[str]:
    cx, cy, r, d = p.x + p.width / 2, p.y + p.height / 2, p.width / 2, 5
    yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{r:g}"/>'
    if p.shape.label.symbol == "+":
        yield f'<path class="w" d="M{cx - d:.1f} {cy:.1f}h{2 * d}M{cx:.1f} {cy - d:.1f}v{2 * d}"/>'
    else:
        yield f'<text class="t" x="{cx:.1f}" y="{cy + 4.5:.1f}" text-anchor="middle">{p.shape.label.symbol}</text>'


def _box(p: Placed) -> Iterator[str]:
    text, count = p.shape.label, p.shape.part.count
    fill = "#fafaf8" if p.open else FILL[text.kind]
    yield f'<rect x="{p.x:.1f}" y="{p.y:.1f}" width="{p.width:.1f}" height="{p.height:.1f}" rx="8" fill="{fill}"/>'
    x, anchor = (p.x + 12, "start") if p.open else (p.x + p.width / 2, "middle")
    lines = [] if p.open else [*text.lines, *([noted(p.shape.notes)] if p.shape.notes else [])]
    for i, line in enumerate((text.title, *lines)):
        style = "" if i else ' class="t"'
        yield f'<text{style} x="{x:.1f}" y="{p.y + 19 + LEADING * i:.1f}" text-anchor="{anchor}">{escape(line)}</text>'
    if count > 1:
        yield f'<text class="t" x="{p.x + p.width - 10:.1f}" y="{p.y + 19:.1f}" text-anchor="end">× {count}</text>'


def _wires(p: Placed) -> list[str]:
    found = []
    for wire in p.wires:
        corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in wire.points)
        end = "" if wire.target is None else ' marker-end="url(#a)"'
        found.append(f'<path class="w" d="M{corners}"{end}/>')
    return found
