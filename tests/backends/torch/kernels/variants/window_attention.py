"""Variants of the kernel file prompt/window_attention.py."""

from __future__ import annotations

import torch

from weft.backends.torch.kernels.prefill.window_attention import _constants, _tile, window_kernel
from weft.backends.torch.kernels.shared.launch import DTYPES
from weft.backends.torch.kernels.shared.online_softmax import HOPPER
from weft.backends.torch.kernels.shared.operands import power_of_2

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Head sizes, windows and dtypes that ship, and each kind of mask."""
    plain = [(BF16, 128, 4096), (BF16, 128, 128), (FP16, 64, 2048), (BF16, 256, 1024), (BF16, 80, 4096)]
    found = [_variant(dtype, d, window) for dtype, d, window in [*plain, (FP32, 64, 512), (FP32, 128, 512)]]
    found += [_variant(BF16, 64, 128, sinks=True), _variant(BF16, 256, 4096, SOFTCAP=50.0)]
    return [*found, _variant(BF16, 128, 4096, sinks=True, KEEP=4, SOFTCAP=30.0)]


def _variant(
    dtype: torch.dtype, d: int, window: int, sinks: bool = False, KEEP: int = 0, SOFTCAP: float = 0.0
) -> Variant:
    wide = power_of_2(d, 16)
    tile = _tile(wide, window, dtype.itemsize, HOPPER)
    described = f"tensordesc<{DTYPES[dtype]}[1, 1, {tile.keys}, {wide}]>"
    return variant(
        window_kernel,
        dtype,
        {**_constants(d, d, 4, tile), "WINDOW": window, "KEEP": KEEP, "SOFTCAP": SOFTCAP},
        "queries keys start shift",
        "q_batch q_head q_token",
        "" if sinks else "sinks",
        {"k": described, "v": described},
        warps=tile.warps,
        stages=tile.stages,
    )
