"""Multi-head latent attention (DeepSeek-V2, 2024), composed of `attention` and products.

Keys and values of all heads are made from one latent c of `rank` numbers per token: k = W_UK c, v = W_UV c; a rotary
part of the key is shared by the heads. `expanded` follows that definition; `absorbed` multiplies W_UK into the queries
and W_UV into the outputs instead, so that it attends to (c, shared key) itself as one KV head of width rank + rotary,
whose value is c again: only that need be cached. Both give the same numbers.
"""

from __future__ import annotations

import math

from ..op import Value
from .products import linear, matmul
from .softmax_attention import attention
from .tensor import concat, expand, flat, per_head, reshape, swap, unsqueeze


def expanded(
    q: Value,
    q_rope: Value,
    latent: Value,
    k_rope: Value,
    up_k: Value,
    up_v: Value,
    *,
    heads: int,
    causal: bool = True,
    scale: float | None = None,
) -> Value:
    """Attention over keys and values made from the latent.

    q [batch, seq, heads·d], q_rope [batch, seq, heads·r] (rotated), latent [batch, keys, rank], k_rope [batch, keys, r]
    (rotated), up_k [heads·d, rank], up_v [heads·dv, rank] → [batch, seq, heads·dv]. `scale` defaults to 1/√(d + r).
    """
    shared = expand(unsqueeze(k_rope, axes=(2,)), shape=(*k_rope.shape[:2], heads, k_rope.width))
    shared = reshape(shared, shape=(*k_rope.shape[:2], heads * k_rope.width))
    k = _join(linear(latent, up_k), shared, heads)
    v = linear(latent, up_v)
    return attention(_join(q, q_rope, heads), k, v, heads=heads, kv_heads=heads, causal=causal, scale=scale)


def absorbed(
    q: Value,
    q_rope: Value,
    latent: Value,
    k_rope: Value,
    up_k: Value,
    up_v: Value,
    *,
    heads: int,
    causal: bool = True,
    scale: float | None = None,
) -> Value:
    """`expanded`, attending to the latent itself."""
    rank, d, dv = latent.width, up_k.shape[0] // heads, up_v.shape[0] // heads
    into = matmul(per_head(q, heads), reshape(up_k, shape=(heads, d, rank)))  # [batch, heads, seq, rank]
    wide = concat(into, per_head(q_rope, heads), axis=3)
    y = attention(
        flat(wide),
        concat(latent, k_rope, axis=2),
        value_dim=rank,
        heads=heads,
        kv_heads=1,
        causal=causal,
        scale=1 / math.sqrt(d + k_rope.width) if scale is None else scale,
    )
    out = swap(reshape(up_v, shape=(heads, dv, rank)))
    return flat(matmul(per_head(y, heads), out))


def _join(x: Value, y: Value, heads: int) -> Value:
    """x and y side by side in every head."""
    return flat(concat(per_head(x, heads), per_head(y, heads), axis=3))
