"""Activations of a graph on texts: computed when they are asked for, in any order."""

from __future__ import annotations

import numpy as np

from weft.ir import interpret
from weft.ir.text import parse
from weft.passes.fitting.calibration import Activations, subsample_rows

GRAPH = """
graph positioned {
  input %input_ids: i64[batch, seq]
  param %table: f32[11, 4] = normal([11, 4], std=1.0, stream="table")
  param %places: f32[16, 4] = normal([16, 4], std=1.0, stream="places")
  param %w: f32[4, 4] = normal([4, 4], std=0.5, stream="w")
  %index: i64[seq] = iota(%input_ids, axis=1)
  %row: i64[1, seq] = unsqueeze(%index, axes=[0])
  %ids: i64[batch, seq] = expand(%row, shape=[batch, seq])
  %word: f32[batch, seq, 4] = embedding(%input_ids, %table)
  %place: f32[batch, seq, 4] = embedding(%ids, %places)
  %x: f32[batch, seq, 4] = add(%word, %place)
  %y: f32[batch, seq, 4] = linear(%x, %w)
  output y = %y
}
"""


def test_discarded_activations_are_computed_again() -> None:
    graph = parse(GRAPH)
    texts = [np.array([[1, 2, 3]]), np.array([[4, 5], [6, 7]])]
    activations = Activations(graph, texts)
    (y,), (linear,) = graph.outputs.values(), [n for n in graph.nodes if n.op.name == "linear"]
    x = linear.required_operand("x")
    for value in (y, x, y, x):  # after its last reader x is dropped, with all that it was made of
        found = activations(value)
        graph.outputs["y"] = value
        for ids, array in zip(texts, found, strict=True):
            np.testing.assert_allclose(array, interpret(graph, {"input_ids": ids})["y"], atol=1e-6)


def test_subsampled_rows_are_spread_over_a_text() -> None:
    texts = [np.arange(40).reshape(10, 4), np.arange(40, 46).reshape(2, 3)]
    kept = subsample_rows(texts, 12)
    assert [ids.tolist() for ids in kept] == [[[4 * i + j for j in range(4)] for i in (0, 3, 6, 9)]]
    assert sum(ids.size for ids in subsample_rows(texts, 1000)) == 46
