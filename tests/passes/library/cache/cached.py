"""Decoders that get caches, and attention whose bias depends on positions."""

from __future__ import annotations

from collections.abc import Callable

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.types import dtypes

from ...models import BATCH, SEQ, Tiny, weight

DECODERS = [
    Tiny(),
    Tiny(window=3, bias="q k v", qk_norm=True),
    Tiny(kv_heads=6, tied=True, layers=1),
    Tiny(rope=False, norm="layer"),
    Tiny(rope=False, alibi=True),
]


def position_biased(build: Callable[[Graph, Value, Value], Value], layers: int = 2) -> Graph:
    g = Graph("biased")
    g.meta["kind"] = "decoder"
    ids, at = (g.add_input(n, TensorType(dtypes.i64, (BATCH, SEQ))) for n in ("input_ids", "position_ids"))
    x = ops.embedding(ids, weight(g, "embed", 31, 12))
    bias = build(g, ids, at)
    for _ in range(layers):
        x = ops.add(x, ops.attention(x, x, x, bias, heads=3, kv_heads=3, causal=True))
    g.add_output("logits", ops.linear(x, weight(g, "head", 31, 12)))
    return g


def chosen(g: Graph, ids: Value, at: Value) -> Value:
    """Queries choose three keys."""
    x = ops.embedding(ids, weight(g, "embed of the index", 31, 14))
    q, k, weights = ops.split.emit(x, sizes=(8, 4, 2))
    return ops.lightning_index(q, k, weights, heads=2, top_k=3, causal=True)
