"""Names in folded layers on the page: every operation, value and weight as in the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from weft import load_source
from weft.backends.viz.layout.scene import scene, unfolded
from weft.backends.viz.model.network import network
from weft.backends.viz.web.page import page
from weft.ir import Graph, Param

EXAMPLES = Path(__file__).parents[3] / "examples"
OPS = """() => Object.fromEntries([...index().values()].flatMap(({ shape }) => shape.ops ?? [])
  .map((v) => [v.name, [v.op, v.reads.map((r) => r[1]), v.weights.map((w) => [w[0], w[4]])]]))"""


def facts_of(graph: Graph) -> dict[str, Any]:
    return {
        node.output.name: [
            node.op.name,
            [v.name for v in node.inputs if v is not None and not isinstance(v, Param)],
            [[v.name, str(v.recipe)] for v in node.inputs if isinstance(v, Param)],
        ]
        for node in graph.nodes
    }


@pytest.mark.parametrize(
    "source", ["deepseek-v3", "gpt3-175b", "t5-base", "mamba-130m", "shared_layers.py", "hybrid.py", "local_global.py"]
)
def test_every_operation_reads_what_it_reads_in_the_graph(source: str, visit: Callable[[str], Page]) -> None:
    graph = load_source(str(EXAMPLES / source) if source.endswith(".py") else source).graph
    root = scene(network(graph))
    theirs: dict[str, Any] = visit(page(root, unfolded(root))).evaluate(OPS)
    ours = facts_of(graph)
    named = {name: v for name, v in theirs.items() if v[0] not in ("input", "output")}
    assert named.keys() == ours.keys()
    for name, found in named.items():
        assert found == ours[name], name


def test_what_can_be_opened_can_be_reached(visit: Callable[[str], Page]) -> None:
    graph = load_source("gpt3-175b").graph
    root = scene(network(graph))
    shown = visit(page(root, unfolded(root)))
    missed = "[...index().keys()].filter((key, i) => i % 97 === 0 && key && !(go(key) && spots.has(key)))"
    assert shown.evaluate(missed) == []
