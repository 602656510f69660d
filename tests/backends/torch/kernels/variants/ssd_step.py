"""Variants of the kernel file ssd_step.py."""

from __future__ import annotations

from weft.backends.torch.kernels.ssd_step import WARPS, _sizes, ssd_step_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mamba-2-2.7B, Granite 4 and Nemotron-H, whose norms have groups; Falcon-H1 and the largest state without one."""
    shipped = []
    for dtype, heads, states, width, groups, norm_groups, norm, absent in (
        (BF16, 80, 128, 64, 1, 1, "rms", ""),
        (BF16, 128, 128, 80, 8, 8, "rms", ""),
        (FP16, 48, 256, 64, 1, 1, "rms", ""),
        (FP32, 80, 128, 64, 1, 1, "rms", ""),
        (BF16, 32, 256, 128, 1, 1, "none", "gain raw tickets"),
        (FP32, 32, 256, 64, 1, 1, "none", "gain raw tickets"),
    ):
        constants = _sizes(heads, states, width, groups, norm_groups) | {"SOFTPLUS": True, "LOG_A": True, "NORM": norm}
        strides, types = "x_row b_row c_row gate_row", {"a": "*fp32"}
        shipped.append(variant(ssd_step_kernel, dtype, constants, "delta_row", strides, absent, types, warps=WARPS))
    return shipped
