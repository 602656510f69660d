"""Softmax attention: one op for every variant of heads, mask, bias and cache."""

from __future__ import annotations

import functools
import math

import numpy as np

from ..op import Cost, OpCall, StateSpec, TensorType, Trait, Value, list_cache_specs, list_cross_specs
from ..schema.cases import case, normal
from ..schema.checks import require
from ..schema.states import CODES
from ..schema.visible_keys import PATTERNS, VisibleKeys
from ..types import dtypes, sizes
from ..types.sizes import sum_sizes
from . import caches as cache_ops
from .declaration import composed_op
from .elementwise import cast, equal, fill_like, logical_and, mask_fill, maximum, minimum, tanh
from .products import matmul
from .reduce import cumsum, softmax
from .reduce import max as greatest
from .tensor import (
    concat,
    expand,
    gather_rows,
    iota,
    reshape,
    scatter_rows,
    slice_,
    split_heads,
    swap_last_axes,
    transpose,
    unsqueeze,
)

_QKV = (normal(2, 12, 32), normal(2, 12, 16), normal(2, 12, 16))
_GQA = {"heads": 4, "kv_heads": 2}
_CACHE = (normal(2, 2, 20, 8), normal(2, 2, 20, 8), np.array([[5, 6, 7], [9, 10, 11]]))
_LATE = np.arange(12) >= np.array([[2], [0]])
_SHOWN = np.arange(23) >= np.array([[3], [21]])
_STEP = (normal(2, 3, 32), normal(2, 3, 16), normal(2, 3, 16))
_LONG = (normal(2, 7, 32), normal(2, 7, 16), normal(2, 7, 16))  # more keys than the rolling cache holds
_RING = (normal(2, 2, 5, 8), normal(2, 2, 5, 8), np.arange(5, 12) + np.array([[0], [4]]))
_SCALES = (np.linspace(0.01, 0.03, 16), np.array([0.02]))
_SHARED = (normal(2, 3, 32), normal(2, 3, 16), None, None, None, None, normal(2, 2, 20, 8))


