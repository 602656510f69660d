"""Block-sparse attention: a block of queries sees a few blocks of keys, in memory and time linear in the length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..op import Array, Cost, OpCall, Size, TensorType, Trait, Value, case, normal, op, total, want
from ..schema.visible_blocks import VisibleBlocks
from ..types import dtypes, sizes
from .elementwise import add, affine, cast, clip, floordiv, less, less_equal, logical_and, minimum, mul, sub
from .elementwise import where as choose
from .reduce import max as greatest
from .softmax_attention import attention
from .tensor import concat, expand, gather, indices, iota, reshape, unsqueeze

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
