"""Mermaid, DOT and trees: lines between the right parts, the grammar of each language, names that need escaping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import weft
from weft.backends.viz.formats.dot import render_dot
from weft.backends.viz.formats.mermaid import render_mermaid
from weft.backends.viz.formats.sheet import Sheet
from weft.backends.viz.formats.tree import render_plain_tree
from weft.backends.viz.layout.coordinates import PlacedShape, place_shapes
from weft.backends.viz.layout.links import find_links
from weft.backends.viz.layout.scene import ALL, Shape, build_scene, list_default_open
from weft.backends.viz.model.network import Network, Vertex
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet

from .pages import drawn, model_of, network_of

PRESETS = ("llama3.1-8b", "deepseek-v3", "t5-base", "mamba-130m", "gpt3-175b")
LLAMA = """
input_ids > embed; embed > layers.0.attn_norm; position_ids > layers.0.attn; layers.0.attn_norm > layers.0.attn;
embed > layers.0.attn_residual; layers.0.attn > layers.0.attn_residual; layers.0.attn_residual > layers.0.ffn_norm;
layers.0.ffn_norm > layers.0.ffn; layers.0.attn_residual > layers.0.ffn_residual; layers.0.ffn > layers.0.ffn_residual;
layers.0.ffn_residual > final_norm; final_norm > lm_head; lm_head > out.logits"""


def first(preset: str) -> PlacedShape:
    root = drawn(preset)
    return place_shapes(root, list_default_open(root))


def everything(root: Shape) -> PlacedShape:
    """Every operation in a box of its own, or in that of what it views or adds to."""
    opened = {s.key for s in root.all() if s.arrangement} | {s.key + ALL for s in root.all() if s.part.count > 1}
    for _ in range(4):  # what stands in opened layers is opened too
        opened |= {p.shape.key for p in place_shapes(root, opened).all() if p.shape.arrangement}
    return place_shapes(root, opened)


# -- what reads what


def test_the_lines_of_llama() -> None:
    told = {(a.strip(), b.strip()) for a, b in (pair.split(">") for pair in LLAMA.split(";"))}
    assert set(find_links(first("llama3.1-8b"))) == told


@pytest.mark.parametrize("preset", ["smollm2-135m", "t5-base", "mamba-130m"])
def test_lines_are_those_of_the_graph(preset: str) -> None:
    net = network_of(preset)
    placed = everything(drawn(preset))
    home = {v.name: p.shape.key for p in placed.all() if not p.open for v in p.shape.part.vertices}
    maker = {made: v.name for v in net.vertices for made in v.makes} | {name: name for name in net.inputs}
    wanted = {(home[maker[r]], home[v.name]) for v in net.vertices for r in v.reads}
    wanted |= {(home[maker[value]], f"out.{name}") for name, (value, _) in net.outputs.items()}
    assert set(find_links(placed)) == {(a, b) for a, b in wanted if a != b}


@pytest.mark.parametrize("preset", PRESETS)
def test_lines_join_closed_parts_that_are_drawn(preset: str) -> None:
    placed = first(preset)
    closed = {p.shape.key for p in placed.all() if not p.open}
    found = find_links(placed)
    assert len(found) == len(set(found)) and {key for pair in found for key in pair} == closed


# -- Mermaid


def parsed_mermaid(text: str) -> tuple[dict[str, str], set[tuple[str, str]], list[str]]:
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
def test_mermaid(preset: str) -> None:
    placed = first(preset)
    boxes, edges, groups = parsed_mermaid(render_mermaid(placed, build_fact_sheet(model_of(preset))))
    assert len(boxes) == sum(not p.open for p in placed.all())
    assert len(edges) == len(find_links(placed))
    assert len(groups) == sum(p.open for p in placed.all()) - 1


def test_labels_of_mermaid() -> None:
    text = render_mermaid(first("llama3.1-8b"), BARE)
    assert 'subgraph n4["layers 0-31 × 32"]' in text
    assert '["<b>Grouped-query attention</b><br/>attn<br/>32 heads, 8 KV heads · RoPE"]:::k_attention' in text
    assert '["<b>logits</b><br/>f32#91;batch, seq, 128256#93;"]:::k_input' in text


def odd(name: str) -> PlacedShape:
    """Two operations, the second in a scope and with a name that no language likes."""
    vertices = (
        Vertex("a", "relu", "", ("x",), ("a",), ("x",), ("f32[2]",)),
        Vertex(name, "gelu", "", ("a",), (name,), ("x",), ("f32[2]",)),
    )
    root = build_scene(Network('say "it"', vertices, {"x": "f32[2]"}, {"y": (name, "f32[2]")}))
    return place_shapes(root, [root.key])


BARE = Sheet("title", "", ())  # of a model that has nothing to say
ODD = 'a"b\\n<i>`c` #1; {d} | e\n# &f\x1b[2J'


def test_odd_names() -> None:
    sheet = Sheet('say "it"', "about\nlines", ())
    boxes, edges, _ = parsed_mermaid(render_mermaid(odd(ODD), sheet))
    assert len(boxes) == 4 and len(edges) == 3
    (label,) = (text for text in boxes.values() if text.startswith("<b>GELU"))
    plain = ODD.replace("\n", " ").replace("\x1b", " ")
    back = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), label.partition("<br/>")[2])
    assert back == plain
    statements = parsed_dot(render_dot(odd(ODD), sheet))
    assert len(statements["edges"]) == 3
    assert any(plain in text for text in statements["labels"])
    assert plain in render_plain_tree(odd(ODD), sheet)


# -- DOT


def parsed_dot(text: str) -> Mapping[str, list[str]]:
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
def test_dot(preset: str) -> None:
    placed = first(preset)
    found = parsed_dot(render_dot(placed, build_fact_sheet(model_of(preset))))
    assert len(found["nodes"]) == sum(not p.open for p in placed.all())
    assert len(found["edges"]) == len(set(found["edges"])) == len(find_links(placed))
    assert len(found["clusters"]) == sum(p.open for p in placed.all()) - 1


# -- trees


def test_the_tree_of_mixtral() -> None:
    model = model_of("mixtral-8x7b")
    assert (
        render_plain_tree(first("mixtral-8x7b"), build_fact_sheet(model))
        == """\
