"""One attention with weights of choice around a residual sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.ir import Graph, Node, TensorType, ops
from weft.ir.recipes import Source
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes

from ..models import BATCH, SEQ, Tiny

RNG = np.random.default_rng


WIDTH, HEADS, D = 11, 6, 8


METHODS = ("mean", "first", "svd")


def attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op is ops.attention]


def attention_graph(
    weights: dict[str, np.ndarray], kv_heads: int, pairs: int = 0, interleaved: bool = False, scale: float | None = None
) -> Graph:
    """Tokens embedded, an attention with these `weights` (float64) around, and a residual sum."""
    g = Graph("one", MemoryReader(weights))

    def param(name: str) -> Any:
        return g.add_param(name, TensorType(dtypes.f32, weights[name].shape), Source(name)) if name in weights else None

    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    x = ops.embedding(ids, param("table"))
    q, k, v = (ops.linear(x, param(f"{r}.weight"), param(f"{r}.bias"), name=r) for r in "qkv")
    if pairs:
        at = g.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
        frequencies = g.add_param("f", TensorType(dtypes.f32, (pairs,)), RopeFrequencies(2 * pairs, theta=50.0))
        q, k = (ops.rope(t, at, frequencies, heads=n, interleaved=interleaved) for t, n in ((q, HEADS), (k, kv_heads)))
    y = ops.attention(q, k, v, heads=HEADS, kv_heads=kv_heads, causal=True, scale=scale)
    g.add_output("y", ops.add(x, ops.linear(y, param("o.weight"), name="o")))
    return g


def drawn(kv_heads: int, biases: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = RNG(seed)
    rows = {"q": HEADS * D, "k": kv_heads * D, "v": kv_heads * D}
    found = {"table": rng.standard_normal((37, WIDTH)), "o.weight": rng.standard_normal((WIDTH, HEADS * D)) / 7}
    found |= {f"{r}.weight": rng.standard_normal((n, WIDTH)) / 3 for r, n in rows.items()}
    return found | {f"{r}.bias": rng.standard_normal(n) for r, n in rows.items() if r in biases}


MODELS = {
    "rope": Tiny(kv_heads=6),
    "groups": Tiny(heads=8, kv_heads=4, bias="q k v"),
    "no rope": Tiny(kv_heads=6, rope=False, bias="v", norm="layer"),
    "norms of heads": Tiny(kv_heads=6, qk_norm=True),
    "biased scores, window": Tiny(kv_heads=6, rope=False, alibi=True, window=3),
}
