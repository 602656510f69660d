"""RoPE (arXiv 2104.09864) from given cosines and sines: the layout of pairs in a head, and a torch version."""

from __future__ import annotations

import torch

from .launch import jit, tl


@jit
def pair_element(pair, side, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the index within a head of the first (`side` 0) or second (`side` 1) element of a pair. The elements of a
    rotated pair are adjacent if INTERLEAVED, else ROTARY / 2 apart; pairs that are not rotated are always adjacent."""
    distance: tl.constexpr = 0 if INTERLEAVED else ROTARY // 2
    return tl.where(pair < distance, pair + side * distance, 2 * pair + side)


@jit
def angles(cos, sin, m, pair, M, turns, ROTARY: tl.constexpr):
    """Return the cosine and sine, [BLOCK_M, pairs], of pairs `pair` [1, pairs] of tokens m [BLOCK_M, 1]; `cos` and
    `sin` are [M, ROTARY / 2]. They are 1 and 0 (no rotation) for pairs from ROTARY / 2 on, for tokens from M on, and
    everywhere if `turns` is false."""
    there = (m < M) & (pair < ROTARY // 2) & turns
    at = m * (ROTARY // 2) + pair
    return tl.load(cos + at, mask=there, other=1.0), tl.load(sin + at, mask=there, other=0.0)


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x [batch, heads, d] with its first pairs (see `pair_element`) rotated by angles given as `cos` and `sin`
    [batch, pairs]."""
    pairs = cos.shape[-1]
    wide, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    rotated = a * c - b * s, b * c + a * s
    mixed = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    mixed = mixed.to(x.dtype)
    return torch.cat([mixed, rest], -1) if rest.shape[-1] else mixed
