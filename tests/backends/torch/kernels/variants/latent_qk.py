"""Variants of the kernel file latent_qk.py."""

from __future__ import annotations

from weft.backends.torch.kernels.latent_qk import WARPS, _sizes, latent_qk_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """DeepSeek-V3 and V2-Lite, for one row and for more, and latents without a norm."""
    shipped = []
    for dtype, rank, plain, rope, forms, absent in (
        (BF16, 512, 128, 64, {"M": 1}, ""),  # Triton takes a 1 as a constant
        (FP16, 512, 128, 64, {}, ""),
        (FP32, 512, 128, 64, {"M": 1, "ROLLING": True}, ""),
        (BF16, 256, 64, 32, {"M": 1, "NORM": "none", "INTERLEAVED": False}, "gain"),
    ):
        plain_forms = {"NORM": "rms", "INTERLEAVED": True, "ROLLING": False}
        constants = {**_sizes(rank, plain, rope, dtype.itemsize), **plain_forms, **forms}
        counts, strides = "M capacity keep", "q_row latent_row cache_row"
        launch = {"warps": WARPS, "stages": 1, "ahead": True}
        shipped.append(variant(latent_qk_kernel, dtype, constants, counts, strides, absent, None, **launch))
    return shipped
