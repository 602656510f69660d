"""Shapes as JSON data: after the page unfolds it, every operation, value and weight is named as in the graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Network, Vertex
from weft.backends.viz.web.plain import Move, convert_shape
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
def test_every_operation_has_the_operands_of_the_graph(source: str, visit: Callable[[str], Page]) -> None:
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


def test_layer_number_of_a_name_is_increased() -> None:
    move = Move("layers.", 1, 0, 5)
    assert move.rename("layers.0.attn.q", 7) == "layers.7.attn.q"
    assert move.rename("layers.0-5.attn", 6) == "layers.6-11.attn"
    assert move.rename("layers.norm", 7) == "layers.norm"
    assert move.rename("embed", 7) == "embed"


def test_first_layer_number_of_a_quoted_tensor_name_is_increased() -> None:
    move = Move("layers.", 1, 2, 5)
    assert move.rename("source('model.0.h.2.w.3')", 7) == "source('model.0.h.9.w.3')"
    assert move.rename("""concat((source("h.9.w"), 2))""", 7) == """concat((source("h.9.w"), 2))"""  # not its layer


def test_shape_data_is_json_with_the_rounds_of_a_repeat() -> None:
    reads = {"layers.0.a": "x", "layers.1.a": "layers.0.b", "layers.2.a": "layers.1.b"}
    reads |= {f"layers.{i}.b": f"layers.{i}.a" for i in range(3)}
    vertices = tuple(
        Vertex(name, "relu" if name[-1] == "a" else "gelu", name[:8], (reads[name],), (name,), ("x",), ("f32[n]",))
        for name in sorted(reads)
    )
    root = build_scene(Network("net", vertices, {"x": "f32[n]"}, {"y": ("layers.2.b", "f32[n]")}))
    data = json.loads(json.dumps(convert_shape(root)))
    assert [shape["key"] for shape in data["inner"]] == ["x", "layers.0-2", "out.y"]
    assert (data["inner"][0]["ops"][0]["op"], data["box"]) == ("input", ["c", 0, 1, 2])
    repeat = data["inner"][1]["repeat"]
    assert (repeat["count"], repeat["period"], repeat["parallel"], repeat["once"]["key"]) == (3, 1, False, "layers.0")
    # The second round differs from the first in what it reads; every later one is the second with other numbers.
    assert repeat["changed"]["1"][0] == [["title"], "layer 1"] and repeat["changed"]["2"] == [[["title"], "layer 2"]]
    assert [["inner", 0, "ops", 0, "reads", 0, 1], "layers.0.b"] in repeat["changed"]["1"]
