"""Softmax attention in PyTorch: heads, masks, and the functions that compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.ops.attention import find_role
from weft.ir import Value, dtypes, ops
from weft.ir.types.sizes import sym

from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.halved
@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("attention"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


QKV = (B, S, 8), (B, S, 4), (B, S, 4)
HEADS = {"heads": 2, "kv_heads": 1}


def write_attention(**attrs: Any) -> list[str]:
    """Write an attention of two query heads and one KV head; return its statements."""
    return write_forward(build_graph(lambda x, y, z: ops.attention(x, y, z, **HEADS, **attrs), *QKV)).split("\n")


def test_attention_is_that_of_torch() -> None:
    assert write_attention(causal=True) == [
        "q = x.unflatten(-1, (-1, 4)).transpose(1, 2)",
        "k = y.unflatten(-1, (-1, 4)).transpose(1, 2)",
        "v = z.unflatten(-1, (-1, 4)).transpose(1, 2)",
        "x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)",
        "return x.transpose(1, 2).flatten(2)",
    ]


def test_attention_leaves_out_defaults() -> None:
    """The scale 1/√d and equal numbers of heads are what torch assumes."""
    graph = build_graph(lambda x, y: ops.attention(x, y, y, heads=2, kv_heads=2, scale=0.5), (B, S, 8), (B, S, 8))
    assert "scale" not in write_forward(graph).replace("scaled_", "")
    assert "scale=0.25" in "".join(write_attention(scale=0.25))
    assert "enable_gqa" not in write_forward(graph)


def test_attention_with_a_window_calls_attend() -> None:
    *_, near, call, _ = write_attention(causal=True, window=3)
    assert "lambda q, k: (q - k < 3) & (q >= k)" in near
    assert call == "x = attend(q, k, z.unflatten(-1, (-1, 4)).transpose(1, 2), near, window=3)"
    assert "attend(" in write_attention(causal=True, softcap=5.0)[-2]


def test_rope_rotates_the_heads_that_attention_reads() -> None:
    def make(x: Value, y: Value, z: Value) -> Value:
        q = ops.rope(x, ops.cast(y, to=dtypes.i64), z, heads=2)
        return ops.attention(q, x, x, heads=2, kv_heads=2, causal=True)

    forward = write_forward(build_graph(make, (B, S, 8), (B, S), (2,)))
    assert "q = rotate(x.unflatten(-1, (-1, 4)).transpose(1, 2), cos, sin)" in forward
    assert forward.count(".unflatten(") == 3  # q, k and v once each


def test_find_role_is_the_operand_that_all_readers_agree_on() -> None:
    graph = build_graph(lambda x, y, z: ops.attention(x, y, z, **HEADS), *QKV)
    assert [find_role(v) for v in graph.inputs.values()] == ["q", "k", "v"]
    graph = build_graph(lambda x: ops.attention(x, x, x, heads=2, kv_heads=2), (B, S, 8))
    assert find_role(graph.inputs["x"]) == ""
