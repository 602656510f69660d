"""Relative positions: biases of attention scores, and vectors that are added to keys and values; sinusoids.

`alibi` and `relative_position_bias` compute the bias operand of `attention`. Learned absolute positions are an
`embedding`; rotary positions are the op `rope`.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..op import OpCall, Size, TensorType, Trait, Value, broadcast_shapes, list_cache_specs, require
from ..schema.cases import case, ints, normal, positive
from ..types import dtypes, sizes
from .declaration import composed_op
from .elementwise import affine, cast, clip, floor, log, logical_and, mask_fill, minimum, where
from .products import embedding, matmul
from .reduce import max as greatest
from .reduce import softmax
from .reduce import sum as add_up
from .tensor import (
    concat,
    expand,
    gather_rows,
    iota,
    merge_heads,
    reshape,
    scatter_rows,
    slice_,
    split_heads,
    swap_last_axes,
    transpose,
    unsqueeze,
)

_AT = (np.arange(40, 46)[None], np.arange(60)[None])  # query and key positions of the cases


def _infer_bias_type(like: TensorType, heads: Size, n: OpCall) -> TensorType:
    queries: TensorType = n.queries
    keys: TensorType = n.keys
    for t in (queries, keys):
        require(t.rank == 2 and t.dtype.is_int, f"positions {t} must be integers [batch or 1, n]")
    require(queries.dtype == keys.dtype, f"positions {queries} and {keys} differ in dtype")
    (batch,) = broadcast_shapes(queries.with_shape(queries.shape[0]), keys.with_shape(keys.shape[0]))
    return like.with_shape(batch, heads, queries.shape[1], keys.shape[1])


def _emit_relative_positions(queries: Value, keys: Value) -> Value:
    """Emit j − i [batch, seq, keys] for the key positions j and the query positions i."""
    return unsqueeze(keys, axes=(1,)) - unsqueeze(queries, axes=(2,))


@composed_op(
    cases=[
        case(normal(32, 4), *_AT),
        case(normal(32, 4), *_AT, bidirectional=False, max_distance=50),
        case(normal(8, 3), ints(2, 5, high=30), ints(2, 7, high=30), max_distance=16),
    ]
)
def relative_position_bias(
    table: Value, queries: Value, keys: Value, *, bidirectional: bool = True, max_distance: int = 128
) -> Value:
    """Learned bias table[bucket(j − i), head] for query position i and key position j (Raffel 2020, T5).

    table [buckets, heads], queries [batch, seq], keys [batch, keys] (batch may be 1) → [batch, heads, seq, keys]. With
    `bidirectional` half of the buckets are for j > i, the others for j ≤ i; else all are for j ≤ i, and j > i shares
    bucket 0. The first half of the buckets of a direction are for one distance each, the rest for ranges that grow
    logarithmically; the last also covers distances from `max_distance` on.
    """
    relative = _emit_relative_positions(queries, keys)
    count = table.shape[0] // 2 if bidirectional else table.shape[0]  # buckets per direction
    exact = count // 2  # those of them for a single distance
    rate = (count - exact) / math.log(max_distance / exact)  # other buckets per factor e of distance
    distance = abs(relative) if bidirectional else clip(-relative, low=0)
    ratio = cast(clip(distance, low=1), to=dtypes.f32) * (1 / exact)
    far = cast(floor(affine(log(ratio), by=rate, plus=exact + _NUDGE)), to=distance.type.dtype)
    bucket = where(distance < exact, distance, clip(far, high=count - 1))
    if bidirectional:
        future = cast(relative > 0, to=bucket.type.dtype)
        bucket = bucket + future * count
    return transpose(embedding(bucket, table), axes=(0, 3, 1, 2))


_NUDGE = 1e-5  # rounding may leave the logarithm of a bucket's first distance just below its integer


@relative_position_bias.infer
def _(n: OpCall) -> TensorType:
    table: TensorType = n.table
    require(table.rank == 2, f"table {table} must be [buckets, heads]")
    buckets, heads = table.shape
    fits = isinstance(buckets, int) and buckets >= 4 and n.max_distance > buckets // (4 if n.bidirectional else 2)
    require(fits, f"max_distance={n.max_distance} must exceed the distances that table {table} has a bucket for")
    return _infer_bias_type(table, heads, n)


@composed_op(cases=[case(positive(4), *_AT), case(positive(3), ints(2, 5, high=9), ints(1, 7, high=9), symmetric=True)])
def alibi(slopes: Value, queries: Value, keys: Value, *, symmetric: bool = False) -> Value:
    """Bias −slope·(i − j) for query position i and key position j (Press 2022), or −slope·\\|i − j\\| if `symmetric`.

    slopes [heads] (recipe AlibiSlopes), queries [batch, seq], keys [batch, keys] → [batch, heads, seq, keys].
    """
    distance = _emit_relative_positions(queries, keys)
    distance = -abs(distance) if symmetric else distance
    slopes = reshape(slopes, shape=(slopes.width, 1, 1))
    return slopes * unsqueeze(cast(distance, to=slopes.type.dtype), axes=(1,))


@alibi.infer
def _(n: OpCall) -> TensorType:
    slopes: TensorType = n.slopes
    require(slopes.rank == 1 and slopes.dtype.is_float, f"slopes {slopes} must be [heads]")
    return _infer_bias_type(slopes, slopes.shape[0], n)


_SHAW = (normal(2, 7, 12), normal(2, 7, 12), normal(2, 7, 12))
_SLOTS = (normal(2, 3, 13, 4), normal(2, 3, 13, 4), np.arange(7) + np.array([[0], [6]]))


@composed_op(
    outputs="relative_attention present_k present_v",
    traits=[Trait.ATTENTION],
    cases=[
        case(*_SHAW, normal(5, 4), normal(5, 4), heads=3),
        case(*_SHAW, normal(9, 6), heads=2, causal=True),
        case(normal(1, 3, 4), normal(1, 6, 4), normal(1, 6, 4), normal(3, 4), normal(3, 4), heads=1),
        case(*_SHAW, normal(5, 4), normal(5, 4), *_SLOTS, heads=3, causal=True),
        case(*_SHAW, normal(7, 4), None, *_SLOTS, heads=3, causal=True),
        case(*_SHAW, normal(5, 4), normal(5, 4), None, None, None, np.arange(7) < [[5], [7]], heads=3),
    ],
)
def relative_attention(
    q: Value,
    k: Value,
    v: Value,
    key_table: Value,
    value_table: Value | None = None,
    past_k: Value | None = None,
    past_v: Value | None = None,
    positions: Value | None = None,
    key_mask: Value | None = None,
    *,
    heads: int,
    causal: bool = False,
) -> Value | tuple[Value, Value, Value]:
    """Attention with relative keys and values (Shaw 2018): score q_i·(k_j + w_K[r])/√d, output Σ_j α_ij (v_j + w_V[r]).

    r = clip(j − i, −R, R) + R for query position i and key position j; w_K is key_table and w_V value_table, [2R + 1,
    d] for all heads (w_V is 0 without value_table). q [batch, seq, heads·d], k and v [batch, keys, heads·d] → [batch,
    seq, heads·d]. Keys where `key_mask` [batch, keys] is 0 are masked. With past_k and past_v [batch, heads, capacity,
    d] and `positions` [batch, seq] (only if `causal` and without key_mask) k and v are written to the slots of their
    positions, a query at position i sees the slots 0 to i, and the updated caches are also returned.
    """
    qh, kh, vh = (split_heads(t, heads) for t in (q, k, v))  # [batch, heads, n, d]
    query_at, reach = unsqueeze(iota(q, axis=1), axes=(0,)), key_table.shape[0] // 2
    if past_k is not None and past_v is not None and positions is not None:
        query_at = positions
        kh, vh = (scatter_rows(past, new, query_at, axis=2) for past, new in ((past_k, kh), (past_v, vh)))
    query_at, key_at = unsqueeze(query_at, axes=(2,)), cast(iota(kh, axis=2), to=query_at.type.dtype)
    relative = unsqueeze(key_at, axes=(0, 1)) - query_at  # [batch or 1, seq, keys]
    row = clip(relative, low=-reach, high=reach) + reach
    scores = matmul(qh, swap_last_axes(kh)) + gather_per_query(matmul(qh, swap_last_axes(key_table)), row)
    scores = scores * (1 / math.sqrt(qh.width))
    relative = unsqueeze(relative, axes=(1,))
    seen = [relative <= 0] if causal else []
    if key_mask is not None:
        seen.append(unsqueeze(cast(key_mask, to=dtypes.bool_), axes=(1, 2)))
    if seen:
        scores = mask_fill(functools.reduce(logical_and, seen), scores, -math.inf)
    weights = softmax(scores)
    y = matmul(weights, vh)
    if value_table is not None:  # each row times the weights of all keys at its distance
        below = mask_fill(relative <= -reach, weights)
        above = mask_fill(relative >= reach, weights)
        ends = [add_up(far, axes=(3,), keepdims=True) for far in (below, above)]
        steps = iota(slice_(value_table, axis=0, start=1, stop=2 * reach), axis=0) + (1 - reach)
        at = query_at + cast(steps, to=query_at.type.dtype)  # position of the one key at each distance between the ends
        last = greatest(key_at, axes=(0,), keepdims=True)
        exists = unsqueeze((at >= 0) & (at <= last), axes=(1,))
        between = mask_fill(exists, gather_per_query(weights, minimum(clip(at, low=0), last)))
        y = y + matmul(concat(ends[0], between, ends[1], axis=3), value_table)
    return merge_heads(y) if past_k is None else (merge_heads(y), kh, vh)


@relative_attention.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k, v, width = n.q, n.k, n.v, n.q.shape[-1]
    require(q.rank == 3 and isinstance(width, int) and width % n.heads == 0, f"q {q} must be [batch, seq, {n.heads}·d]")
    require(k == v and k == q.with_shape(q.shape[0], *k.shape[1:2], width), f"k {k} and v {v} do not fit q {q}")
    d = sizes.floordiv(width, n.heads)
    for t in (n.key_table, n.value_table):
        if t is not None:
            fits = t.rank == 2 and isinstance(t.shape[0], int) and t.shape[0] % 2 == 1 and t.shape[0] > 1
            fits = fits and t == q.with_shape(t.shape[0], d)
            require(fits, f"table {t} must be [2R + 1, d], R ≥ 1, for q {q}, heads={n.heads}")
    absent = [t is None for t in (n.past_k, n.past_v, n.positions)]
    require(all(absent) or not any(absent), "past_k, past_v and positions must all be present or all absent")
    fits = n.key_mask is None or n.key_mask.shape == k.shape[:2]
    require(fits, f"key_mask {n.key_mask} must be [batch, keys] of k {k}")
    if n.past_k is None:
        return (q,)
    fits_cache = n.causal and k.shape == q.shape and n.key_mask is None
    require(fits_cache, f"a cache needs causal=true, no key_mask, and k {k} as long as q {q}")
    fits = n.past_k.rank == 4 and n.past_k == n.past_v == q.with_shape(q.shape[0], n.heads, n.past_k.shape[2], d)
    require(fits, f"past_k {n.past_k} and past_v {n.past_v} must be [batch, {n.heads}, capacity, {d}]")
    require(n.positions.shape == q.shape[:2], f"positions {n.positions} must be [batch, seq]")
    return q, n.past_k, n.past_v


@relative_attention.cost
def _(n: OpCall) -> Size:
    q: TensorType = n.q
    tables = 1 if n.value_table is None else 2
    per_key = q.elements * (4 + 2 * tables) + sizes.multiply_sizes((*q.shape[:2], n.heads)) * 5
    keys: Size = n.k.shape[1] if n.past_k is None else n.past_k.shape[2]
    return per_key * keys


relative_attention.states(lambda n: list_cache_specs(n.k, n.v, n.past_k, n.heads) if n.causal else ())


def gather_per_query(x: Value, index: Value) -> Value:
    """Emit x [batch, heads, seq, n] at `index` [batch or 1, seq, m] along its last axis: [batch, heads, seq, m]."""
    (batch, heads, seq, width), count = x.shape, index.shape[2]
    places = reshape(expand(index, shape=(batch, seq, count)), shape=(batch * seq, count))
    rows = reshape(transpose(x, axes=(0, 2, 3, 1)), shape=(batch * seq, width, heads))
    return transpose(reshape(gather_rows(rows, places), shape=(batch, seq, count, heads)), axes=(0, 3, 1, 2))
