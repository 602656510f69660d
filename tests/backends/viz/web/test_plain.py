"""Shapes as JSON data: after the page unfolds it, every operation, value and weight is named as in the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from weft.ir import Graph, Param

from ....sampling import each
from ..pages import model_of, of_preset

EXAMPLES = Path(__file__).parents[4] / "examples"
OPS = """() => Object.fromEntries([...index().values()].flatMap(({ shape }) => shape.ops ?? [])
  .map((v) => [v.name, [v.op, v.reads.map((r) => r[1]), v.weights.map((w) => [w[0], w[4]])]]))"""


def describe_operations(graph: Graph) -> dict[str, Any]:
    return {
        node.output.name: [
            node.op.name,
            [v.name for v in node.inputs if v is not None and not isinstance(v, Param)],
            [[v.name, str(v.recipe)] for v in node.inputs if isinstance(v, Param)],
        ]
        for node in graph.nodes
    }


@pytest.mark.parametrize(
    "source",
    each(2, ["gpt3-175b", "deepseek-v3", "t5-base", "mamba-130m", "shared_layers.py", "local_global.py", "hybrid.py"]),
)
def test_every_operation_reads_what_it_reads_in_the_graph(source: str, visit: Callable[[str], Page]) -> None:
    name = str(EXAMPLES / source) if source.endswith(".py") else source
    theirs: dict[str, Any] = visit(of_preset(name)).evaluate(OPS)
    ours = describe_operations(model_of(name).graph)
    named = {name: v for name, v in theirs.items() if v[0] not in ("input", "output")}
    assert named.keys() == ours.keys()
    for name, found in named.items():
        assert found == ours[name], name


def test_every_part_can_be_opened(visit: Callable[[str], Page]) -> None:
    shown = visit(of_preset("gpt3-175b"))
    missed = "[...index().keys()].filter((key, i) => i % 97 === 0 && key && !(go(key) && spots.has(key)))"
    assert shown.evaluate(missed) == []
