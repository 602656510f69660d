"""Variants of the kernel file decode_attention.py."""

from __future__ import annotations

import torch

from weft.backends.torch.kernels.decode_attention import _shape, decode_kernel
from weft.backends.torch.kernels.shared.cached_keys import CacheMask

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Head sizes, groups and dtypes that ship, and each kind of mask."""
    plain = [(BF16, 128, 4), (BF16, 64, 8), (FP16, 256, 2), (BF16, 80, 1), (BF16, 16, 71), (FP32, 128, 4)]
    found = [_variant(dtype, d, d, group) for dtype, d, group in plain]
    found += [_variant(BF16, 576, 512, 16), _variant(FP32, 256, 256, 8), _variant(BF16, 128, 128, 48)]
    ring = CacheMask(4096, 1024, 4, rolling=True).constants
    found += [
        _variant(BF16, 256, 256, 4, (), **ring, SOFTCAP=50.0, INSIDE=False),
        _variant(BF16, 64, 64, 8, ("sinks",), WINDOW=128),
        _variant(BF16, 128, 128, 5, CHUNK=8192),
        _variant(FP16, 64, 64, 1, WINDOW=4096, RING=4096, STEP=4),
        *(
            _variant(dtype, d, d, group, ("k_scale",))
            for dtype, d, group in ((BF16, 128, 4), (BF16, 64, 8), (FP16, 256, 2))
        ),
        _variant(FP32, 128, 128, 4, ("k_scale",)),
        _variant(BF16, 128, 128, 20, QUERIES=5),
        _variant(BF16, 128, 128, 64, ("k_scale",), QUERIES=16),
    ]
    return [*found, _variant(BF16, 128, 128, 1, ("slopes",))]


def _variant(dtype: torch.dtype, d: int, dv: int, group: int, biases: tuple[str, ...] = (), **mask: float) -> Variant:
    unmasked = {"QUERIES": 1, "WINDOW": 0, "KEEP": 0, "RING": 0, "CHUNK": 0, "STEP": 1, "SOFTCAP": 0.0, "INSIDE": True}
    strides = "k_batch k_head k_slot v_batch v_head v_slot"
    absent = " ".join(name for name in ("sinks", "slopes") if name not in biases)
    types = {"k_scale": "*fp32", "v_scale": "*fp32", "k": "*fp8e4nv", "v": "*fp8e4nv"}
    if "k_scale" not in biases:
        types, absent = {}, f"{absent} k_scale v_scale"
    shape = _shape(d, dv, group, dtype.itemsize)
    return variant(decode_kernel, dtype, {**shape, **unmasked, **mask}, "capacity", strides, absent, types=types)
