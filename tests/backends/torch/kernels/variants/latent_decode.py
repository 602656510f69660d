"""Variants of the kernel file latent_decode.py."""

from __future__ import annotations

import torch

from weft.backends.torch.kernels.latent_decode import _shape, latent_kernel
from weft.backends.torch.kernels.shared.cached_keys import CacheMask
from weft.backends.torch.kernels.shared.online_softmax import HOPPER

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """The published widths with 16 heads and more, and each kind of mask."""
    found = [_variant(BF16, 512, 64, heads) for heads in (16, 32, 128)]
    found += [_variant(FP16, 256, 32, 40), _variant(FP32, 128, 64, 16), _variant(BF16, 512, 64, 64, sinks=True)]
    ring = CacheMask(4096, 1024, 4, rolling=True).constants
    return [*found, _variant(BF16, 512, 64, 16, False, **ring, SOFTCAP=30.0, INSIDE=True)]


def _variant(dtype: torch.dtype, rank: int, rope: int, heads: int, sinks: bool = False, **mask: float) -> Variant:
    unmasked = {"WINDOW": 0, "KEEP": 0, "RING": 0, "SOFTCAP": 0.0, "INSIDE": False}
    shape, warps = _shape(rank, rope, heads, dtype.itemsize, HOPPER)
    constants, absent = {**shape, **unmasked, **mask}, "" if sinks else "sinks"
    return variant(latent_kernel, dtype, constants, "capacity", "batch_stride", absent, warps=warps)
