"""Variants of the kernel file prompt/quantize_float8.py."""

from __future__ import annotations

from weft.backends.torch.kernels.prefill.quantize_float8 import ROWS, STEP, quantize_float8_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """By groups of 128 and by row, in each dtype."""
    return [
        variant(
            quantize_float8_kernel, dtype, constants, "M", "K x_row width", types={"y": "*fp8e4nv", "scales": "*fp32"}
        )
        for dtype, group in ((BF16, 128), (BF16, 4096), (FP16, 128), (FP32, 128))
        for constants in [{"GROUP": group, "ROWS": ROWS, "STEP": STEP}]
    ]
