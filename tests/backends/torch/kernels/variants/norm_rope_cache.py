"""Variants of the kernel file prompt/norm_rope_cache.py."""

from __future__ import annotations

from typing import Any

from weft.backends.torch.kernels.prefill.norm_rope_cache import _rows, head_constants, norm_rope_cache_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Llama and Qwen 3 of 8 B, partial and interleaved rotary, fp32, and caches of floats of 8 bits."""
    shipped = []
    for dtype, head_dim, rotary, more in (
        (BF16, 128, 128, {}),
        (BF16, 128, 128, {"HEAD_NORM": True}),
        (FP16, 80, 32, {"INTERLEAVED": True}),
        (FP32, 64, 64, {}),
        (BF16, 64, 64, {"FLOAT8": True}),
    ):
        forms: dict[str, Any] = {"HEAD_NORM": False, "INTERLEAVED": False, "ROLLING": False, **more}
        types, absent = {"k_scale": "*fp32", "v_scale": "*fp32"}, "" if forms["HEAD_NORM"] else "q_gain k_gain"
        if forms.pop("FLOAT8", False):
            types |= {"k_cache": "*fp8e4nv", "v_cache": "*fp8e4nv"}
        else:
            absent += " k_scale v_scale"
        forms |= {**head_constants(head_dim, rotary), "ROWS": _rows(head_dim)}
        strides, counts = "width stride_b stride_h stride_t", "M seq heads kv_heads capacity keep"
        shipped.append(variant(norm_rope_cache_kernel, dtype, forms, counts, strides, absent, types))
    return shipped
