"""Biases of attention counted along the mask, so that they cover cached keys."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, Value, WeftError, interpret, parse
from weft.passes.analysis.tokens.scores import find_bias_nodes
from weft.passes.library.cache.key_axis import BiasExtension

HEAD = """graph g {
  input %input_ids: i64[batch, seq]
  input %position_ids: i64[batch, seq]
  input %attention_mask: i64[batch, total]
  param %slopes: f32[2] = alibi_slopes(2)
"""
ALIBI = """  %bias: f32[batch, 2, seq, seq] = alibi(%slopes, %position_ids, %position_ids)
  output bias = %bias
}"""
COUNTED = """  %count: i64[seq] = iota(%input_ids, axis=1)
  %keys: i64[1, seq] = unsqueeze(%count, axes=[0])
  %bias: f32[batch, 2, seq, seq] = alibi(%slopes, %position_ids, %keys)
  output bias = %bias
}"""
SQUARE = """  %count: i64[seq] = iota(%input_ids, axis=1)
  %keys: i64[1, seq] = unsqueeze(%count, axes=[0])
  %bias: f32[1, 2, seq, seq] = alibi(%slopes, %keys, %keys)
  output bias = %bias
}"""


def extend(body: str) -> tuple[Graph, Value | None]:
    g = parse(HEAD + body)
    bias = g.outputs["bias"]
    extension = BiasExtension(g, g.inputs["attention_mask"], g.inputs["position_ids"], find_bias_nodes(g, [bias]))
    new = extension.extend(bias)
    assert new is not None
    g.outputs["bias"] = new
    extension.drop_unused()
    return g, new


@pytest.mark.parametrize("body", [ALIBI, COUNTED], ids=["positions", "counted"])
def test_extended_bias_has_a_column_for_each_slot(body: str) -> None:
    g, new = extend(body)
    assert new is not None and str(new.type) == "f32[batch, 2, seq, total]" and new.name == "bias"
    feeds = {"position_ids": np.array([[3, 4]]), "attention_mask": np.ones((1, 6), np.int64)}
    found = interpret(g, {"input_ids": np.zeros((1, 2), np.int64), **feeds})["bias"]
    assert found.shape == (1, 2, 2, 6)
    np.testing.assert_allclose(np.diff(found[0], axis=2), [[[1 / 16] * 5] * 2, [[1 / 256] * 5] * 2])
    assert not any(n.op.name == "iota" and n.inputs[0] is g.inputs["input_ids"] for n in g.nodes)


def test_bias_that_counts_its_queries_is_refused() -> None:
    with pytest.raises(WeftError, match="kv-cache: bias %bias does not extend to cached keys: compute it from an iota"):
        extend(SQUARE)
    extension = BiasExtension(g := parse(HEAD + ALIBI), g.inputs["attention_mask"], g.inputs["position_ids"], [])
    assert extension.extend(None) is None
