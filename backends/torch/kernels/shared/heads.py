"""Norms of query and key heads, and their storage: queries in a tensor, keys and values in a cache."""

from __future__ import annotations

from .cached_keys import own_slot
from .float8 import round_float8
from .launch import jit, tl
from .rotary import pair_element


@jit
def cache_pointers(
    k_cache, v_cache, positions, m, head, M, seq, heads, kv_heads, capacity, keep, stride_b, stride_h, stride_t,
    ROLLING: tl.constexpr,
):  # fmt: skip
    """Return pointers to the cache rows of tokens m in key or value head `head`, and a mask of the tokens with a slot,
    both shaped like m. `head` counts query heads first, then key heads, then value heads; m counts the tokens of all
    sequences, `seq` each. stride_b, stride_h and stride_t are the cache's strides of batch row, head and slot."""
    slot = own_slot(tl.load(positions + m, mask=m < M, other=-1), capacity, keep, ROLLING)
    cache = k_cache
    if head >= heads + kv_heads:
        cache = v_cache
    at = (
        cache
        + (m // seq).to(tl.int64) * stride_b
        + ((head - heads) % kv_heads).to(tl.int64) * stride_h
        + slot * stride_t
    )
    return at, (slot >= 0) & (slot < capacity)


@jit
def store_head(
    a, b, c, s, q, k_cache, v_cache, k_scale, v_scale, positions, m, pair, head, M, seq, heads, kv_heads, capacity,
    keep, stride_b, stride_h, stride_t,
    HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ROLLING: tl.constexpr,
):  # fmt: skip
    """Rotate pairs (a, b) [BLOCK_M, pairs] of head `head` by cosines and sines (c, s). Store a query head in q [M,
    heads, HEAD_DIM], and a key or value head at the slots of the tokens' positions in its cache (see `cache_pointers`).
    With `k_scale` and `v_scale` [kv_heads], keys and values are divided by their scales and stored in FP8."""
    there = (m < M) & (pair < HEAD_DIM // 2)
    first, second = pair_element(pair, 0, ROTARY, INTERLEAVED), pair_element(pair, 1, ROTARY, INTERLEAVED)
    if k_scale is None:
        if head < heads:
            at = q + (m * heads + head) * HEAD_DIM
        else:
            at, inside = cache_pointers(
                k_cache, v_cache, positions, m, head, M, seq, heads, kv_heads, capacity, keep, stride_b, stride_h,
                stride_t, ROLLING,
            )  # fmt: skip
            there = there & inside
        tl.store(at + first, a * c - b * s, mask=there)
        tl.store(at + second, b * c + a * s, mask=there)
    else:
        if head < heads:
            at = q + (m * heads + head) * HEAD_DIM
            tl.store(at + first, a * c - b * s, mask=there)
            tl.store(at + second, b * c + a * s, mask=there)
        else:
            to, inside = cache_pointers(
                k_cache, v_cache, positions, m, head, M, seq, heads, kv_heads, capacity, keep, stride_b, stride_h,
                stride_t, ROLLING,
            )  # fmt: skip
            there = there & inside
            scale = tl.load(k_scale + (head - heads) % kv_heads)
            if head >= heads + kv_heads:
                scale = tl.load(v_scale + (head - heads) % kv_heads)
            tl.store(to + first, round_float8((a * c - b * s) / scale), mask=there)
            tl.store(to + second, round_float8((b * c + a * s) / scale), mask=there)


@jit
def norm_pairs(a, b, first, second, pair, q_gain, k_gain, head, heads, eps, HEAD_DIM: tl.constexpr):
    """Return the pairs (a, b) [rows, pairs] of a head, divided by √(mean square + ε) over its HEAD_DIM elements. With
    gains, multiply a by elements `first`, and b by elements `second`, of `q_gain` if head < heads, else of `k_gain`."""
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
    a, b = a * rstd, b * rstd
    if q_gain is not None:
        gain = q_gain
        if head >= heads:
            gain = k_gain
        a *= tl.load(gain + first, mask=pair < HEAD_DIM // 2, other=0.0).to(tl.float32)
        b *= tl.load(gain + second, mask=pair < HEAD_DIM // 2, other=0.0).to(tl.float32)
    return a, b
