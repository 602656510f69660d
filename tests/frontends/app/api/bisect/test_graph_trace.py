"""Traces of graphs: contents, labels, and operations that run again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import weft
from weft.frontends.app.api.bisect.graph_trace import trace_graph
from weft.frontends.app.api.verify.internals import make_inputs
from weft.ir import interpret

IDS = [3, 1, 4, 1, 5]


def test_trace_has_the_values_of_the_interpreter_and_runs_nodes_again(llamas: tuple[Path, Path]) -> None:
    graph = weft.load_source(llamas[0]).graph
    inputs = make_inputs(graph.inputs, IDS)
    steps: list[tuple[int, int]] = []
    trace = trace_graph(graph, inputs, lambda done, total: steps.append((done, total)))
    want = interpret(graph, inputs)["logits"]
    np.testing.assert_array_equal(trace.values[trace.outputs["logits"]], want)
    assert steps[-1] == (len(graph), len(graph)) == (len(trace.operations), len(graph))
    norm = trace.makers["layers.1.attn_norm"]
    operands = [trace.load(name) for name in norm.reads]
    np.testing.assert_array_equal(norm.run(operands, norm.attrs)[0], trace.values["layers.1.attn_norm"])
    assert np.abs(norm.run(operands, {**norm.attrs, "eps": 1.0})[0] - trace.values["layers.1.attn_norm"]).max() > 0.01


def test_labels_are_the_modules_of_the_checkpoint(llamas: tuple[Path, Path]) -> None:
    graph = weft.load_source(llamas[0]).graph
    labels = trace_graph(graph, make_inputs(graph.inputs, IDS)).labels
    assert labels["model.layers.2.mlp.down_proj"] == "layers.2.ffn.down"
    assert labels["model.embed_tokens"] == "embed"
