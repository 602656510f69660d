"""Sparse attention: blocks of queries that see a few blocks of keys, and an index by which queries choose keys."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..op import Array, Cost, OpCall, Size, StateSpec, TensorType, Trait, Value, caches, case, normal, op, total, want
from ..schema.states import StateKind
from ..schema.visible_blocks import VisibleBlocks
from ..types import dtypes, sizes
from .activation import relu
from .elementwise import (
    add,
    affine,
    cast,
    clip,
    equal,
    filled,
    floordiv,
    less,
    less_equal,
    logical_and,
    logical_or,
    masked,
    minimum,
    mul,
    sub,
)
from .elementwise import where as choose
from .products import matmul
from .reduce import cumsum
from .reduce import max as greatest
from .reduce import sum as add_up
from .reduce import top_k as largest
from .softmax_attention import attention
from .tensor import (
    concat,
    expand,
    gather,
    gather_rows,
    indices,
    iota,
    pad,
    reshape,
    scatter_rows,
    slice_,
    swap,
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
    """softmax(scale · q kᵀ + ln c) v per head, c how often a query counts a key, 0 of keys that it does not see.

    Blocks of `block` queries see blocks of keys (Child 2019, arXiv 1904.10509; Zaheer 2020, arXiv 2007.14062, BigBird):
    `sides` on each side and their own, and the `first` first and `last` last ones, whose queries see all keys.
    `weft.ir.schema.visible_blocks.VisibleBlocks` defines it, and how `first_weight` and `dense` change it. Not causal.

    q [batch, seq, heads·d], k [batch, seq, kv_heads·d], v [batch, seq, kv_heads·dv] → [batch, seq, heads·dv]; heads,
    `scale` and `key_mask` [batch, seq] as in `attention`. A row that sees nothing is 0.
    """
    with np.errstate(divide="ignore"):
        bias = np.log(VisibleBlocks(block, sides, first, last, first_weight, dense).counts(q.shape[1]))
    made = attention.reference(q, k, v, bias[None, None], key_mask, heads=heads, kv_heads=kv_heads, scale=scale)
    return np.asarray(made)


def _shared(n: OpCall) -> dict[str, Any]:
    """The attributes that `attention` has too."""
    return {"heads": n.heads, "kv_heads": n.kv_heads, "scale": n.scale}


@block_sparse_attention.infer
def _(n: OpCall) -> TensorType:
    problem = VisibleBlocks.of(vars(n)).problem()
    want(problem is None, problem or "")
    (y,) = attention.types((n.q, n.k, n.v, None, n.key_mask), attention.check_attrs(_shared(n)))
    want(n.q.shape[1] == n.k.shape[1], f"q {n.q} and k {n.k} must be equally long: blocks are those of one text")
    return y


@block_sparse_attention.cost
def _(n: OpCall) -> Cost:
    q, blocks = n.q, VisibleBlocks.of(vars(n))
    (batch, length, width), sparse = q.shape, blocks.sparse(q.shape[1])
    reached = sparse * ((blocks.ends + 2 * blocks.sides + 1) * blocks.block) + (1 - sparse) * length
    # Queries of global blocks see all keys, beside what queries of any block see.
    pairs = batch * length * (reached + sparse * (blocks.ends * blocks.block))
    d, dv = sizes.floordiv(width, n.heads), sizes.floordiv(n.v.shape[2], n.kv_heads)
    flops: Size = pairs * n.heads * ((d + dv) * 2 + 5)
    read = total(t.bytes for t in (q, n.k, n.v, n.key_mask) if t is not None)
    return Cost(flops, read, q.with_shape(batch, length, n.heads * dv).bytes)


@block_sparse_attention.body
def _(n: OpCall) -> Value:
    """Attention of every block to the blocks gathered for it, and of the global blocks to all keys.

    One graph serves all lengths: where a text is `dense`, the blocks gathered are all blocks, since their number is a
    size that depends on the length.
    """
    blocks, dtype = VisibleBlocks.of(vars(n)), n.q.type.dtype
    (batch, seq, _), block, ends = n.q.shape, blocks.block, blocks.ends
    count, columns = blocks.blocks(seq), blocks.columns(seq)
    # Numbers that depend on the length, [1] each.
    length = affine(greatest(iota(n.q, axis=1), axes=(0,), keepdims=True), plus=1)
    behind = floordiv(affine(length, plus=block - 1), affine(length, by=0, plus=block))  # the number of blocks
    sparse = clip(floordiv(length, affine(length, by=0, plus=blocks.dense + 1)), high=1)
    last = affine(behind, plus=-blocks.last)  # the first of the last blocks
    # The tokens of the blocks; the last one once more where a block has none left.
    token = indices(n.q, count * block)
    row = minimum(token, affine(length, plus=-1))
    parts = [reshape(gather(x, row, axis=1), shape=(batch, count, block, x.width)) for x in (n.q, n.k, n.v)]
    shown = unsqueeze(less(token, length), axes=(0,))
    if n.key_mask is not None:
        shown = logical_and(shown, cast(gather(n.key_mask, row, axis=1), to=dtypes.bool_))
    shown = reshape(expand(shown, shape=(batch, count * block)), shape=(batch, count, block))
    # The blocks that a block sees, [count, ends + columns]: global ones, and those around it, or all.
    at = unsqueeze(indices(n.q, count), axes=(1,))
    near = add(mul(affine(at, plus=-blocks.sides), sparse), unsqueeze(indices(n.q, columns), axes=(0,)))
    inside = logical_and(less(affine(near, by=0, plus=blocks.first - 1), near), less(near, last))
    seen, there = near, inside
    if ends:
        globals_, exist = _ends(n.q, blocks, behind, last)
        seen = concat(expand(unsqueeze(globals_, axes=(0,)), shape=(count, ends)), near, axis=1)
        there = concat(expand(unsqueeze(exist, axes=(0,)), shape=(count, ends)), inside, axis=1)
    index = _inside(seen, behind)
    keys = (ends + columns) * block
    kv = [reshape(gather(x, index, axis=1), shape=(batch * count, keys, x.width)) for x in parts[1:]]
    mask = logical_and(gather(shown, index, axis=1), unsqueeze(there, axes=(0, 3)))
    bias = None
    if blocks.first_weight > 1:
        column = indices(n.q, keys)
        heavy = mul(cast(less(column, affine(column, by=0, plus=blocks.first * block)), to=dtypes.i64), sparse)
        bias = reshape(affine(cast(heavy, to=dtype), by=math.log(blocks.first_weight)), shape=(1, 1, 1, keys))
    queries = reshape(parts[0], shape=(batch * count, block, n.q.width))
    y = attention(queries, *kv, bias, reshape(mask, shape=(batch * count, keys)), **_shared(n))
    width = y.width
    y = reshape(y, shape=(batch, count, block, width))
    if ends:
        some = reshape(gather(parts[0], _inside(globals_, behind), axis=1), shape=(batch, ends * block, n.q.width))
        whole = attention(some, n.k, n.v, None, n.key_mask, **_shared(n))
        y = concat(y, reshape(whole, shape=(batch, ends, block, width)), axis=1)
        at = indices(n.q, count)
        place = choose(less_equal(last, at), add(sub(at, last), affine(behind, plus=blocks.first)), at)
        place = choose(less(at, affine(at, by=0, plus=blocks.first)), add(at, behind), place)
        y = gather(y, place, axis=1)
    y = reshape(y, shape=(batch, count * block, width))
    return gather(y, iota(n.q, axis=1), axis=1)


def _ends(x: Value, blocks: VisibleBlocks, behind: Value, last: Value) -> tuple[Value, Value]:
    """The numbers of the global blocks [ends], and which of them exist and are not counted before."""
    numbers, exist = [], []
    if blocks.first:
        firsts = indices(x, blocks.first)
        numbers, exist = [firsts], [less(firsts, behind)]
    if blocks.last:
        lasts = add(indices(x, blocks.last), last)
        numbers.append(lasts)
        exist.append(less_equal(affine(lasts, by=0, plus=blocks.first), lasts))
    return (numbers[0], exist[0]) if len(numbers) == 1 else (concat(*numbers, axis=0), concat(*exist, axis=0))


def _inside(index: Value, count: Value) -> Value:
    """`index`, within 0 … count − 1."""
    return clip(minimum(index, affine(count, plus=-1)), low=0)


_INDEX = (normal(2, 9, 12), normal(2, 9, 4), normal(2, 9, 3))
_NEXT = (normal(2, 3, 12), normal(2, 3, 4), normal(2, 3, 3))
_KEPT = (normal(2, 1, 14, 4), np.array([[5, 6, 7], [9, 10, 11]]))


@op(
    outputs="bias present_k",
    cases=[
        case(*_INDEX, heads=3, top_k=4, causal=True),
        case(*_INDEX, np.arange(9) < [[9], [6]], heads=3, top_k=2),
        case(*_INDEX[:2], np.zeros((2, 9, 3)), heads=3, top_k=3, causal=True),
        case(*_INDEX, np.arange(9) >= [[2], [0]], heads=3, top_k=20, causal=True),
        case(*_NEXT, None, *_KEPT, heads=3, top_k=4, causal=True),
        case(*_NEXT, np.arange(12) >= [[2], [0]], *_KEPT, heads=3, top_k=5, causal=True),
        case(*_NEXT, (np.arange(14) < 13)[None], *_KEPT, heads=3, top_k=30, causal=True),
    ],
)
def lightning_index(
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
    """A bias that is 0 for the keys a query chooses, −∞ for others: those of the `top_k` largest scores
    I[t, s] = Σ_h weights[t, h] · max(q_h[t]·k[s], 0) (DeepSeek-V3.2, 2025: the lightning indexer).

    q [batch, seq, heads·d], k [batch, keys, d], weights [batch, seq, heads] → bias [batch, 1, seq, keys], for
    `attention`. A query chooses among the keys that `key_mask` [batch, keys] and `causal` let it see, all of them where
    these are no more than `top_k`. Of equal scores the earlier key's is taken, as scores are 0 where no head is above;
    the authors' code does not say which. Nothing is differentiated: a choice has no gradient.

    With a cache (`causal` only) — `past_k` [batch, 1, capacity, d], `positions` [batch, seq] — the keys of this call
    are written to the slots of their positions, the keys are those of all slots, bias is [batch, 1, seq, capacity], and
    present_k is the updated cache; `key_mask` indexes keys by position.
    """
    kh, query_at = k[:, None], np.arange(q.shape[1])[None]
    if past_k is not None and positions is not None:
        kh, query_at = scatter_rows.reference(past_k, kh, positions, axis=2), positions
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


@lightning_index.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k, heads, width = n.q, n.k, n.heads, n.q.shape[-1]
    fits = q.rank == 3 and heads > 0 and isinstance(width, int) and width % heads == 0
    want(fits, f"q {q} must be [batch, seq, {heads}·d]")
    d = width // heads
    want(k.rank == 3 and k == q.with_shape(q.shape[0], k.shape[1], d), f"k {k} must be [batch, keys, {d}] as q {q} is")
    fits = n.weights == q.with_shape(*q.shape[:2], heads)
    want(fits, f"weights {n.weights} must be [batch, seq, {heads}] as q {q} is")
    want(n.top_k >= 1, f"top_k={n.top_k} must be positive")
    want((n.past_k is None) == (n.positions is None), "past_k and positions go together")
    mask, cached = n.key_mask, n.past_k is not None
    fits = mask is None or (mask.rank == 2 and mask.shape[0] in (1, q.shape[0]))
    fits = fits and (mask is None or cached or mask.shape[1] == k.shape[1])
    want(fits, f"key_mask {mask} must be [batch, keys] of k {k}")
    if not cached:
        return (q.with_shape(q.shape[0], 1, q.shape[1], k.shape[1]),)
    want(n.causal and k.shape[1] == q.shape[1], f"a cache needs causal=true and k {k} as long as q {q}")
    fits = n.past_k.rank == 4 and n.past_k == q.with_shape(q.shape[0], 1, n.past_k.shape[2], d)
    want(fits, f"past_k {n.past_k} must be [batch, 1, capacity, {d}]")
    want(n.positions.shape == q.shape[:2], f"positions {n.positions} must be [batch, seq]")
    return q.with_shape(q.shape[0], 1, q.shape[1], n.past_k.shape[2]), n.past_k


@lightning_index.cost
def _(n: OpCall) -> Cost:
    keys: Size = n.k.shape[1] if n.past_k is None else n.past_k.shape[2]
    flops = n.q.shape[0] * n.q.shape[1] * keys * n.heads * (2 * n.k.shape[2] + 3)
    read = total(t.bytes for t in (n.q, n.k, n.weights, n.key_mask, n.past_k) if t is not None)
    bias = n.q.with_shape(n.q.shape[0], 1, n.q.shape[1], keys).bytes
    return Cost(flops, read, bias if n.past_k is None else bias + n.k.bytes)


@lightning_index.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    return caches(n.k, None, n.past_k, 1, kind=StateKind.INDEX) if n.causal else ()


@lightning_index.body
def _(n: OpCall) -> Value | tuple[Value, Value]:
    (batch, seq, _), d, heads, dtype = n.q.shape, n.k.width, n.heads, n.q.type.dtype
    kh, query_at = unsqueeze(n.k, axes=(1,)), unsqueeze(iota(n.q, axis=1), axes=(0,))
    if n.past_k is not None:
        kh, query_at = scatter_rows(n.past_k, kh, n.positions, axis=2), n.positions
    # In 32 bits at least, as few scores differ in 8 or 11. A factor of all scores changes no choice.
    q, keys, weights = (cast(x, to=dtypes.f32) if dtype.bits < 32 else x for x in (n.q, kh, n.weights))
    scores = matmul(reshape(q, shape=(batch, 1, seq * heads, d)), swap(keys))
    scores = reshape(relu(scores), shape=(batch, seq, heads, kh.shape[2]))
    scores = reshape(matmul(unsqueeze(weights, axes=(2,)), scores), shape=(batch, seq, kh.shape[2]))
    key_at = unsqueeze(cast(iota(kh, axis=2), to=query_at.type.dtype), axes=(0,))
    seen = []
    if n.causal:
        seen.append(less_equal(unsqueeze(key_at, axes=(1,)), unsqueeze(query_at, axes=(2,))))
    if n.key_mask is not None:
        seen.append(unsqueeze(_shown(n, key_at), axes=(1,)))
    visible = functools.reduce(logical_and, seen) if seen else equal(scores, scores)
    scores = masked(visible, scores, -math.inf)
    best, _ = largest.emit(pad(scores, axis=2, after=n.top_k, value=-math.inf), k=n.top_k)
    least = slice_(best, axis=2, start=n.top_k - 1, stop=n.top_k)
    above, level = less(least, scores), equal(scores, least)
    left = affine(add_up(cast(above, to=dtypes.i64), axes=(2,), keepdims=True), by=-1, plus=n.top_k)
    first = less(cumsum(cast(level, to=dtypes.i64), axis=2, exclusive=True), left)
    picked = logical_and(visible, logical_or(above, logical_and(level, first)))
    bias = unsqueeze(masked(picked, filled(cast(picked, to=dtype), 0.0), -math.inf), axes=(1,))
    return bias if n.past_k is None else (bias, kh)


def _shown(n: OpCall, key_at: Value) -> Value:
    """Return whether `key_mask` shows the keys at the positions `key_at` [1, keys]: [batch or 1, keys]."""
    if n.past_k is None:
        return cast(n.key_mask, to=dtypes.bool_)
    rows, count = n.key_mask.shape[0], key_at.shape[1]
    last = cast(greatest(iota(n.key_mask, axis=1), axes=(0,), keepdims=True), to=key_at.type.dtype)
    found = gather_rows(n.key_mask, expand(minimum(key_at, last), shape=(rows, count)))
    return logical_and(cast(found, to=dtypes.bool_), less_equal(key_at, last))
