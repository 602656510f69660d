"""DOT graphs: grammar, nodes, edges, escaped names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from weft.backends.viz.formats.flowcharts import find_links, render_dot, render_mermaid
from weft.backends.viz.formats.style import Sheet
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet

from ..formats.placed import BARE, ODD, ODD_LINE, PRESETS, place_default, place_everything, place_odd_name
from ..pages import drawn, model_of, network_of


def parse_dot(text: str) -> Mapping[str, list[str]]:
    """Nodes, edges, clusters and labels, by the grammar of the language DOT."""
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|->|[\w.]+|[{}\[\]=,]|\S', text)
    assert tokens[0] == "digraph" and tokens[2] == "{" and tokens[-1] == "}"
    nodes, edges, clusters, labels = list[str](), list[str](), list[str](), list[str]()
    at, depth = 3, 1

    def attributes() -> None:
        nonlocal at
        if tokens[at] == "[":
            while tokens[at] != "]":
                assert tokens[at] in "[," and re.fullmatch(r"\w+", tokens[at + 1]) and tokens[at + 2] == "="
                value = tokens[at + 3]
                assert value[0] == '"' or re.fullmatch(r"[\w.]+", value)
                if tokens[at + 1] == "label":
                    labels.append(re.sub(r"\\([\"\\])", r"\1", value[1:-1]))
                at += 4
            at += 1

    while depth:
        word = tokens[at]
        at += 1
        if word == "}":
            depth -= 1
        elif word == "subgraph":
            clusters.append(tokens[at])
            assert tokens[at].startswith("cluster_") and tokens[at + 1] == "{"
            at, depth = at + 2, depth + 1
        elif word in ("graph", "node", "edge"):
            attributes()
        elif tokens[at] == "->":
            assert {word, tokens[at + 1]} <= set(nodes)
            edges.append(f"{word} {tokens[at + 1]}")
            at += 2
        else:
            assert re.fullmatch(r"n\d+", word) and word not in nodes
            nodes.append(word)
            attributes()
    assert at == len(tokens)
    return {"nodes": nodes, "edges": edges, "clusters": clusters, "labels": labels}


@pytest.mark.parametrize("preset", PRESETS)
def test_graph_has_all_parts_and_links(preset: str) -> None:
    placed = place_default(preset)
    found = parse_dot(render_dot(placed, build_fact_sheet(model_of(preset))))
    assert len(found["nodes"]) == sum(not p.open for p in placed.all())
    assert len(found["edges"]) == len(set(found["edges"])) == len(find_links(placed))
    assert len(found["clusters"]) == sum(p.open for p in placed.all()) - 1


def test_names_are_escaped() -> None:
    statements = parse_dot(render_dot(place_odd_name(ODD), Sheet('say "it"', "about\nlines", ())))
    assert len(statements["edges"]) == 3
    assert any(ODD_LINE in text for text in statements["labels"])


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


def test_names_are_escaped_in_mermaid() -> None:
    boxes, edges, _ = parse_mermaid(render_mermaid(place_odd_name(ODD), Sheet('say "it"', "about\nlines", ())))
    assert len(boxes) == 4 and len(edges) == 3
    (label,) = (text for text in boxes.values() if text.startswith("<b>GELU"))
    back = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), label.partition("<br/>")[2])
    assert back == ODD_LINE


LLAMA = """
input_ids > embed; embed > layers.0.attn_norm; position_ids > layers.0.attn; layers.0.attn_norm > layers.0.attn;
embed > layers.0.attn_residual; layers.0.attn > layers.0.attn_residual; layers.0.attn_residual > layers.0.ffn_norm;
layers.0.ffn_norm > layers.0.ffn; layers.0.attn_residual > layers.0.ffn_residual; layers.0.ffn > layers.0.ffn_residual;
layers.0.ffn_residual > final_norm; final_norm > lm_head; lm_head > out.logits"""


def test_links_of_llama() -> None:
    told = {(a.strip(), b.strip()) for a, b in (pair.split(">") for pair in LLAMA.split(";"))}
    assert set(find_links(place_default("llama3.1-8b"))) == told


@pytest.mark.parametrize("preset", ["smollm2-135m", "t5-base", "mamba-130m"])
def test_links_equal_the_edges_of_the_graph(preset: str) -> None:
    net = network_of(preset)
    placed = place_everything(drawn(preset))
    home = {v.name: p.shape.key for p in placed.all() if not p.open for v in p.shape.part.vertices}
    maker = {made: v.name for v in net.vertices for made in v.makes} | {name: name for name in net.inputs}
    wanted = {(home[maker[r]], home[v.name]) for v in net.vertices for r in v.reads}
    wanted |= {(home[maker[value]], f"out.{name}") for name, (value, _) in net.outputs.items()}
    assert set(find_links(placed)) == {(a, b) for a, b in wanted if a != b}


@pytest.mark.parametrize("preset", PRESETS)
def test_links_join_closed_parts_once(preset: str) -> None:
    placed = place_default(preset)
    closed = {p.shape.key for p in placed.all() if not p.open}
    found = find_links(placed)
    assert len(found) == len(set(found)) and {key for pair in found for key in pair} == closed
