"""Mermaid flowcharts: grammar, boxes, edges, escaped names."""

from __future__ import annotations

import re

import pytest

from weft.backends.viz.formats.mermaid import render_mermaid
from weft.backends.viz.formats.sheet import Sheet
from weft.backends.viz.layout.links import find_links
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet

from ..pages import model_of
from .placed import BARE, ODD, ODD_LINE, PRESETS, place_default, place_odd_name


def parse_mermaid(text: str) -> tuple[dict[str, str], set[tuple[str, str]], list[str]]:
    """Boxes by their names with their labels, edges, and subgraphs, of a flowchart in the grammar that weft writes."""
    quoted = r'"((?:[^"\\`<>|{}\[\]]|<br/>|</?b>)*)"'
    lines = iter(text.splitlines())
    assert [next(lines), re.fullmatch(r'title: ".*"', next(lines)) is not None] == ["---", True]
    assert [next(lines), next(lines)] == ["---", "flowchart TD"]
    boxes: dict[str, str] = {}
    edges, groups, classes, used, depth = set(), list[str](), set(), set(), 0
    for line in lines:
        if found := re.fullmatch(rf" +(n\d+)(?:\[{quoted}\]|\(\({quoted}\)\)):::(\w+)", line):
            assert found[1] not in boxes
            boxes[found[1]] = found[2] or found[3]
            used.add(found[4])
        elif found := re.fullmatch(rf" +subgraph (n\d+)\[{quoted}\]", line):
            groups.append(found[1])
            depth += 1
        elif line.strip() == "end":
            depth -= 1
            assert depth >= 0
        elif found := re.fullmatch(r" +(n\d+) --> (n\d+)", line):
            assert {found[1], found[2]} <= boxes.keys() and depth == 0
            edges.add((found[1], found[2]))
        elif found := re.fullmatch(r" +classDef (\w+) fill:#\w{6},stroke:#\w{6},color:#\w{6}", line):
            classes.add(found[1])
        elif found := re.fullmatch(r" +class ([n\d,]+) open", line):
            assert found[1].split(",") == groups
        else:
            assert re.fullmatch(r"    acc(Title|Descr): \S.*", line), line
    assert depth == 0 and classes == used | {"open"} and not set(groups) & boxes.keys()
    return boxes, edges, groups


@pytest.mark.parametrize("preset", PRESETS)
def test_flowchart_has_all_parts_and_links(preset: str) -> None:
    placed = place_default(preset)
    boxes, edges, groups = parse_mermaid(render_mermaid(placed, build_fact_sheet(model_of(preset))))
    assert len(boxes) == sum(not p.open for p in placed.all())
    assert len(edges) == len(find_links(placed))
    assert len(groups) == sum(p.open for p in placed.all()) - 1


def test_flowchart_labels() -> None:
    text = render_mermaid(place_default("llama3.1-8b"), BARE)
    assert 'subgraph n4["layers 0-31 × 32"]' in text
    assert '["<b>Grouped-query attention</b><br/>attn<br/>32 heads, 8 KV heads · RoPE"]:::k_attention' in text
    assert '["<b>logits</b><br/>f32#91;batch, seq, 128256#93;"]:::k_input' in text


def test_names_are_escaped() -> None:
    boxes, edges, _ = parse_mermaid(render_mermaid(place_odd_name(ODD), Sheet('say "it"', "about\nlines", ())))
    assert len(boxes) == 4 and len(edges) == 3
    (label,) = (text for text in boxes.values() if text.startswith("<b>GELU"))
    back = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), label.partition("<br/>")[2])
    assert back == ODD_LINE
