"""Sampling thresholds (top-k, top-p) without a sort: a radix search finds the key digit by digit, in base 8.

A candidate is a logit and its token; the weight of a candidate is its probability divided by that of the likeliest
token. Weights are f32, their sums f64.
"""

from __future__ import annotations

import math

from .launch import constexpr, jit, tl

LOWEST = constexpr(-(1 << 40))  # below the keys of all numbers
NEAR = constexpr(math.exp(-80))  # a token that weighs less does not count as one that can follow
FAR = constexpr(200)  # scores that are lower by this weigh nothing
TOKENS = 1 << 20  # more than every token


@jit
def order_key(x):
    """Return keys (i64) of the floats x (f32) that are in the same order as x."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def token_weights(x, largest, temperature):
    """Return weights of logits x: probability / that of the likeliest token, whose logit is `largest`; at most 1."""
    score = tl.maximum(tl.minimum(x, largest) - largest, -FAR * temperature) / temperature
    return tl.exp(score)


@jit
def read_candidates(values, tokens, begin, count, largest, temperature, least, last, min_p, CHUNK: tl.constexpr):
    """Return tokens, weights and keys of the CHUNK candidates from index `begin` on, and a mask of those that are kept.
    A candidate is kept if its index is below `count`, its weight is at least `min_p`, and its key is above `least`, or
    equal to `least` with a token up to `last`. Without `tokens`, token ids are indices."""
    i = begin + tl.arange(0, CHUNK)
    x = tl.load(values + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
    token = i
    if tokens is not None:
        token = tl.load(tokens + i, mask=i < count, other=0, cache_modifier=".cg")
    weight, key = token_weights(x, largest, temperature), order_key(x)
    keep = (key > least) | ((key == least) & (token <= last))
    return token, weight, key, keep & (weight >= min_p) & (i < count)


@jit
def search_key(
    values, tokens, count, largest, temperature, least, last, min_p, target,
    BY_TOKEN: tl.constexpr, ALIKE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the largest key such that the candidates with this key or a larger one weigh at least `target` in total
    (below all keys if there is none), and the total weight of the candidates with a larger key. `read_candidates`
    selects the candidates by the same arguments. Keys are the values of `order_key`; with BY_TOKEN they are −token, and
    the total must exceed `target`. A candidate weighs 1 if ALIKE, else its weight. With BY_TOKEN and ALIKE, only
    candidates whose `order_key` is `least` count."""
    way = 1 + tl.arange(0, 8).to(tl.int64)
    DIGITS: tl.constexpr = 7 if BY_TOKEN else 11  # in base 8
    step = tl.full([], 1 << (3 * (DIGITS - 1)), tl.int64)
    low = -4 * step
    above = tl.zeros([], tl.float64)
    for _ in range(DIGITS):
        bounds = low + way * step
        sums = tl.zeros([8], tl.float64)
        for begin in range(0, count, CHUNK):
            token, weight, key, keep = read_candidates(
                values, tokens, begin, count, largest, temperature, least, last, min_p, CHUNK
            )
            if BY_TOKEN and ALIKE:
                keep = keep & (key == least)
            weight = tl.where(keep, 1.0 if ALIKE else weight, 0.0)
            if BY_TOKEN:
                key = -token.to(tl.int64)
            sums += tl.sum(tl.where(key[None, :] >= bounds[:, None], weight[None, :], 0.0).to(tl.float64), axis=1)
        enough = sums > target if BY_TOKEN else sums >= target
        above = tl.maximum(above, tl.max(tl.where(enough, 0.0, sums), axis=0))
        low += step * tl.sum(enough.to(tl.int64), axis=0)
        step = step // 8
    return low, above


@jit
def key_to_logit(key):
    """Return the logit of a key, f32: the inverse of `order_key`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def total_weight(values, tokens, count, largest, temperature, least, last, min_p, CHUNK: tl.constexpr):
    """Return the total weight of the candidates that `read_candidates` keeps, the number of them with weight NEAR or
    more, and the largest token among those with a weight above 0 (0 if there are none)."""
    together = tl.zeros([], tl.float64)
    number, end = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, count, CHUNK):
        token, weight, _, keep = read_candidates(
            values, tokens, begin, count, largest, temperature, least, last, min_p, CHUNK
        )
        together += tl.sum(tl.where(keep, weight, 0.0).to(tl.float64), axis=0)
        number += tl.sum((keep & (weight >= NEAR)).to(tl.int32), axis=0)
        end = tl.maximum(end, tl.max(tl.where(keep & (weight > 0), token, 0), axis=0))
    return together, number, end
