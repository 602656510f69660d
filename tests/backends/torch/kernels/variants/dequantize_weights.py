"""Variants of the kernel file prompt/widen.py."""

from __future__ import annotations

from weft.backends.torch.kernels.prefill.dequantize_weights import CHUNKS, ROWS, dequantize_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Codes of 4 bits by groups of 128 and as GGUF files have them, 8 bits, and floats of 8 and 4 bits."""
    return [
        variant(dequantize_kernel, dtype, constants, "N", "K", absent, types={"codes": codes, "scales": scales, **more})
        for dtype, bits, group, codes, scales, more, absent in (
            (BF16, 4, 128, "*i32", "*fp16", {}, "offsets"),
            (FP16, 4, 32, "*i32", "*fp16", {"offsets": "*fp32"}, ""),
            (BF16, 8, 32, "*i32", "*fp16", {}, "offsets"),
            (BF16, 8, 128, "*fp8e4nv", "*fp32", {}, "offsets"),
            (FP32, 8, 128, "*fp8e4nv", "*fp32", {}, "offsets"),
            (BF16, 4, 32, "*u8", "*u8", {}, "offsets"),
            (FP16, 4, 16, "*u8", "*fp8e4nv", {"offsets": "*fp32"}, ""),
        )
        for constants in [{"BITS": bits, "GROUP": group, "ROWS": ROWS, "CHUNKS": CHUNKS}]
    ]
