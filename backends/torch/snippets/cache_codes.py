"""Quantized KV caches: keys and values as 8-bit integers, or 4-bit integers packed two per byte, times scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .caches import KeyCache, KVCache, RollingKeyCache, RollingKVCache


def by_channel(scale: Tensor, heads: int) -> Tensor:
    """Reshape scales [heads · width] or [1] to broadcast with [batch, heads, slots, width]; f32."""
    return scale.float() if len(scale) == 1 else scale.float().view(1, heads, 1, -1)


def to_codes(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Quantize x [batch, heads, slots, width] to codes: i8, or for 4 bits u8 [.., width / 2]. A byte holds two
    neighbouring 4-bit codes, each plus 8, the first in the low half."""
    limit = 1 << (bits - 1)
    codes = (x.float() / by_channel(scale, x.shape[1])).round().clamp(-limit, limit - 1)
    if bits == 8:
        return codes.to(torch.int8)
    halves = (codes + limit).to(torch.uint8).unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 4


def from_codes(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantize `codes` of `to_codes`, in `dtype`."""
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
    """Write k and v into `cache` as codes of `bits`; return the keys and values of the columns of `mask`, dequantized.
    Keys and values of the call are rounded as well, also without a cache, so that the result does not depend on how a
    sequence is split into calls."""
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
    """Do as `through_codes` for a cache of keys only, whose first elements are also the values."""
    codes = to_codes(k, scale, bits)
    if cache is not None:
        assert positions is not None
        codes = cache.update(codes, positions, mask)
    return from_codes(codes, scale, bits, k.dtype)
