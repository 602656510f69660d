"""Graphs of the example cases of ops."""

from __future__ import annotations

import numpy as np

from weft.ir import OPS, interpret
from weft.ir.op import case, normal
from weft.ir.testing import build_node_graph, expand_bodies
from weft.ir.types import dtypes


def test_node_graph_applies_the_op_to_the_drawn_operands() -> None:
    graph, feeds = build_node_graph(OPS["concat"], case(normal(2, 3), normal(2, 1), axis=1), seed=4, dtype=dtypes.f16)
    assert {name: str(v.type) for name, v in graph.inputs.items()} == {"xs0": "f16[2, 3]", "xs1": "f16[2, 1]"}
    assert [node.op.name for node in graph.nodes] == ["concat"] and [*graph.outputs] == ["y0"]
    np.testing.assert_array_equal(interpret(graph, feeds)["y0"], np.concatenate([*feeds.values()], 1))


def test_weights_become_parameters_and_absent_operands_stay_absent() -> None:
    graph, feeds = build_node_graph(OPS["layer_norm"], case(normal(2, 3), None, normal(3), eps=0.5), weights=("bias",))
    assert ([*graph.inputs], [*graph.params], [*feeds]) == (["x"], ["bias"], ["x"])
    (node,) = graph.nodes
    assert node.operand("weight") is None and node.attrs["eps"] == 0.5
    x = feeds["x"]
    bias = graph.params["bias"].recipe.evaluate(graph.reader)
    wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 0.5) + bias
    np.testing.assert_allclose(interpret(graph, feeds)["y0"], wanted, rtol=1e-12)


def test_expand_bodies_replaces_nodes_by_their_bodies_once() -> None:
    graph, feeds = build_node_graph(OPS["relu2"], case(normal(5)))
    expanded = expand_bodies(graph)
    assert [node.op.name for node in graph.nodes] == ["relu2"]
    assert [node.op.name for node in expanded.nodes] == ["relu", "mul"]
    np.testing.assert_array_equal(interpret(expanded, feeds)["y0"], np.maximum(feeds["x"], 0) ** 2)