@composed_op(
    outputs="attention present_k present_v",
    traits=[Trait.ATTENTION],
    cases=[
        case(*_QKV, **_GQA, causal=True),
        case(*_QKV, **_GQA),
        case(normal(2, 12, 32), normal(2, 12, 32), normal(2, 12, 24), heads=4, kv_heads=4, causal=True, scale=0.2),
        case(normal(2, 5, 32), normal(2, 9, 8), normal(2, 9, 8), heads=4, kv_heads=1),
        case(*_QKV, **_GQA, causal=True, window=5, softcap=2.0),
        case(*_QKV, normal(1, 4, 12, 12), **_GQA, causal=True),
        case(*_QKV, normal(1, 4, 1, 12), **_GQA),
        case(*_QKV, None, np.arange(24).reshape(2, 12) % 12 < [[9], [12]], **_GQA),
        case(*_QKV, None, None, normal(4), **_GQA, causal=True),
        *(case(*_QKV, **_GQA, causal=True, pattern=p, stride=4, summary=1) for p in PATTERNS[1:]),
        case(*_QKV, **_GQA, causal=True, window=8, pattern="dilated", stride=2),
        *(case(*_QKV, **_GQA, causal=c, window=4, keep_first=2) for c in (True, False)),
        case(*_STEP, None, None, None, *_CACHE, **_GQA, causal=True),
        case(*_STEP, None, None, None, *_CACHE, **_GQA, causal=True, window=6, scale=0.3),
        case(*_STEP, None, None, None, *_CACHE, **_GQA, causal=True, window=4, keep_first=2),
        case(*_STEP, None, None, normal(4), *_CACHE, **_GQA, causal=True, window=16, rolling=True),
        case(*_STEP, normal(1, 4, 3, 12), _LATE, None, *_CACHE, **_GQA, causal=True, softcap=5.0),
        case(*_STEP, None, None, None, *_CACHE[:2], **_GQA, causal=True),
        case(*_STEP, normal(1, 4, 3, 23), _SHOWN, normal(4), *_CACHE[:2], **_GQA, causal=True, window=6, keep_first=2),
        *(case(*_STEP, *[None] * 3, *_CACHE, **_GQA, causal=True, pattern=p, stride=4) for p in PATTERNS[1:]),
        case(normal(2, 12, 32), normal(2, 12, 8), None, heads=4, kv_heads=1, causal=True, value_dim=6),
        case(*_SHARED, None, *_CACHE[2:], **_GQA, causal=True, value_dim=5),
        case(*_SHARED, **_GQA, causal=True, value_dim=5),
        case(*_SHARED, None, *_CACHE[2:], **_GQA, causal=True, value_dim=8, window=16, rolling=True),
        case(*_LONG, None, None, None, *_RING, **_GQA, causal=True, window=5, rolling=True),
        case(*_LONG, None, None, None, *_RING, **_GQA, causal=True, window=3, keep_first=2, rolling=True),
        case(*_LONG, None, np.arange(16) < [[8], [15]], None, *_RING, **_GQA, causal=True, window=4, rolling=True),
        case(*_QKV, *[None] * 6, *_SCALES, **_GQA, causal=True, cache_bits=8),
        case(*_QKV, *[None] * 6, *(s * 10 for s in _SCALES), **_GQA, causal=True, window=5, cache_bits=4),
    ],
)
def attention(
    q: Value,
    k: Value,
    v: Value | None = None,
    bias: Value | None = None,
    key_mask: Value | None = None,
    sinks: Value | None = None,
    past_k: Value | None = None,
    past_v: Value | None = None,
    positions: Value | None = None,
    k_scale: Value | None = None,
    v_scale: Value | None = None,
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
) -> Value | tuple[Value, ...]:
    """softmax(scale · q kᵀ + bias + mask) v per head (Vaswani 2017; grouped heads: Shazeer 2019, Ainslie 2023).

    q [batch, seq, heads·d], k [batch, keys, kv_heads·d], v [batch, keys, kv_heads·dv] → y [batch, seq, heads·dv]; query
    head h reads KV head ⌊h·kv_heads/heads⌋. `scale` defaults to 1/√d. If `softcap` is set, scores become
    softcap·tanh(score/softcap) before `bias` (broadcast to [batch, heads, seq, keys]) is added. A key is visible where
    `key_mask` [batch, keys] is not 0 and `causal`, `window`, `keep_first`, `pattern`, `stride` and `summary` allow it
    (see `weft.ir.schema.visible_keys.VisibleKeys`). `sinks` [heads] adds a key with that score and the value 0. A query
    without visible keys has the output 0.

    With a cache — `past_k` [batch, kv_heads, capacity, d], `past_v` [batch, kv_heads, capacity, dv], `positions`
    [batch, seq] of the new tokens, consecutive in each batch row — slot j has the key of position j. Slots below
    positions[b, 0] are valid, and new keys are written at their positions; present_k and present_v are the updated
    caches. `key_mask` and `bias` then index keys by position. Without `positions` all slots of the past are valid,
    present_k and present_v are the past with the new keys and values appended, `key_mask` and `bias` index slots, and a
    position is the number of earlier slots that `key_mask` allows. With `rolling` the first `keep_first` keys stay in
    their slots; later positions wrap around in the other slots, where newer keys replace older ones (window +
    keep_first ≤ capacity), and new keys after the last position that `key_mask` allows are not written.

    Without `v` the first `value_dim` features of a key are also its value (latent attention; DeepSeek-V2, 2024), and
    past_v and present_v are absent.

    With `cache_bits` (8 or 4) caches store integer codes: an element is code · scale, with `k_scale` and `v_scale` per
    channel ([kv_heads·d], [kv_heads·dv]) or one for all [1]. New keys and values are rounded to the nearest code, half
    to even, in −2^{bits−1} … 2^{bits−1} − 1. Attention reads code · scale also for new tokens and without a cache, so
    that the result does not depend on how a sequence is cut into forward passes.
    """
    (batch, seq, _), group = q.shape, heads // kv_heads
    visible = VisibleKeys(causal, window, keep_first, pattern, stride, summary)
    d = q.width // heads
    dv = (value_dim or d) if v is None else v.width // kv_heads
    qh = transpose(reshape(q, shape=(batch, seq, kv_heads, group, d)), axes=(0, 2, 3, 1, 4))
    kv, pasts = ([t for t in pair if t is not None] for pair in ((k, v), (past_k, past_v)))
    scales = [t for t in (k_scale, v_scale) if t is not None]
    if cache_bits is not None:
        code = pasts[0].type.dtype if pasts else CODES[cache_bits]
        kv = [cache_ops.emit_codes(t, scale, cache_bits, code) for t, scale in zip(kv, scales, strict=True)]
    kv = [split_heads(t, kv_heads) for t in kv]
    query_at, key_at = (unsqueeze(iota(t, axis=1), axes=(0,)) for t in (q, k))
    seen: list[Value] = []  # conditions, broadcast to [batch, seq, keys]
    present: list[Value] = []
    if past_k is not None and positions is None:
        kv = present = [concat(past, new, axis=2) for past, new in zip(pasts, kv, strict=True)]
        key_at = unsqueeze(iota(kv[0], axis=2), axes=(0,))
        query_at = query_at + (_find_last(key_at) - _find_last(query_at))
        if key_mask is not None and visible.is_local:
            is_bool = key_mask.type.dtype == dtypes.bool_
            key_at = cumsum(cast(key_mask, to=dtypes.i64) if is_bool else key_mask, axis=1) - 1
            query_at = gather_rows(key_at, expand(query_at, shape=(key_at.shape[0], seq)))
    elif past_k is not None and positions is not None:
        slot = unsqueeze(cast(iota(past_k, axis=2), to=positions.type.dtype), axes=(0,))
        first = slice_(positions, axis=1, start=0, stop=1)
        newest = first - 1
        past_at = cache_ops.emit_slot_positions(slot, newest, keep_first) if rolling else slot + fill_like(first, 0)
        is_valid = (past_at >= 0) & (past_at < first)
        seen.append(unsqueeze(concat(is_valid, equal(positions, positions), axis=1), axes=(1,)))
        query_at, key_at = positions, concat(past_at, positions, axis=1)
        joined = [concat(past, new, axis=2) for past, new in zip(pasts, kv, strict=True)]
        if rolling:
            present = cache_ops.emit_present_caches(joined, slot, first, positions, key_mask, keep_first)
        else:
            present = [scatter_rows(past, new, positions, axis=2) for past, new in zip(pasts, kv, strict=True)]
        kv = joined
        reach = maximum(key_at, fill_like(key_at, 0)) if rolling else key_at
        if bias is not None:
            by_position = transpose(expand(bias, shape=(batch, *bias.shape[1:])), axes=(0, 3, 1, 2))
            bias = transpose(gather_rows(by_position, _clamp_index(reach, bias, 3)), axes=(0, 2, 3, 1))
        if key_mask is not None:
            rows = expand(key_mask, shape=(batch, key_mask.shape[1]))
            seen.append(unsqueeze(reach <= _clamp_index(reach, key_mask, 1), axes=(1,)))
            key_mask = gather_rows(rows, _clamp_index(reach, key_mask, 1))
    if cache_bits is not None:
        kv = [cache_ops.emit_dequantized(t, scale, kv_heads, k) for t, scale in zip(kv, scales, strict=True)]
    kh, vh = kv[0], kv[1] if v is not None else slice_(kv[0], axis=3, start=0, stop=dv)
    keys, scale = kh.shape[2], 1 / math.sqrt(d) if scale is None else scale
    scores = matmul(reshape(qh, shape=(batch, kv_heads, group * seq, d)), swap_last_axes(kh))
    scores = reshape(scores * scale, shape=(batch, heads, seq, keys))
    if softcap is not None:
        scores = tanh(scores * (1 / softcap)) * softcap
    if bias is not None:
        scores = scores + bias
    if key_mask is not None:
        seen.append(unsqueeze(cast(key_mask, to=dtypes.bool_), axes=(1,)))
    seen += visible.conditions(unsqueeze(query_at, axes=(2,)), unsqueeze(key_at, axes=(1,)), equal=equal)
    if seen:
        scores = mask_fill(unsqueeze(functools.reduce(logical_and, seen), axes=(1,)), scores, -math.inf)
    if sinks is not None:  # a key of that score with value 0
        sink = expand(reshape(sinks, shape=(1, heads, 1, 1)), shape=(batch, heads, seq, 1))
        scores = concat(scores, sink, axis=3)
        vh = concat(vh, fill_like(slice_(vh, axis=2, start=0, stop=1), 0), axis=2)
    weights = reshape(softmax(scores), shape=(batch, kv_heads, group * seq, vh.shape[2]))
    mixed = transpose(reshape(matmul(weights, vh), shape=(batch, kv_heads, group, seq, dv)), axes=(0, 3, 1, 2, 4))
    y = reshape(mixed, shape=(batch, seq, heads * dv))
    return (y, *present) if present else y


