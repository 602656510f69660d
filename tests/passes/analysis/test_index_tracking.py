"""Features tracked from a linear to an attention, through ops that move them."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, Value, parse
from weft.passes.analysis.index_tracking import (
    Destination,
    LinearOrigin,
    trace_destination,
    trace_origin,
    trace_sources,
)

HEAD = """graph g {
  input %x: f32[batch, seq, 3]
  input %z: f32[batch, seq, 2]
  param %w: f32[8, 3] = normal([8, 3], std=1.0, stream="w")
  param %norm: f32[4] = normal([4], std=1.0, stream="n")
"""


def graph(body: str) -> Graph:
    return parse(f"{HEAD}{body}\n}}")


def value(g: Graph, name: str) -> Value:
    return next(v for n in g.nodes for v in n.outputs if v.name == name)


def test_sources_of_concatenated_and_split_features() -> None:
    g = graph(
        "%a: f32[batch, seq, 1], %b: f32[batch, seq, 2] = split(%x, sizes=[1, 2], axis=2) "
        "%y: f32[batch, seq, 5] = concat(%b, %z, %a, axis=2) output y = %y"
    )
    sources = trace_sources(value(g, "y"))
    assert {v.name: indices.tolist() for v, indices in sources.items()} == {"x": [2, 3, 0, 0, 1], "z": [0, 0, 1, 2, 0]}


ROTATED = """
  %q: f32[batch, seq, 8] = linear(%x, %w)
  %heads: f32[batch, seq, 2, 4] = reshape(%q, shape=[batch, seq, 2, 4])
  %normed: f32[batch, seq, 2, 4] = rms_norm(%heads, %norm)
  %low: f32[batch, seq, 2, 2], %high: f32[batch, seq, 2, 2] = split(%normed, sizes=[2, 2])
  %y: f32[batch, seq, 4] = reshape(%high, shape=[batch, seq, 4])
  output y = %y"""


CUT = "%high: f32[batch, seq, 2, 2] = slice(%normed, axis=3, start=2, stop=4)"
SPLIT = "%low: f32[batch, seq, 2, 2], %high: f32[batch, seq, 2, 2] = split(%normed, sizes=[2, 2])"


@pytest.mark.parametrize(("line", "op"), [(CUT, "slice"), (SPLIT, "split")])
def test_origin_is_the_row_of_the_weight_of_each_feature(line: str, op: str) -> None:
    origin = trace_origin(value(graph(ROTATED.replace(SPLIT, line)), "high"))
    assert isinstance(origin, LinearOrigin) and origin.linear.output.name == "q"
    assert [node.op.name for node, _ in origin.steps] == ["reshape", "rms_norm", op]
    assert origin.labels.tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("rms_norm(%heads, %norm)", "softmax(%heads)", "%normed is made by softmax, not by a linear"),
        ("linear(%x, %w)", "concat(%x, %z, %x, axis=2)", "%q is made by concat, not by a linear"),
        ("  output y", "  output q = %q\n  output y", "%q is also read elsewhere"),
    ],
)
def test_origin_states_what_is_in_the_way(old: str, new: str, reason: str) -> None:
    assert trace_origin(value(graph(ROTATED.replace(old, new)), "high")) == reason


READ = """graph g {
  input %x: f32[batch, seq, 3]
  input %k: f32[batch, seq, 4]
  param %w: f32[8, 3] = normal([8, 3], std=1.0, stream="w")
  %q: f32[batch, seq, 8] = linear(%x, %w)
  %heads: f32[batch, seq, 2, 4] = reshape(%q, shape=[batch, seq, 2, 4])
  %step: f32[batch, seq, 2, 4] = STEP
  %flat: f32[batch, seq, 8] = reshape(%step, shape=[batch, seq, 8])
  %y: f32[batch, seq, 8] = attention(%flat, %k, %k, heads=2, kv_heads=1)
  output y = %y
}"""


def read(step: str) -> Value:
    """Return the queries of an attention with the op `step` on their heads."""
    return value(parse(READ.replace("STEP", step)), "q")


def test_destination_is_the_attention_with_the_labels_of_its_heads() -> None:
    found = trace_destination(read("affine(%heads, by=0.5)"), np.arange(8))
    assert isinstance(found, Destination) and found.role == "q" and found.node.op.name == "attention"
    assert found.labels.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_destination_behind_a_norm_needs_rows_with_equal_labels() -> None:
    step = "rms_norm(%heads)"
    assert isinstance(trace_destination(read(step), np.tile([0, 1, 2, 3], 2)), Destination)
    assert isinstance(trace_destination(read(step), np.array([0, 1, 2, 3, 3, 2, 1, 0])), Destination)
    assert trace_destination(read(step), np.arange(8)) == "%heads is read by rms_norm, not by an attention"


def test_destination_stops_at_ops_that_mix_features() -> None:
    assert trace_destination(read("softmax(%heads)"), np.arange(8)) == "%heads is read by softmax, not by an attention"
