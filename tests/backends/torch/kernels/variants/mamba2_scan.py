"""Variants of the kernel file prompt/mamba2_scan.py."""

from __future__ import annotations

from weft.backends.torch.kernels.prefill.mamba2_scan import _end_kernel, _scan_kernel, _sizes, _start_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mamba-2 and Codestral-Mamba (128 states, heads of 64), Falcon-H1 (256 states), Nemotron-H (heads of 80)."""
    found = []
    for dtype, states, width, share in (
        (BF16, 128, 64, 80),
        (FP16, 256, 64, 32),
        (BF16, 128, 80, 16),
        (BF16, 256, 128, 32),
        (FP32, 128, 64, 80),
        (FP32, 256, 64, 32),
    ):
        end, scan, end_warps, scan_warps = _sizes(dtype, states, width)
        more = {"SHARE": share, "SIZE": states * width, "BLOCK": 1024}
        for kernel, sizes, warps, stages in (
            (_end_kernel, end, end_warps, 2),
            (_start_kernel, {}, 4, 3),
            (_scan_kernel, scan, scan_warps, 2),
        ):
            counts, strides = "seq parts delta_row", "x_row b_row c_row"
            found.append(variant(kernel, dtype, {**sizes, **more}, counts, strides, warps=warps, stages=stages))
    return found