@attention.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k, v, heads, kv_heads = n.q, n.k, n.v, n.heads, n.kv_heads
    for t in (q, k, v):
        require(t is None or t.rank == 3, f"{t} must be [batch, seq, heads·d]")
    fits = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
    require(fits, f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    for t, count, name in ((q, heads, "heads"), (k, kv_heads, "kv_heads"), (v, kv_heads, "kv_heads")):
        divides = t is None or (isinstance(t.shape[2], int) and t.shape[2] % count == 0)
        require(divides, f"the width of {t} is not a multiple of {name}={count}")
    d, dk = q.shape[2] // heads, k.shape[2] // kv_heads
    require(d == dk, f"q {q} and k {k} have head sizes {d} and {dk}")
    if v is None:
        fits = n.value_dim is not None and 1 <= n.value_dim <= d
        require(
            fits,
            f"without v, value_dim={n.value_dim} must be from 1 to {d}: the number of key features that are the value",
        )
    else:
        require(n.value_dim is None, f"value_dim={n.value_dim} is for an attention without v")
    fits_q = q.shape[0] == k.shape[0] and (v is None or k.shape[:2] == v.shape[:2])
    require(fits_q, f"q {q}, k {k} and v {v} differ in batch or length")
    dv = _get_value_dim(n)
    require(n.pattern in PATTERNS, f"pattern={n.pattern!r} must be one of {', '.join(PATTERNS)}")
    require(n.stride >= 1 and n.summary >= 1, f"stride={n.stride} and summary={n.summary} must both be positive")
    require(n.window is None or n.window >= 1, f"window={n.window} must be positive")
    fits = not n.rolling or None not in (n.window, n.past_k, n.positions)
    require(fits, "rolling=true needs window=, a cache (past_k) and positions")
    require(n.keep_first >= 0, f"keep_first={n.keep_first} must not be negative")
    cache_ops.check_quantization(n.cache_bits, k, v, {"k_scale": n.k_scale, "v_scale": n.v_scale}, n.causal, kv_heads)
    for operand in (k, v, n.bias, n.sinks, *((n.past_k, n.past_v) if n.cache_bits is None else ())):
        require(operand is None or operand.dtype == q.dtype, f"{operand} and q {q} differ in dtype; cast one of them")
    grown = None if n.past_k is None else n.past_k.shape[2] + k.shape[1]  # slots after the call, without `positions`
    keys = None if n.positions is not None else grown or k.shape[1]  # by position, bias and key_mask may be longer
    if n.bias is not None:
        expected = (q.shape[0], heads, q.shape[1], keys)
        fits = n.bias.rank == 4 and all(s in (1, k) or k is None for s, k in zip(n.bias.shape, expected, strict=True))
        require(fits, f"bias {n.bias} must broadcast to [batch, {heads}, seq, keys] of q {q} and k {k}")
    if n.key_mask is not None:
        mask = n.key_mask
        fits = mask.rank == 2 and mask.shape[0] in (1, q.shape[0]) and keys in (None, mask.shape[1])
        require(fits, f"key_mask {mask} must be [batch, keys] of k {k}")
    require(n.sinks is None or n.sinks.shape == (heads,), f"sinks {n.sinks} must be [{heads}]")
    y = q.with_shape(*q.shape[:2], dv * heads)
    cached = n.past_k is not None
    require(cached or n.positions is None, "positions need a cache, but past_k is absent")
    fits = (n.past_v is not None) == (cached and v is not None)
    require(fits, "past_v must be present if past_k and v are, and absent otherwise")
    if not cached:
        return (y,)
    require(q.shape[1] == k.shape[1], f"with a cache q {q} and k {k} must be equally long")
    pasts = [(n.past_k, d, "past_k")] + ([(n.past_v, dv, "past_v")] if v is not None else [])
    for past, width, name in pasts:
        fits = past.rank == 4 and past.shape[:2] == (q.shape[0], kv_heads) and past.shape[3] == width
        require(fits, f"{name} {past} must be [batch, {kv_heads}, capacity, {width}]")
        has_codes = n.cache_bits is None or past.dtype == CODES[n.cache_bits]
        require(has_codes, f"{name} {past} does not hold codes of {n.cache_bits} bits")
    capacity = n.past_k.shape[2]
    fits = not n.rolling or not isinstance(capacity, int) or n.window + n.keep_first <= capacity
    first_keys = f" and keep_first={n.keep_first}" if n.keep_first else ""
    require(fits, f"a rolling cache of {capacity} keys does not hold window={n.window}{first_keys}")
    same = v is None or n.past_k.shape[2] == n.past_v.shape[2]
    require(same, f"past_k {n.past_k} and past_v {n.past_v} differ in capacity")
    if n.positions is None:
        return y, *(past.with_axis(2, grown) for past, _, _ in pasts)
    require(n.positions.shape == q.shape[:2], f"positions {n.positions} must be [batch, seq]")
    return y, *(past for past, _, _ in pasts)


def _get_value_dim(n: OpCall) -> int:
    width: int = n.value_dim or (n.v.width if isinstance(n.v, Value) else n.v.shape[2]) // n.kv_heads
    return width


@attention.cost
def _(n: OpCall) -> Cost:
    q, k, v = n.q, n.k, n.v
    keys = k.shape[1] if n.past_k is None else n.past_k.shape[2]
    reached = keys if n.window is None else sizes.minimum(n.window + n.keep_first, keys)
    d, dv = sizes.floordiv(q.shape[2], n.heads), _get_value_dim(n)
    flops = q.shape[0] * q.shape[1] * reached * n.heads * ((d + dv) * 2 + 5)
    read = sum_sizes(t.bytes for t in (q, k, v, n.bias, n.key_mask, n.sinks, n.past_k, n.past_v) if t is not None)
    written = q.with_shape(*q.shape[:2], dv * n.heads).bytes
    fresh = (t if n.cache_bits is None else t.with_dtype(CODES[n.cache_bits]) for t in (k, v) if t is not None)
    return Cost(flops, read, written if n.past_k is None else written + sum_sizes(t.bytes for t in fresh))


@attention.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    if n.causal:
        options = {"rolling": n.rolling, "appends": n.positions is None, "window": n.window, "bits": n.cache_bits}
        return list_cache_specs(n.k, n.v, n.past_k, n.kv_heads, **options)
    # Rows that are chunks of sequences (their number depends on two sizes) attend within one call: nothing is cached.
    parts = len(sizes.list_names(n.q.shape[0])) > 1
    return () if parts or n.k.shape[1] == n.q.shape[1] else list_cross_specs(n.k, n.v)


def _clamp_index(index: Value, x: Value, axis: int) -> Value:
    last = greatest(iota(x, axis=axis), axes=(0,), keepdims=True)
    return minimum(index, cast(last, to=index.type.dtype))


def _find_last(at: Value) -> Value:
    return greatest(at, axes=(1,), keepdims=True)
