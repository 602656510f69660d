"""Quantized KV caches: codes of keys and values, and their way into a cache."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.lib.cache_codes import (
    dequantize_heads,
    quantize_heads,
    update_quantized,
    update_quantized_keys,
)
from weft.backends.torch.lib.caches import KeyCache, KVCache


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_the_nearest_values(bits: int) -> None:
    """Compare with a search among all codes, half to even."""
    generator = torch.Generator().manual_seed(1)
    x, scale = torch.randn(2, 3, 5, 8, generator=generator) * 4, torch.rand(24, generator=generator) / 4 + 0.1
    every = torch.arange(-(1 << bits - 1), 1 << bits - 1) * scale.view(1, 3, 1, 8, 1)
    nearest = (every - x[..., None]).abs().argmin(-1, keepdim=True)
    found = dequantize_heads(quantize_heads(x, scale, bits), scale, bits, torch.float32)
    torch.testing.assert_close(found, every.expand(*x.shape, -1).gather(-1, nearest)[..., 0])
    halves = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.0, 99.0]).view(1, 1, 1, 8)
    most = (1 << bits - 1) - 1
    whole = dequantize_heads(quantize_heads(halves, torch.ones(1), bits), torch.ones(1), bits, torch.float32)
    assert whole.flatten().tolist() == [-2, -2, 0, 0, 2, 2, 0, min(most, 99)]


def test_a_byte_holds_two_codes_of_4_bits() -> None:
    codes = quantize_heads(torch.tensor([-8.0, 7.0, 0.0, 1.0]).view(1, 1, 1, 4), torch.ones(1), 4)
    assert codes.flatten().tolist() == [0xF0, 0x98]


@pytest.mark.parametrize("bits", [8, 4])
def test_cached_and_uncached_values_are_rounded_alike(bits: int) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    scale, at = torch.full((1,), 0.25), torch.arange(3)[None]
    width, kind = (4, torch.int8) if bits == 8 else (2, torch.uint8)
    cache = KVCache(1, 2, 5, width, width, torch.zeros(0, dtype=kind))
    plain = update_quantized(None, k, v, None, None, scale, scale, bits)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    for found, wanted in zip(update_quantized(cache, k, v, at, mask, scale, scale, bits), plain, strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted)
    latent = KeyCache(1, 2, 5, width, torch.zeros(0, dtype=kind))
    assert torch.equal(update_quantized_keys(latent, k, at, mask, scale, bits), plain[0])
    assert torch.equal(update_quantized_keys(None, k, None, None, scale, bits), plain[0])
    assert torch.equal(latent.k, cache.k)
