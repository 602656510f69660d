"""Multi-head latent attention (DeepSeek-V2, 2024), composed of `attention` and products.

Keys and values of all heads are projections of one latent c [batch, keys, rank]: k = W_UK c, v = W_UV c; the heads
share a rotary part of the key. `emit_expanded` follows that definition. `emit_absorbed` computes the same function, but
multiplies the queries by W_UK and the outputs by W_UV instead: it attends to (c, rotary key) as one KV head of width
rank + rotary, whose value is c. Then only c and the rotary key need a cache.
"""

from __future__ import annotations

import math
from typing import Any

from ..op import OpCall, TensorType, Trait, Value, case, normal, require, sizes
from .declaration import composed_op
from .products import linear, matmul
from .softmax_attention import attention
from .tensor import concat, expand, merge_heads, reshape, split_heads, swap_last_axes, unsqueeze


@composed_op(
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 5, 12), normal(6, 4), heads=3),
        case(normal(2, 5, 6), normal(6, 4), heads=3, inverse=True),
        case(normal(2, 1, 8), normal(8, 8), heads=1),
    ],
)
def head_linear(x: Value, weight: Value, *, heads: int, inverse: bool = False) -> Value:
    """y_h = W_h x_h for every head h, or y_h = W_hᵀ x_h with `inverse`.

    x [batch, n, heads·in], weight [heads·out, in], the rows of head 0 first → [batch, n, heads·out]. With `inverse` x
    is [batch, n, heads·out] and the result [batch, n, heads·in].
    """
    rows, width = weight.shape
    weight = reshape(weight, shape=(heads, rows // heads, width))
    return merge_heads(matmul(split_heads(x, heads), weight if inverse else swap_last_axes(weight)))


@head_linear.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    weight: TensorType = n.weight
    fixed = weight.rank == 2 and all(isinstance(s, int) for s in weight.shape)
    require(fixed and x.dtype == weight.dtype, f"weight {weight} must be [heads·out, in] in the dtype of x {x}")
    rows, width = weight.shape
    require(n.heads > 0 and rows % n.heads == 0, f"the rows of weight {weight} are not a multiple of heads={n.heads}")
    width_in, width_out = (rows, n.heads * width) if n.inverse else (n.heads * width, rows)
    require(x.rank == 3 and x.shape[2] == width_in, f"x {x} must be [batch, n, {width_in}] for weight {weight}")
    return x.with_shape(*x.shape[:2], width_out)


head_linear.cost(lambda n: sizes.multiply_sizes(n.x.shape[:2]) * n.weight.elements * 2)


# -- compositions


def emit_expanded(
    q: Value,
    q_rope: Value | None,
    latent: Value,
    k_rope: Value | None,
    up_k: Value,
    up_v: Value,
    *masks: Value | None,
    heads: int,
    causal: bool = True,
    **attrs: Any,
) -> Value:
    """Emit latent attention over keys and values that are projected from the latent.

    q [batch, seq, heads·d], q_rope [batch, seq, heads·r] (already rotated), latent [batch, keys, rank], k_rope
    [batch, keys, r] (already rotated), up_k [heads·d, rank], up_v [heads·dv, rank] → [batch, seq, heads·dv]. q_rope and
    k_rope are None without a rotary part. `masks` are the operands bias, key_mask and sinks of `attention`, `attrs` its
    other attributes; `scale` defaults to 1/√(d + r).
    """
    k, v = linear(latent, up_k), linear(latent, up_v)
    if q_rope is not None and k_rope is not None:
        shared = expand(unsqueeze(k_rope, axes=(2,)), shape=(*k_rope.shape[:2], heads, k_rope.width))
        shared = reshape(shared, shape=(*k_rope.shape[:2], heads * k_rope.width))
        q, k = _concat_heads(q, q_rope, heads), _concat_heads(k, shared, heads)
    return attention(q, k, v, *masks, heads=heads, kv_heads=heads, causal=causal, **attrs)


def emit_absorbed(
    q: Value,
    q_rope: Value | None,
    latent: Value,
    k_rope: Value | None,
    up_k: Value,
    up_v: Value,
    *masks: Value | None,
    heads: int,
    causal: bool = True,
    scale: float | None = None,
    **attrs: Any,
) -> Value:
    """Emit the function of `emit_expanded` (same arguments and result) as attention to the latent as one KV head."""
    rotary_width = k_rope.width if k_rope is not None else 0
    scale = 1 / math.sqrt(q.width // heads + rotary_width) if scale is None else scale
    q, k = head_linear(q, up_k, heads=heads, inverse=True), latent
    if q_rope is not None and k_rope is not None:
        q, k = _concat_heads(q, q_rope, heads), concat(latent, k_rope, axis=2)
    attrs |= {"heads": heads, "kv_heads": 1, "causal": causal, "scale": scale, "value_dim": latent.width}
    return head_linear(attention(q, k, None, *masks, **attrs), up_v, heads=heads)


def _concat_heads(x: Value, y: Value, heads: int) -> Value:
    """Concatenate x [batch, n, heads·a] and y [batch, n, heads·b] within every head: [batch, n, heads·(a + b)]."""
    by_head = (reshape(t, shape=(*t.shape[:2], heads, t.width // heads)) for t in (x, y))
    return reshape(concat(*by_head, axis=3), shape=(*x.shape[:2], x.width + y.width))
