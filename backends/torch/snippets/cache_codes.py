"""Caches of codes: keys and values as whole numbers of 8 bits, or of 4 bits two a byte, times scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .caches import KeyCache, KVCache, RollingKeyCache, RollingKVCache


def by_channel(scale: Tensor, heads: int) -> Tensor:
    """Scales of channels [heads · width], or one of all [1], for [batch, heads, slots, width]; f32."""
    return scale.float() if len(scale) == 1 else scale.float().view(1, heads, 1, -1)


def to_codes(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """x [batch, heads, slots, width] as codes, i8; those of 4 bits as bytes [.., width / 2], each plus 8: of two
    neighbours the first is the lower half."""
    limit = 1 << (bits - 1)
    codes = (x.float() / by_channel(scale, x.shape[1])).round().clamp(-limit, limit - 1)
    if bits == 8:
        return codes.to(torch.int8)
    halves = (codes + limit).to(torch.uint8).unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 4


def from_codes(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The numbers that `codes` stand for, in `dtype`."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    return (codes.float() * by_channel(scale, codes.shape[1])).to(dtype)


def through_codes(
    cache: KVCache | RollingKVCache | None,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    k_scale: Tensor,
    v_scale: Tensor,
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Keys and values that `mask` tells of, rounded to codes of so many `bits`, which `cache` holds. Those of the call
    are rounded, too, and where there is no cache: it does not matter how a text is cut into calls."""
    k_codes, v_codes = to_codes(k, k_scale, bits), to_codes(v, v_scale, bits)
    if cache is not None:
        assert positions is not None
        k_codes, v_codes = cache.update(k_codes, v_codes, positions, mask)
    return from_codes(k_codes, k_scale, bits, k.dtype), from_codes(v_codes, v_scale, bits, v.dtype)


def key_through_codes(
    cache: KeyCache | RollingKeyCache | None,
    k: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    scale: Tensor,
    bits: int,
) -> Tensor:
    """`through_codes` of keys whose first numbers are the values, too."""
    codes = to_codes(k, scale, bits)
    if cache is not None:
        assert positions is not None
        codes = cache.update(codes, positions, mask)
    return from_codes(codes, scale, bits, k.dtype)
