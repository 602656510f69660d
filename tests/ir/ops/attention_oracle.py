"""Attention in NumPy, independent of the graph that defines the op: masks, biases, sinks, every kind of cache."""

from __future__ import annotations

import math

import numpy as np

from weft.ir.ops import scatter_rows, softmax
from weft.ir.ops.caches import find_slot_positions, get_code_range
from weft.ir.recipes.readers import Array
from weft.ir.schema.visible_keys import VisibleKeys


def write_rolling_cache(past: Array, new: Array, positions: Array, last: int, keep: int) -> Array:
    """Return the rolling cache `past` [kv_heads, capacity, d] of one batch row after `new` [kv_heads, seq, d] is
    written.

    `positions` [seq] are the positions of the keys in `new`. Keys after position `last` are not written, nor keys that
    a later key of `new` replaces.
    """
    rolling_slots = past.shape[1] - keep
    is_written = (positions <= last) & ((positions < keep) | (positions > last - rolling_slots))
    at = positions[is_written]
    present = past.copy()
    present[:, np.where(at < keep, at, keep + (at - keep) % rolling_slots)] = new[:, is_written]
    return present


def reshape_scale(scale: Array, heads: int) -> Array:
    """Reshape `scale` [heads · width] or [1] to broadcast with [batch, heads, slots, width]."""
    return scale if scale.size == 1 else scale.reshape(1, heads, 1, -1)


def quantize_to_codes(x: Array, scale: Array, bits: int) -> Array:
    """Return the integer codes of x [batch, heads, slots, width], int64; `scale` is [heads · width] or [1]."""
    return np.clip(np.rint(x / reshape_scale(scale, x.shape[1])), *get_code_range(bits)).astype(np.int64)


