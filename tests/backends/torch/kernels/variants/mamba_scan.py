"""Variants of the kernel file prompt/mamba_scan.py."""

from __future__ import annotations

from weft.backends.torch.kernels.prefill.mamba_scan import _block, _end_kernel, _scan_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mamba-130M and 2.8B (1536 and 5120 channels), Falcon-Mamba-7B (8192), and as many states as there may be."""
    return [
        variant(kernel, dtype, sizes, "seq chunk", "x_row delta_row b_row c_row", types={"a": "*fp32"}, warps=1)
        for dtype, channels, states in ((BF16, 5120, 16), (FP16, 8192, 16), (FP32, 1536, 16), (BF16, 1024, 64))
        for sizes in [{"CHANNELS": channels, "STATES": states, "BLOCK_C": _block(states), "BLOCK_N": states}]
        for kernel in (_end_kernel, _scan_kernel)
    ]
