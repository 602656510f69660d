"""Thresholds among candidates without sorting them: keys are found digit by digit, in base 8.

A candidate is a logit and its token; the weight of a candidate is its probability, as a multiple of that of the
likeliest token. Weights are f32, their sums f64.
"""

from __future__ import annotations

import math

from .launch import fixed, jit, tl

LOWEST = fixed(-(1 << 40))  # below the keys of all numbers
NEAR = fixed(math.exp(-80))  # a token that weighs less does not count as one that can follow
FAR = fixed(200)  # scores that are lower by this weigh nothing
TOKENS = 1 << 20  # more than every token


@jit
def ordered(x):
    """Whole numbers in the order of the numbers x, f32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def weights(x, largest, temperature):
    """Probability of tokens with logits x, as a multiple of that of the likeliest, and no more than it."""
    score = tl.maximum(tl.minimum(x, largest) - largest, -FAR * temperature) / temperature
    return tl.exp(score)


@jit
def read(values, tokens, begin, count, largest, temperature, least, last, min_p, CHUNK: tl.constexpr):
    """CHUNK candidates: tokens, weights, keys; which are above the key `least`, or at it and not behind the token
    `last`, and likely enough."""
    i = begin + tl.arange(0, CHUNK)
    x = tl.load(values + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
    token = i
    if tokens is not None:
        token = tl.load(tokens + i, mask=i < count, other=0, cache_modifier=".cg")
    weight, key = weights(x, largest, temperature), ordered(x)
    keep = (key > least) | ((key == least) & (token <= last))
    return token, weight, key, keep & (weight >= min_p) & (i < count)


@jit
def search(
    values, tokens, count, largest, temperature, least, last, min_p, target,
    BY_TOKEN: tl.constexpr, ALIKE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest threshold of keys, of which those at or above it weigh enough; and what those above it weigh.

    Keys are those of the logits, of which `target` is enough; or BY_TOKEN the first token has the largest, and more
    than `target` is enough. The candidates that are kept, as `read` says, weigh 1 if they are ALIKE, else as they are
    likely. With both, only those that have the key `least` are looked at.
    """
    way = 1 + tl.arange(0, 8).to(tl.int64)
    DIGITS: tl.constexpr = 7 if BY_TOKEN else 11  # in base 8
    step = tl.full([], 1 << (3 * (DIGITS - 1)), tl.int64)
    low = -4 * step
    above = tl.zeros([], tl.float64)
    for _ in range(DIGITS):
        bounds = low + way * step
        sums = tl.zeros([8], tl.float64)
        for begin in range(0, count, CHUNK):
            token, weight, key, keep = read(
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
def number_of(key):
    """The logit that has the key, f32."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def total(values, tokens, count, largest, temperature, least, last, min_p, CHUNK: tl.constexpr):
    """Weight of the candidates that are kept, how many of them weigh NEAR or more, and the last that has weight."""
    together = tl.zeros([], tl.float64)
    number, end = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, count, CHUNK):
        token, weight, _, keep = read(values, tokens, begin, count, largest, temperature, least, last, min_p, CHUNK)
        together += tl.sum(tl.where(keep, weight, 0.0).to(tl.float64), axis=0)
        number += tl.sum((keep & (weight >= NEAR)).to(tl.int32), axis=0)
        end = tl.maximum(end, tl.max(tl.where(keep & (weight > 0), token, 0), axis=0))
    return together, number, end