def attend_arrays(
    q: Array,
    k: Array,
    v: Array | None = None,
    bias: Array | None = None,
    key_mask: Array | None = None,
    sinks: Array | None = None,
    past_k: Array | None = None,
    past_v: Array | None = None,
    positions: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    causal: bool = False,
    window: int | None = None,
    keep_first: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    pattern: str = "dense",
    stride: int = 1,
    summary: int = 1,
    rolling: bool = False,
    value_dim: int | None = None,
    cache_bits: int | None = None,
) -> Array | tuple[Array, ...]:
    """The op `attention` for arrays."""
    batch, seq, _ = q.shape
    group = heads // kv_heads
    d = q.shape[-1] // heads
    qh = q.reshape(batch, seq, kv_heads, group, d)
    kh = k.reshape(batch, -1, kv_heads, d).transpose(0, 2, 1, 3)
    vh = kh[..., :value_dim] if v is None else v.reshape(batch, kh.shape[2], kv_heads, -1).transpose(0, 2, 1, 3)
    fresh = (kh, vh)
    scales = (k_scale, k_scale if v is None else v_scale)
    if cache_bits is not None and k_scale is not None:
        codes = quantize_to_codes(kh, k_scale, cache_bits)
        kh = codes * reshape_scale(k_scale, kv_heads)
        if v is None:
            fresh, vh = (codes, codes), kh[..., :value_dim]
        elif v_scale is not None:
            fresh = codes, quantize_to_codes(vh, v_scale, cache_bits)
            vh = fresh[1] * reshape_scale(v_scale, kv_heads)
    key_at = np.arange(kh.shape[2])[None]
    query_at = np.arange(seq)[None]
    valid = np.ones((1, kh.shape[2]), bool)
    if past_k is not None:
        capacity = past_k.shape[2]
        if positions is None:
            slots = np.broadcast_to(np.arange(capacity + seq), (batch, capacity + seq))
            key_at = slots if key_mask is None else np.cumsum(key_mask != 0, 1) - 1
            query_at, valid = key_at[:, capacity:], np.ones_like(slots, bool)
        else:
            first = positions[:, :1]
            slots = np.arange(capacity) + 0 * first
            past_at = find_slot_positions(first - 1, capacity, keep_first) if rolling else slots
            valid = np.concatenate([(past_at >= 0) & (past_at < first), np.ones_like(positions, bool)], 1)
            key_at, query_at = np.concatenate([past_at, positions], 1), positions
        pasts = [
            past if past is None or scale is None else past * reshape_scale(scale, kv_heads)
            for past, scale in zip((past_k, past_v), scales, strict=True)
        ]
        kh = np.concatenate([pasts[0], kh], 2)
        vh = kh[..., :value_dim] if pasts[1] is None else np.concatenate([pasts[1], vh], 2)
    by_head = qh.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * seq, d)  # a batched matrix product, for BLAS
    scores = (by_head @ kh.swapaxes(2, 3)) * (1 / math.sqrt(d) if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores.reshape(batch, heads, seq, -1)
    reach = np.clip(slots if past_k is not None and positions is None else key_at, 0, None)
    if bias is not None:
        if past_k is not None:
            full = np.broadcast_to(bias, (batch, *bias.shape[1:]))
            bias = np.stack([np.take(full[b], reach[b].clip(max=bias.shape[3] - 1), 2) for b in range(batch)])
        scores = scores + bias
    visible = VisibleKeys(causal, window, keep_first, pattern, stride, summary)
    seen = visible.mask(query_at[:, :, None], key_at[:, None])
    seen &= valid[:, None]
    if key_mask is not None:
        rows = np.broadcast_to(key_mask != 0, (batch, key_mask.shape[1]))
        inside = reach < key_mask.shape[1]
        picked = np.take_along_axis(
            rows, np.broadcast_to(reach.clip(max=key_mask.shape[1] - 1), (batch, reach.shape[1])), 1
        )
        seen = seen & (picked & inside)[:, None]
    scores = np.where(seen[:, None], scores, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks[None, :, None, None], (batch, heads, seq, 1))
        scores = np.concatenate([scores, sink], -1)
    weights = softmax.reference(scores)[..., : vh.shape[2]]
    mixed = (weights.reshape(batch, kv_heads, group * seq, -1) @ vh).reshape(batch, heads, seq, -1)
    y: Array = mixed.transpose(0, 2, 1, 3).reshape(batch, seq, -1)
    if past_k is None:
        return y
    present = []
    for past, new in zip((past_k,) if past_v is None else (past_k, past_v), fresh, strict=False):
        if positions is None:
            present.append(np.concatenate([past, new], 2))
            continue
        updated = past.copy()
        for b, at in enumerate(positions):
            if rolling:
                last = at[-1] if key_mask is None else np.flatnonzero(rows[b, : at[-1] + 1]).max(initial=-1)
                updated[b] = write_rolling_cache(past[b], new[b], at, last, keep_first)
            else:
                updated[b][:, at] = new[b]
        present.append(updated)
    return y, *present


def attend_relative(
    q: Array,
    k: Array,
    v: Array,
    key_table: Array,
    value_table: Array | None = None,
    past_k: Array | None = None,
    past_v: Array | None = None,
    positions: Array | None = None,
    key_mask: Array | None = None,
    *,
    heads: int,
    causal: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """The op `relative_attention` for arrays."""
    kh, vh = (t.reshape(*t.shape[:2], heads, -1).transpose(0, 2, 1, 3) for t in (k, v))
    query_at = np.arange(q.shape[1])[None]
    if past_k is not None and past_v is not None and positions is not None:
        query_at = positions
        kh, vh = (scatter_rows.reference(past, new, positions, axis=2) for past, new in ((past_k, kh), (past_v, vh)))
    qh = q.reshape(*q.shape[:2], heads, -1)
    reach, d = len(key_table) // 2, qh.shape[-1]
    relative = np.arange(kh.shape[2]) - query_at[:, :, None]
    index = np.broadcast_to(np.clip(relative, -reach, reach) + reach, (len(q), *relative.shape[1:]))
    scores = np.einsum("bshd,bhtd->bhst", qh, kh) + np.einsum("bshd,bstd->bhst", qh, key_table[index])
    hidden = (causal & (relative > 0))[:, None]
    hidden = hidden if key_mask is None else hidden | (key_mask == 0)[:, None, None]
    scores = np.where(hidden, -np.inf, scores / math.sqrt(d))
    weights = softmax.reference(scores)
    y = np.einsum("bhst,bhtd->bshd", weights, vh)
    if value_table is not None:
        y = y + np.einsum("bhst,bstd->bshd", weights, value_table[index])
    y = np.asarray(y.reshape(q.shape))
    return y if past_k is None else (y, kh, vh)


def index_keys(
    q: Array,
    k: Array,
    weights: Array,
    key_mask: Array | None = None,
    past_k: Array | None = None,
    positions: Array | None = None,
    *,
    heads: int,
    top_k: int,
    causal: bool = False,
) -> Array | tuple[Array, Array]:
    """The op `lightning_index` for arrays."""
    kh, query_at = k[:, None], np.arange(q.shape[1])[None]
    if past_k is not None and positions is not None:
        kh, query_at = scatter_rows.reference(past_k, kh, positions, axis=2), positions
    elif past_k is not None:
        kh, query_at = np.concatenate([past_k, kh], 2), query_at + past_k.shape[2]
    keys = kh.shape[2]
    scores = np.einsum("bshd,bkd->bshk", q.reshape(*q.shape[:2], heads, -1), kh[:, 0])
    scores = np.einsum("bsh,bshk->bsk", weights, np.maximum(scores, 0))
    seen = np.broadcast_to(not causal, scores.shape) | (np.arange(keys) <= query_at[:, :, None])
    if key_mask is not None:
        shown = np.zeros((len(key_mask), keys), bool)
        shown[:, : key_mask.shape[1]] = key_mask != 0
        seen = seen & shown[:, None]
    rank = np.argsort(np.argsort(-np.where(seen, scores, -np.inf), -1, kind="stable"), -1)
    bias = np.where(seen & (rank < top_k), 0.0, -np.inf)[:, None]
    return bias if past_k is None else (bias, kh)
