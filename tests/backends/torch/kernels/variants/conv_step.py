"""Variants of the kernel file conv_step.py."""

from __future__ import annotations

from weft.backends.torch.kernels.conv_step import BLOCK, _conv_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mamba-2.8B (5120 channels), Mamba-2-2.7B (5376), Falcon-Mamba-7B (8192). A few bytes per channel: no vectors."""
    sizes = {"WIDTH": 4, "TAPS": 4, "ACTIVATION": "silu", "BLOCK": BLOCK}
    return [
        variant(_conv_kernel, dtype, {"CHANNELS": channels, **sizes}, rows="x_row", types=state, vectors=False)
        for dtype, state, channels in (
            (BF16, {"past": "*bf16", "present": "*bf16"}, 5120),
            (FP16, {}, 8192),
            (FP32, {}, 5376),
        )
    ]
