"""DOT graphs: grammar, nodes, edges, escaped names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from weft.backends.viz.formats.dot import render_dot
from weft.backends.viz.formats.sheet import Sheet
from weft.backends.viz.layout.links import find_links
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet

from ..pages import model_of
from .placed import ODD, ODD_LINE, PRESETS, place_default, place_odd_name


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
