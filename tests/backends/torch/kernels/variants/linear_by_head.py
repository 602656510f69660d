"""Variants of the kernel file linear_by_head.py."""

from __future__ import annotations

from weft.backends.torch.kernels.linear_by_head import linear_by_head_kernel
from weft.backends.torch.kernels.shared.gemv import choose_tile

from .form import BF16, FP16, FP32, Variant, of_tile


def variants() -> list[Variant]:
    """DeepSeek-V3 and V2-Lite, whose heads go from 512 latents to 128 values, for one row and for more."""
    return [
        of_tile(choose_tile(m, heads * 128, 512, dtype).within(128), linear_by_head_kernel, m, dtype, "N K x_row", {})
        for m, heads, dtype in ((1, 128, BF16), (8, 128, FP16), (1, 16, FP32))
    ]
