"""Sparse attention: block-sparse attention, and the lightning indexer, by which each query chooses its top-k keys."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..op import Array, Cost, OpCall, Size, TensorType, Trait, Value, list_cache_specs, op, require, sum_sizes
from ..schema.cases import case, normal
from ..schema.states import StateKind, StateSpec
from ..schema.visible_keys import VisibleBlocks
from ..types import dtypes, sizes
from .activation import relu
from .declaration import composed_op
from .elementwise import affine, cast, clip, equal, fill_like, logical_and, mask_fill, minimum, where
from .products import matmul
from .reduce import cumsum
from .reduce import max as greatest
from .reduce import sum as add_up
from .reduce import top_k as largest
from .softmax_attention import attention
from .tensor import (
    concat,
    emit_indices,
    expand,
    gather,
    gather_rows,
    iota,
    pad,
    reshape,
    scatter_rows,
    slice_,
    swap_last_axes,
    unsqueeze,
)

_QKV = (normal(2, 23, 12), normal(2, 23, 6), normal(2, 23, 10))
_GQA = {"heads": 4, "kv_heads": 2}
_SHOWN = np.arange(23) < [[23], [9]]
_LATE = np.arange(23) >= [[6], [0]]


@op(
    traits=[Trait.ATTENTION],
    cases=[
        case(*_QKV, **_GQA, block=2),
        case(*_QKV, _SHOWN, **_GQA, block=3, first_weight=3),
        case(*_QKV, _LATE, **_GQA, block=4, sides=0, first=2, first_weight=2, scale=0.3),
        case(*_QKV, _SHOWN, **_GQA, block=2, first=0, last=0),
        case(*_QKV, **_GQA, block=2, first=2, last=3, sides=2),
        case(*_QKV, _SHOWN, **_GQA, block=4, first_weight=2, dense=23),
        case(*_QKV, _LATE[:1], **_GQA, block=4, first_weight=2, dense=22),
        case(normal(1, 3, 4), normal(1, 3, 4), normal(1, 3, 4), heads=2, kv_heads=2, block=8, first_weight=2),
    ],
)
def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    key_mask: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    block: int,
    sides: int = 1,
    first: int = 1,
    last: int = 1,
    first_weight: int = 1,
    dense: int = 0,
    scale: float | None = None,
) -> Array:
    """softmax(scale · q kᵀ + ln c) v per head; c[i, j] is how often query i counts key j, 0 for a masked key.

    A block of `block` queries attends to these blocks of keys (Child 2019, arXiv 1904.10509; Zaheer 2020, arXiv
    2007.14062, BigBird): itself, `sides` blocks before and after it, the first `first` and the last `last` blocks of
    the sequence. Queries of these first and last blocks attend to all keys. Not causal. The method `counts` of
    `weft.ir.schema.visible_keys.VisibleBlocks` defines c, also with `first_weight` and `dense`.

    q [batch, seq, heads·d], k [batch, seq, kv_heads·d], v [batch, seq, kv_heads·dv] → [batch, seq, heads·dv]; heads,
    `scale` and `key_mask` [batch, seq] as in `attention`. A query without visible keys has the output 0.
    """
    with np.errstate(divide="ignore"):
        bias = np.log(VisibleBlocks(block, sides, first, last, first_weight, dense).counts(q.shape[1]))
    result = attention.reference(q, k, v, bias[None, None], key_mask, heads=heads, kv_heads=kv_heads, scale=scale)
    return np.asarray(result)


def _select_attention_attrs(n: OpCall) -> dict[str, Any]:
    return {"heads": n.heads, "kv_heads": n.kv_heads, "scale": n.scale}


@block_sparse_attention.infer
def _(n: OpCall) -> TensorType:
    problem = VisibleBlocks.from_attrs(vars(n)).find_problem()
    require(problem is None, problem or "")
    (y,) = attention.types((n.q, n.k, n.v, None, n.key_mask), attention.check_attrs(_select_attention_attrs(n)))
    require(n.q.shape[1] == n.k.shape[1], f"q {n.q} and k {n.k} must be equally long: blocks are those of one sequence")
    return y


@block_sparse_attention.cost
def _(n: OpCall) -> Cost:
    q, blocks = n.q, VisibleBlocks.from_attrs(vars(n))
    (batch, length, width), sparse = q.shape, blocks.is_sparse(q.shape[1])
    reached = sparse * ((blocks.global_count + 2 * blocks.sides + 1) * blocks.block) + (1 - sparse) * length
    # Queries of global blocks also see all keys.
    pairs = batch * length * (reached + sparse * (blocks.global_count * blocks.block))
    d, dv = sizes.floordiv(width, n.heads), sizes.floordiv(n.v.shape[2], n.kv_heads)
    flops: Size = pairs * n.heads * ((d + dv) * 2 + 5)
    read = sum_sizes(t.bytes for t in (q, n.k, n.v, n.key_mask) if t is not None)
    return Cost(flops, read, q.with_shape(batch, length, n.heads * dv).bytes)


@block_sparse_attention.body
def _(n: OpCall) -> Value:
    """Emit attention of every block to the blocks gathered for it, and of the global blocks to all keys.

    One graph serves all lengths: the number of gathered blocks is a symbolic size. For sequences of at most `dense`
    tokens all blocks are gathered.
    """
    blocks, dtype = VisibleBlocks.from_attrs(vars(n)), n.q.type.dtype
    (batch, seq, _), block, ends = n.q.shape, blocks.block, blocks.global_count
    count, columns = blocks.count_blocks(seq), blocks.count_gathered(seq)
    # Values that depend on the length, [1] each.
    length = greatest(iota(n.q, axis=1), axes=(0,), keepdims=True) + 1
    block_count = (length + (block - 1)) // affine(length, by=0, plus=block)  # the number of blocks
    sparse = clip(length // affine(length, by=0, plus=blocks.dense + 1), high=1)
    last = affine(block_count, plus=-blocks.last)  # the first of the last blocks
    # Tokens by block; the last token repeated where the last block is not full.
    token = emit_indices(n.q, count * block)
    row = minimum(token, length - 1)
    parts = [reshape(gather(x, row, axis=1), shape=(batch, count, block, x.width)) for x in (n.q, n.k, n.v)]
    shown = unsqueeze(token < length, axes=(0,))
    if n.key_mask is not None:
        shown = shown & cast(gather(n.key_mask, row, axis=1), to=dtypes.bool_)
    shown = reshape(expand(shown, shape=(batch, count * block)), shape=(batch, count, block))
    # The blocks that a block sees, [count, ends + columns]: the global ones and its neighbours, or all blocks.
    at = unsqueeze(emit_indices(n.q, count), axes=(1,))
    near = affine(at, plus=-blocks.sides) * sparse + unsqueeze(emit_indices(n.q, columns), axes=(0,))
    inside = (affine(near, by=0, plus=blocks.first - 1) < near) & (near < last)
    seen, exists = near, inside
    if ends:
        globals_, exist = _emit_global_blocks(n.q, blocks, block_count, last)
        seen = concat(expand(unsqueeze(globals_, axes=(0,)), shape=(count, ends)), near, axis=1)
        exists = concat(expand(unsqueeze(exist, axes=(0,)), shape=(count, ends)), inside, axis=1)
    index = _clamp_index(seen, block_count)
    keys = (ends + columns) * block
    kv = [reshape(gather(x, index, axis=1), shape=(batch * count, keys, x.width)) for x in parts[1:]]
    mask = gather(shown, index, axis=1) & unsqueeze(exists, axes=(0, 3))
    bias = None
    if blocks.first_weight > 1:
        column = emit_indices(n.q, keys)
        heavy = cast(column < affine(column, by=0, plus=blocks.first * block), to=dtypes.i64) * sparse
        bias = reshape(cast(heavy, to=dtype) * math.log(blocks.first_weight), shape=(1, 1, 1, keys))
    queries = reshape(parts[0], shape=(batch * count, block, n.q.width))
    y = attention(queries, *kv, bias, reshape(mask, shape=(batch * count, keys)), **_select_attention_attrs(n))
    width = y.width
    y = reshape(y, shape=(batch, count, block, width))
    if ends:
        global_queries = reshape(
            gather(parts[0], _clamp_index(globals_, block_count), axis=1), shape=(batch, ends * block, n.q.width)
        )
        global_outputs = attention(global_queries, n.k, n.v, None, n.key_mask, **_select_attention_attrs(n))
        y = concat(y, reshape(global_outputs, shape=(batch, ends, block, width)), axis=1)
        at = emit_indices(n.q, count)
        source = where(last <= at, at - last + (block_count + blocks.first), at)
        source = where(at < affine(at, by=0, plus=blocks.first), at + block_count, source)
        y = gather(y, source, axis=1)
    y = reshape(y, shape=(batch, count * block, width))
    return gather(y, iota(n.q, axis=1), axis=1)


def _emit_global_blocks(x: Value, blocks: VisibleBlocks, block_count: Value, last: Value) -> tuple[Value, Value]:
    """Emit the indices [first + last] of global blocks and a mask: false for missing and repeated blocks."""
    block_indices, exist = [], []
    if blocks.first:
        firsts = emit_indices(x, blocks.first)
        block_indices, exist = [firsts], [firsts < block_count]
    if blocks.last:
        lasts = emit_indices(x, blocks.last) + last
        block_indices.append(lasts)
        exist.append(affine(lasts, by=0, plus=blocks.first) <= lasts)
    if len(exist) == 1:
        return block_indices[0], exist[0]
    return concat(*block_indices, axis=0), concat(*exist, axis=0)


def _clamp_index(index: Value, count: Value) -> Value:
    return clip(minimum(index, count - 1), low=0)


_INDEX = (normal(2, 9, 12), normal(2, 9, 4), normal(2, 9, 3))
_NEXT = (normal(2, 3, 12), normal(2, 3, 4), normal(2, 3, 3))
_KEPT = (normal(2, 1, 14, 4), np.array([[5, 6, 7], [9, 10, 11]]))


@composed_op(
    outputs="bias present_k",
    cases=[
        case(*_INDEX, heads=3, top_k=4, causal=True),
        case(*_INDEX, np.arange(9) < [[9], [6]], heads=3, top_k=2),
        case(*_INDEX[:2], np.zeros((2, 9, 3)), heads=3, top_k=3, causal=True),
        case(*_INDEX, np.arange(9) >= [[2], [0]], heads=3, top_k=20, causal=True),
        case(*_NEXT, None, *_KEPT, heads=3, top_k=4, causal=True),
        case(*_NEXT, np.arange(12) >= [[2], [0]], *_KEPT, heads=3, top_k=5, causal=True),
        case(*_NEXT, (np.arange(14) < 13)[None], *_KEPT, heads=3, top_k=30, causal=True),
        case(*_NEXT, np.arange(17) >= [[2], [15]], _KEPT[0], heads=3, top_k=5, causal=True),
    ],
)
def lightning_index(
    q: Value,
    k: Value,
    weights: Value,
    key_mask: Value | None = None,
    past_k: Value | None = None,
    positions: Value | None = None,
    *,
    heads: int,
    top_k: int,
    causal: bool = False,
) -> Value | tuple[Value, Value]:
    """Bias for `attention`: 0 for the `top_k` visible keys of a query with the largest scores, −∞ for other keys
    (lightning indexer; DeepSeek-V3.2, 2025). The score of query t and key s is Σ_h weights[t, h] · max(q_h[t]·k[s], 0).

    q [batch, seq, heads·d], k [batch, keys, d], weights [batch, seq, heads] → bias [batch, 1, seq, keys]. Visible are
    the keys that `key_mask` [batch, keys] and `causal` allow; if there are at most `top_k`, all are chosen. Of keys
    with equal scores the earlier is chosen: scores are often 0, and the authors' code leaves the order open. The choice
    has no gradient.

    With a cache (only if `causal`) — `past_k` [batch, 1, capacity, d], `positions` [batch, seq] — the new keys are
    written to the slots of their positions, slot j has the key of position j, bias is [batch, 1, seq, capacity], and
    present_k is the updated cache; `key_mask` indexes keys by position. Without `positions` present_k is `past_k` with
    the new keys appended, and bias and `key_mask` have its slots.
    """
    (batch, seq, _), d, dtype = q.shape, k.width, q.type.dtype
    kh, query_at = unsqueeze(k, axes=(1,)), unsqueeze(iota(q, axis=1), axes=(0,))
    if past_k is not None and positions is not None:
        kh, query_at = scatter_rows(past_k, kh, positions, axis=2), positions
    elif past_k is not None:
        kh = concat(past_k, kh, axis=2)
        last_key, last_query = (greatest(iota(x, axis=a), axes=(0,), keepdims=True) for x, a in ((kh, 2), (q, 1)))
        query_at = query_at + (last_key - last_query)
    # In f32 at least: with 8 or 11 bits of mantissa many scores tie. A factor of all scores changes no choice.
    q, keys, weights = (cast(x, to=dtypes.f32) if dtype.bits < 32 else x for x in (q, kh, weights))
    scores = matmul(reshape(q, shape=(batch, 1, seq * heads, d)), swap_last_axes(keys))
    scores = reshape(relu(scores), shape=(batch, seq, heads, kh.shape[2]))
    scores = reshape(matmul(unsqueeze(weights, axes=(2,)), scores), shape=(batch, seq, kh.shape[2]))
    key_at = unsqueeze(cast(iota(kh, axis=2), to=query_at.type.dtype), axes=(0,))
    seen = []
    if causal:
        seen.append(unsqueeze(key_at, axes=(1,)) <= unsqueeze(query_at, axes=(2,)))
    if key_mask is not None:
        seen.append(unsqueeze(_emit_visible_keys(key_mask, key_at, positions is not None), axes=(1,)))
    visible = functools.reduce(logical_and, seen) if seen else equal(scores, scores)
    scores = mask_fill(visible, scores, -math.inf)
    best, _ = largest.emit(pad(scores, axis=2, after=top_k, value=-math.inf), k=top_k)
    least = slice_(best, axis=2, start=top_k - 1, stop=top_k)
    is_above, is_tied = least < scores, equal(scores, least)
    ties_to_take = affine(add_up(cast(is_above, to=dtypes.i64), axes=(2,), keepdims=True), by=-1, plus=top_k)
    is_taken = cumsum(cast(is_tied, to=dtypes.i64), axis=2, exclusive=True) < ties_to_take
    picked = visible & (is_above | (is_tied & is_taken))
    bias = unsqueeze(mask_fill(picked, fill_like(cast(picked, to=dtype), 0.0), -math.inf), axes=(1,))
    return bias if past_k is None else (bias, kh)


@lightning_index.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k, heads, width = n.q, n.k, n.heads, n.q.shape[-1]
    fits = q.rank == 3 and heads > 0 and isinstance(width, int) and width % heads == 0
    require(fits, f"q {q} must be [batch, seq, {heads}·d]")
    d = width // heads
    fits = k.rank == 3 and k == q.with_shape(q.shape[0], k.shape[1], d)
    require(fits, f"k {k} must be [batch, keys, {d}] as q {q} is")
    fits = n.weights == q.with_shape(*q.shape[:2], heads)
    require(fits, f"weights {n.weights} must be [batch, seq, {heads}] as q {q} is")
    require(n.top_k >= 1, f"top_k={n.top_k} must be positive")
    mask, cached = n.key_mask, n.past_k is not None
    require(cached or n.positions is None, "positions need a cache, but past_k is absent")
    keys = k.shape[1] + (n.past_k.shape[2] if cached and n.positions is None else 0)
    fits = mask is None or (mask.rank == 2 and mask.shape[0] in (1, q.shape[0]))
    fits = fits and (mask is None or n.positions is not None or mask.shape[1] == keys)
    require(fits, f"key_mask {mask} must be [batch, keys] of k {k}")
    if not cached:
        return (q.with_shape(q.shape[0], 1, q.shape[1], k.shape[1]),)
    require(n.causal and k.shape[1] == q.shape[1], f"a cache needs causal=true and k {k} as long as q {q}")
    fits = n.past_k.rank == 4 and n.past_k == q.with_shape(q.shape[0], 1, n.past_k.shape[2], d)
    require(fits, f"past_k {n.past_k} must be [batch, 1, capacity, {d}]")
    fits = n.positions is None or n.positions.shape == q.shape[:2]
    require(fits, f"positions {n.positions} must be [batch, seq]")
    present = n.past_k if n.positions is not None else n.past_k.with_axis(2, keys)
    return q.with_shape(q.shape[0], 1, q.shape[1], present.shape[2]), present


@lightning_index.cost
def _(n: OpCall) -> Cost:
    keys: Size = n.k.shape[1] if n.past_k is None else n.past_k.shape[2]
    flops = n.q.shape[0] * n.q.shape[1] * keys * n.heads * (2 * n.k.shape[2] + 3)
    read = sum_sizes(t.bytes for t in (n.q, n.k, n.weights, n.key_mask, n.past_k) if t is not None)
    bias = n.q.with_shape(n.q.shape[0], 1, n.q.shape[1], keys).bytes
    return Cost(flops, read, bias if n.past_k is None else bias + n.k.bytes)


@lightning_index.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    if not n.causal:
        return ()
    return list_cache_specs(n.k, None, n.past_k, 1, appends=n.positions is None, kind=StateKind.INDEX)


def _emit_visible_keys(key_mask: Value, key_at: Value, by_position: bool) -> Value:
    """Emit the element of `key_mask` at the position of each key (`key_at` [1, keys]), bool; false beyond the end."""
    if not by_position:
        return cast(key_mask, to=dtypes.bool_)
    rows, count = key_mask.shape[0], key_at.shape[1]
    last = cast(greatest(iota(key_mask, axis=1), axes=(0,), keepdims=True), to=key_at.type.dtype)
    picked = gather_rows(key_mask, expand(minimum(key_at, last), shape=(rows, count)))
    return cast(picked, to=dtypes.bool_) & (key_at <= last)
