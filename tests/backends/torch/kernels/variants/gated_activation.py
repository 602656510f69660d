"""Variants of the kernel file prompt/gated_activation.py."""

from __future__ import annotations

from weft.backends.torch.kernels.prefill.gated_activation import COLUMNS, ROWS, gated_activation_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """SwiGLU in each dtype, GEGLU, and a limited one."""
    return [
        variant(gated_activation_kernel, dtype, {**forms, "ROWS": ROWS, "COLUMNS": COLUMNS}, "M", "N")
        for dtype, activation, limit, shift in (
            (BF16, "silu", None, 0.0),
            (FP16, "gelu_tanh", None, 0.0),
            (FP32, "silu", None, 0.0),
            (BF16, "gelu_quick", 7.0, 1.0),
        )
        for forms in [{"ACTIVATION": activation, "LIMIT": limit, "SHIFT": shift}]
    ]
