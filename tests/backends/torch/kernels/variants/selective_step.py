"""Variants of the kernel file selective_step.py."""

from __future__ import annotations

from weft.backends.torch.kernels.selective_step import WARPS, _sizes, selective_step_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mamba-130M and 2.8B, Falcon-Mamba-7B and Jamba-1.5-Large with their norms, and a bare recurrence."""
    shipped, gains = [], " gain b_gain c_gain"
    for dtype, channels, states, rank, norm, absent in (
        (FP32, 1536, 16, 48, "none", gains),
        (BF16, 5120, 16, 160, "none", gains),
        (FP16, 8192, 16, 256, "rms", gains),
        (BF16, 16384, 16, 512, "rms", ""),
        (BF16, 1024, 64, 0, "none", f"weight bias gate{gains}"),
    ):
        forms = {"SOFTPLUS": rank > 0, "LOG_A": rank > 0, "NORM": norm, "B_NORM": norm, "C_NORM": norm}
        constants, strides = _sizes(channels, states, rank) | forms, "x_row delta_row b_row c_row gate_row"
        types, launch = {"a": "*fp32"}, {"warps": WARPS, "ahead": rank > 0}
        shipped.append(variant(selective_step_kernel, dtype, constants, "", strides, absent, types, **launch))
    return shipped
