"""Variants of the kernel file norm_glu.py."""

from __future__ import annotations

from weft.backends.torch.kernels.norm_glu import norm_glu_kernel
from weft.backends.torch.kernels.shared.gemv import choose_code_tile, choose_tile

from .form import BF16, CODES, FLOATS, FP16, FP32, Variant, of_tile


def variants() -> list[Variant]:
    """SwiGLU of 8 B and of 135 M parameters, four rows of a GEGLU with LayerNorm, eight rows in fp32, a limited one;
    more rows; 4 bits, and floats of 8."""
    return [
        of_tile(choose_tile(m, 2 * n, k, dtype, least=2), norm_glu_kernel, m, dtype, "N K", forms, absent=absent)
        for m, n, k, dtype, norm, activation, limit, shift, absent in (
            (1, 14336, 4096, BF16, "rms", "silu", None, 0.0, "shift bias"),
            (1, 1536, 576, BF16, "rms", "silu", None, 0.0, "shift bias"),
            (4, 6144, 2048, FP16, "layer", "gelu_tanh", None, 0.0, ""),
            (8, 14336, 4096, FP32, "rms", "silu", None, 0.0, "shift bias"),
            (1, 2880, 2880, BF16, "rms", "gelu_quick", 7.0, 1.0, "shift bias"),
            *((m, 14336, 4096, BF16, "rms", "silu", None, 0.0, "shift bias") for m in (8, 64)),
        )
        for forms in [{"NORM": norm, "ACTIVATION": activation, "LIMIT": limit, "SHIFT": shift}]
    ] + [
        of_tile(
            choose_code_tile(m, 28672, 4096, bits, 128),
            norm_glu_kernel,
            m,
            BF16,
            "N K",
            forms,
            absent=absent,
            types=types,
        )
        for bits, types, rows in ((4, CODES, (1, 8, 16, 32)), (8, FLOATS, (1, 8, 16, 32, 64)))
        for m in rows
        for forms in [{"NORM": "rms", "ACTIVATION": "silu", "LIMIT": None, "SHIFT": 0.0}]
        for absent in ["offsets shift bias"]
    ]
