"""Relative positions in attention: biases on scores, or vectors added to keys and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .indexing import softmax_or_zeros, wide


def alibi(slopes: Tensor, distance: Tensor) -> Tensor:
    """Return the ALiBi bias slope · (j − i) [batch, heads, seq, keys], in the dtype of slopes: slopes [heads], distance
    j − i [batch, seq, keys] (Press 2022, arXiv 2108.12409)."""
    return (wide(slopes)[:, None, None] * distance[:, None]).to(slopes.dtype)


def distance_buckets(distance: Tensor, count: int, max_distance: int) -> Tensor:
    """Return the bucket (0 to count − 1) of each distance ≥ 0: half exact, half logarithmic up to `max_distance`."""
    exact = count // 2
    rate = (count - exact) / math.log(max_distance / exact)
    far = torch.log(distance.clamp(min=1).float() / exact) * rate + (exact + 1e-5)  # 1e-5: more than the rounding error
    return torch.where(distance < exact, distance, far.long().clamp(max=count - 1))


def relative_bias(table: Tensor, distance: Tensor, max_distance: int) -> Tensor:
    """Return T5's bias table[bucket(j − i)] [batch, heads, seq, keys], the second half of the buckets for j > i: table
    [buckets, heads], distance j − i [batch, seq, keys] (Raffel 2020, arXiv 1910.10683)."""
    count = table.shape[0] // 2
    bucket = distance_buckets(distance.abs(), count, max_distance) + count * (distance > 0)
    return table[bucket].permute(0, 3, 1, 2)


def causal_relative_bias(table: Tensor, distance: Tensor, max_distance: int) -> Tensor:
    """Return T5's decoder bias table[bucket(i − j)] [batch, heads, seq, keys], bucket 0 for the future: table [buckets,
    heads], distance j − i [batch, seq, keys] (Raffel 2020, arXiv 1910.10683)."""
    bucket = distance_buckets((-distance).clamp(min=0), table.shape[0], max_distance)
    return table[bucket].permute(0, 3, 1, 2)


def relative_rows(table: Tensor, distance: Tensor) -> Tensor:
    """Return row indices clip(j − i, ±R) + R [batch, 1, seq, keys] of table [2R + 1, d]: j − i [batch, seq, keys]."""
    reach = table.shape[0] // 2
    return distance[:, None].clamp(-reach, reach) + reach


def relative_attention(
    q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, value_table: Tensor | None, distance: Tensor, seen: Tensor
) -> Tensor:
    """Return Σ_j α_ij (v_j + w_V[r]), α = softmax_j(q_i·(k_j + w_K[r])/√d), r = clip(j − i, ±R) + R (Shaw 2018, arXiv
    1803.02155): q [batch, heads, seq, d], k and v [batch, heads, keys, d], tables w_K, w_V (None: 0) [2R + 1, d],
    distance j − i [batch, seq, keys]; the mask `seen` (True: visible) broadcasts to [batch, heads, seq, keys]."""
    rows = relative_rows(key_table, distance)
    relative = (q @ key_table.mT).gather(-1, rows.expand(*q.shape[:2], -1, -1))
    scores = (q @ k.mT + relative) / math.sqrt(q.shape[-1])
    weights = softmax_or_zeros(scores.masked_fill(~seen, -math.inf))
    if value_table is None:
        return weights @ v
    by_row = torch.zeros_like(weights[..., :1]).expand(*weights.shape[:-1], value_table.shape[0])
    by_row = by_row.scatter_add(-1, relative_rows(value_table, distance).expand_as(weights), weights)
    return weights @ v + by_row @ value_table
