"""Quantized KV caches: keys and values as 8-bit integers, or 4-bit integers packed two per byte, times scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .caches import KeyCache, KVCache, RollingKeyCache, RollingKVCache


def shape_scales(scale: Tensor, heads: int) -> Tensor:
    """Return scales [heads · width] or [1] in f32, in a shape that broadcasts with [batch, heads, slots, width]."""
    return scale.float() if len(scale) == 1 else scale.float().view(1, heads, 1, -1)


def quantize_heads(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the codes round(x / scale) of x [batch, heads, slots, width]: i8, or for 4 bits u8 [.., width / 2]. Codes
    out of range are clipped. A byte holds two adjacent 4-bit codes, each plus 8, the first in the low half."""
    limit = 1 << (bits - 1)
    codes = (x.float() / shape_scales(scale, x.shape[1])).round().clamp(-limit, limit - 1)
    if bits == 8:
        return codes.to(torch.int8)
    halves = (codes + limit).to(torch.uint8).unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 4


def dequantize_heads(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the values [batch, heads, slots, width], in `dtype`, of `codes` as `quantize_heads` returns them."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    return (codes.float() * shape_scales(scale, codes.shape[1])).to(dtype)


def update_quantized(
    cache: KVCache | RollingKVCache | None,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    k_scale: Tensor,
    v_scale: Tensor,
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Write the new k and v [batch, heads, seq, width] into `cache` as codes of `bits`; return its keys and values,
    dequantized, one per column of `mask`. Without a cache or mask, return k and v, also rounded: the result must not
    depend on how a sequence is split into calls."""
    k_codes, v_codes = quantize_heads(k, k_scale, bits), quantize_heads(v, v_scale, bits)
    if cache is not None:
        assert positions is not None
        k_codes, v_codes = cache.update(k_codes, v_codes, positions, mask)
    return dequantize_heads(k_codes, k_scale, bits, k.dtype), dequantize_heads(v_codes, v_scale, bits, v.dtype)


def update_quantized_keys(
    cache: KeyCache | RollingKeyCache | None,
    k: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    scale: Tensor,
    bits: int,
) -> Tensor:
    """Write k as `update_quantized` does; return the dequantized keys, of which the first elements are the values."""
    codes = quantize_heads(k, scale, bits)
    if cache is not None:
        assert positions is not None
        codes = cache.update(codes, positions, mask)
    return dequantize_heads(codes, scale, bits, k.dtype)
