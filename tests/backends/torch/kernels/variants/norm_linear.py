"""Variants of the kernel file norm_linear.py."""

from __future__ import annotations

from weft.backends.torch.kernels.norm_linear import norm_linear_kernel
from weft.backends.torch.kernels.shared.gemv import choose_code_tile, choose_tile

from .form import BF16, FLOATS, FP16, FP32, MXFP4, NVFP4, Variant, of_tile


def variants() -> list[Variant]:
    """Heads of one row and of more, a LayerNorm, and a router without norm; and products with weights of few bits."""
    return [
        of_tile(choose_tile(m, n, k, dtype), norm_linear_kernel, m, dtype, "N K x_row", forms, absent=absent)
        for m, n, k, dtype, norm, absent, activation in (
            (1, 128256, 4096, BF16, "rms", "shift bias", "identity"),
            *((m, 128256, 4096, BF16, "rms", "shift bias", "identity") for m in (4, 8, 16, 32, 64)),
            (4, 2048, 1536, FP16, "layer", "", "gelu"),
            (1, 64, 576, FP32, "none", "gain shift bias", "sigmoid"),
        )
        for forms in [{"NORM": norm, "ACTIVATION": activation}]
    ] + _coded()


def _coded() -> list[Variant]:
    """8 B parameters in 4 bits by groups of 128 and 32, with offsets; 8 bits per channel and as q8_0; several rows;
    blocks as GGUF files have them, whose scales are fp16 and offsets fp32, whatever x is; floats of 8 and 4 bits."""
    shipped, stored = [], {"scales": "*fp16", "offsets": "*fp32"}
    plain = {"NORM": "none", "ACTIVATION": "identity"}
    for m, n, k, dtype, bits, group, absent, types in (
        *((m, 28672, 4096, BF16, 4, 128, "offsets bias", {}) for m in (1, 4, 8, 16, 32, 64)),
        (4, 4096, 4096, BF16, 4, 128, "offsets bias", {}),
        (1, 4096, 14336, FP16, 4, 32, "", {}),
        (1, 6144, 4096, BF16, 4, 64, "offsets bias", {}),
        (8, 2048, 2048, FP16, 8, 32, "offsets bias", {}),
        (8, 4096, 4096, FP32, 4, 32, "", {}),
        (1, 4096, 14336, BF16, 8, 14336, "offsets bias", {}),
        (1, 1536, 576, FP32, 8, 32, "offsets bias", {}),
        (1, 4096, 4096, BF16, 4, 32, "", stored),
        (1, 4096, 14336, BF16, 8, 32, "offsets bias", stored),
        *((m, 28672, 4096, BF16, 8, 128, "offsets bias", FLOATS) for m in (1, 8, 16, 32, 64)),
        (1, 28672, 4096, BF16, 8, 4096, "offsets bias", FLOATS),
        (1, 28672, 4096, FP16, 8, 128, "offsets bias", FLOATS),
        (8, 4096, 4096, FP32, 8, 128, "offsets bias", FLOATS),
        *((m, 28672, 4096, BF16, 4, 32, "offsets bias", MXFP4) for m in (1, 8, 64)),
        (1, 4096, 14336, FP16, 4, 32, "offsets bias", MXFP4),
        *((m, 28672, 4096, BF16, 4, 16, "bias", NVFP4) for m in (1, 8, 64)),
        (1, 4096, 14336, FP16, 4, 16, "bias", NVFP4),
        (8, 4096, 4096, FP32, 4, 16, "bias", NVFP4),
    ):
        types = {"weight": "*i32", **types}
        plan, absent = choose_code_tile(m, n, k, bits, group, small=types["weight"] == "*u8"), f"gain shift {absent}"
        shipped.append(of_tile(plan, norm_linear_kernel, m, dtype, "N K x_row", plain, absent=absent, types=types))
    return shipped
