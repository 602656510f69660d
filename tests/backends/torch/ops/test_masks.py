"""Attention masks in PyTorch, as expressions of the positions of queries and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.ops.masks import has_position_mask, is_dense, is_shared, write_visibility
from weft.ir import Node, Value, dtypes, ops
from weft.ir.types.sizes import sym

from ....masks import SETTINGS, sees
from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


def attention(**attrs: Any) -> Node:
    graph = build_graph(
        lambda x, y, z: ops.attention(x, y, z, heads=2, kv_heads=2, **attrs), (B, S, 8), (B, S, 8), (B, S, 8)
    )
    (node,) = graph.nodes
    return node


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_visibility_is_the_rule_of_each_pair_of_tokens(name: str, causal: bool) -> None:
    rule = write_visibility(attention(causal=causal, **SETTINGS[name]))
    if not SETTINGS[name] and not causal:
        assert rule == ""
        return
    at = torch.arange(17)
    visible = eval(rule.format("q", "k"), {"q": at[:, None], "k": at[None]})
    assert visible.tolist() == [[sees(q, k, causal=causal, **SETTINGS[name]) for k in range(17)] for q in range(17)]


def test_positions_alone_decide_where_no_mask_or_bias_is_read() -> None:
    assert has_position_mask(attention(causal=True, window=3))
    assert has_position_mask(attention(causal=True, softcap=5.0))
    assert not has_position_mask(attention(causal=True))  # torch computes it with is_causal
    assert not has_position_mask(attention(causal=False, softcap=5.0))
    masked = build_graph(
        lambda x, y: ops.attention(x, x, x, key_mask=y, heads=2, kv_heads=2, causal=True, window=3), (B, S, 8), (B, S)
    )
    assert not has_position_mask(next(iter(masked.nodes)))
    assert [is_dense(attention(causal=True, **a)) for a in ({"window": 3}, {"pattern": "chunked", "stride": 4})] == [
        True,
        False,
    ]


def test_a_key_mask_and_causality_are_both_required() -> None:
    def make(x: Any, y: Any) -> Any:
        return ops.attention(x, x, x, key_mask=y, heads=2, kv_heads=2, causal=True)

    forward = write_forward(build_graph(make, (B, S, 8), (B, S)))
    assert "mask = queries >= torch.arange" in forward
    assert "attn_mask=mask & (y[:, None, None, :] != 0)" in forward


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("masks"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


def positions(x: Value) -> Value:
    return ops.cast(x, to=dtypes.i64)


@pytest.mark.parametrize(("symmetric", "distance"), [(False, "distance"), (True, "-distance.abs()")])
def test_alibi_multiplies_slopes_by_the_distance(symmetric: bool, distance: str) -> None:
    graph = build_graph(
        lambda x, y, w: ops.alibi(w, positions(x), positions(y), symmetric=symmetric), (B, S), (B, S), w=(2,)
    )
    difference = "y.to(torch.int64)[:, None, :] - x.to(torch.int64)[:, :, None]"
    forward = write_forward(graph).replace(f"distance = {difference}\n", "").replace(difference, "distance")
    assert forward == f"return alibi(self.w.weight, {distance})"


@pytest.mark.parametrize(("both", "function"), [(True, "relative_bias"), (False, "causal_relative_bias")])
def test_relative_position_bias_is_causal_or_of_both_directions(both: bool, function: str) -> None:
    graph = build_graph(
        lambda x, y, w: ops.relative_position_bias(w, positions(x), positions(y), bidirectional=both, max_distance=64),
        *((B, S), (B, S)),
        w=(8, 2),
    )
    assert f"{function}(self.w.weight, distance, 64)" in write_forward(graph)


def test_values_of_the_models_own_forward_are_shared_between_layers() -> None:
    graph = build_graph(lambda x: ops.exp(x), (B, S))
    x = graph.inputs["x"]
    with graph.scope("layers.0"):
        inner = ops.exp(x)
    assert [is_shared(v) for v in (x, x.uses[0][0].output, inner)] == [True, True, False]