mixtral-8x7b                   Mixtral 8x7B v0.1 (Jiang 2024) · decoder                                   46.7 G
├─ input_ids                   i64[batch, seq]
├─ position_ids                i64[batch, seq]
├─ embed                       Embedding · 32,000 × 4,096                                                  131 M
├─ layers 0-31 · experts × 32                                                                             46.4 G
│  ├─ attn_norm                RMSNorm                                                                     4.1 k
│  ├─ attn                     Grouped-query attention · 32 heads, 8 KV heads · RoPE · with position_ids  41.9 M
│  ├─ attn_residual            +
│  ├─ ffn_norm                 RMSNorm                                                                     4.1 k
│  ├─ ffn                      Mixture of experts · 8 experts, 2 active                                   1.41 G
│  └─ ffn_residual             +
├─ final_norm                  RMSNorm                                                                     4.1 k
├─ lm_head                     Linear · 4,096 to 32,000                                                    131 M
└─ logits                      f32[batch, seq, 32000]
"""
    )


def test_a_block_inside_a_layer_is_called_one(tmp_path: Path) -> None:
    """Not by what it has of attention, or of a feed-forward."""
    block = weft.Block(weft.Attention(2), weft.GatedMLP(24))
    weft.draw(weft.Decoder(20, 16, 1, weft.MixtureOfDepths(block)), tmp_path / "tree.txt")
    text = (tmp_path / "tree.txt").read_text()
    assert "Block · RMSNorm, Multi-head attention, SwiGLU feed-forward" in text


@pytest.mark.parametrize("preset", PRESETS)
def test_a_tree_has_a_line_for_every_part(preset: str) -> None:
    placed = first(preset)
    lines = render_plain_tree(placed, BARE).splitlines()
    assert len(lines) == len(list(placed.all()))
    depths = [(len(line) - len(line.lstrip("│├└─ "))) // 3 for line in lines]
    assert depths == [depth for _, depth in walked(placed, 0)]
    counts = [int(n) for n in re.findall(r"× (\d+)(?= {2}|$)", "\n".join(line.partition(" · ")[0] for line in lines))]
    assert all(n > 1 for n in counts)


def walked(placed: PlacedShape, depth: int) -> list[tuple[PlacedShape, int]]:
    return [(placed, depth), *(pair for inner in placed.inner for pair in walked(inner, depth + 1))]
