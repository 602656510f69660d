"""Ops that compute each token from the same token."""

from __future__ import annotations

import pytest

from weft.ir import parse
from weft.passes.analysis.tokens.tokenwise import find_token_axes, find_token_operands, has_token_axes

HEAD = """graph g {
  input %input_ids: i64[batch, seq]
  input %x: f32[batch, seq, 4]
  input %v: f32[batch, 1, 4]
  param %w: f32[4, 4] = normal([4, 4], std=1.0, stream="w")
  param %row: f32[4] = full(1.0, dims=[4])
  param %column: f32[7, 1] = full(1.0, dims=[7, 1])
  %y: """


@pytest.mark.parametrize(
    ("node", "operands"),
    [
        ("f32[batch, seq, 4] = linear(%x, %w)", (0,)),
        ("f32[batch, seq, 4] = embedding(%input_ids, %w)", (0,)),
        ("f32[batch, seq, 4] = add(%x, %x)", (0, 1)),
        ("f32[batch, seq, 4] = mul(%row, %x)", (1,)),
        ("f32[batch, seq, 4] = add(%x, %v)", (0,)),  # one row for all tokens of a sequence
        ("f32[batch, seq, 4] = softmax(%x)", (0,)),
        ("f32[batch, seq, 4] = softmax(%x, axis=1)", None),
        ("f32[batch, seq] = sum(%x, axes=[2])", (0,)),
        ("f32[batch, seq, 4] = cumsum(%x, axis=1)", None),
        ("f32[batch, 4] = sum(%x, axes=[1])", None),
        ("f32[batch, seq, 2, 2] = reshape(%x, shape=[batch, seq, 2, 2])", (0,)),
        ("f32[seq, batch, 4] = transpose(%x, axes=[1, 0, 2])", None),
        ("f32[batch, seq, 4] = matmul(%x, %w)", (0,)),
        ("f32[batch, seq, 4] = attention(%x, %x, %x, heads=2, kv_heads=2, causal=true)", None),
        ("f32[batch, seq, 4] = attention(%x, %v, %v, heads=2, kv_heads=2)", (0,)),
        ("f32[batch, seq, 4] = attention(%x, %v, %v, heads=2, kv_heads=2, causal=true)", None),
    ],
)
def test_operands_that_carry_tokens(node: str, operands: tuple[int, ...] | None) -> None:
    g = parse(f"{HEAD}{node} output y = %y }}")
    tokens = find_token_axes(g)
    assert tokens == g.inputs["x"].shape[:2]
    (one,) = g.nodes
    assert find_token_operands(one, tokens) == operands


def test_token_axes_without_ids_are_those_of_causal_attention() -> None:
    text = (
        "graph g { input %q: f32[b, s, 4] input %k: f32[b, t, 4] "
        "%y: f32[b, s, 4] = attention(%q, %k, %k, heads=2, kv_heads=2) "
        "%z: f32[b, t, 4] = attention(%k, %k, %k, heads=2, kv_heads=2, causal=true) output y = %y output z = %z }"
    )
    g = parse(text)
    tokens = find_token_axes(g)
    assert tokens == g.inputs["k"].shape[:2]
    assert has_token_axes(g.inputs["k"], tokens) and not has_token_axes(g.inputs["q"], tokens)
    assert not has_token_axes(None, tokens)
    assert find_token_axes(parse(text.replace(", causal=true", ""))) is None
