"""Variants of the kernel file norm_qkv.py."""

from __future__ import annotations

from typing import Any

from weft.backends.torch.kernels.norm_qkv import _tile, norm_qkv_kernel
from weft.backends.torch.kernels.prefill.norm_rope_cache import head_constants
from weft.backends.torch.kernels.shared import gemv

from .form import BF16, CODES, FLOATS, FP16, FP32, Variant, of_tile


def variants() -> list[Variant]:
    """Llama and Qwen 3 of 8 B, more rows, LayerNorm with biases and partial rotary, a small model in fp32, 4 bits,
    floats of 8; and caches of these."""
    shipped = []
    for m, heads, kv_heads, head_dim, k, dtype, rotary, more in (
        (1, 32, 8, 128, 4096, BF16, 128, {}),
        (1, 32, 8, 128, 4096, BF16, 128, {"HEAD_NORM": True}),
        (8, 32, 8, 128, 4096, BF16, 128, {"HEAD_NORM": True}),
        (4, 32, 32, 80, 2560, FP16, 32, {"NORM": "layer", "INTERLEAVED": True}),
        (1, 9, 3, 64, 576, FP32, 64, {"ROLLING": True}),
        (64, 32, 8, 128, 4096, BF16, 128, {}),
        (1, 32, 8, 128, 4096, BF16, 128, {"BITS": 4}),
        (16, 32, 8, 128, 4096, BF16, 128, {"BITS": 4}),
        (1, 32, 8, 128, 4096, BF16, 128, {"BITS": 8}),
        (1, 32, 8, 128, 4096, BF16, 128, {"FLOAT8": True}),
        (8, 32, 8, 128, 4096, BF16, 128, {"FLOAT8": True, "HEAD_NORM": True}),
    ):
        forms = {"NORM": "rms", "HEAD_NORM": False, "INTERLEAVED": False, "ROLLING": False, **more}
        absent = " shift bias" * (forms["NORM"] == "rms") + " q_gain k_gain raw tickets" * (not forms["HEAD_NORM"])
        outputs = (heads + 2 * kv_heads) * head_dim
        plan, types = _tile(m, outputs, k, head_dim, dtype), {}
        if forms.pop("FLOAT8", False):
            types = {"k_cache": "*fp8e4nv", "v_cache": "*fp8e4nv", "k_scale": "*fp32", "v_scale": "*fp32"}
        else:
            absent += " k_scale v_scale"
        bits: Any = forms.pop("BITS", 0)
        if bits:
            plan, absent = gemv.choose_code_tile(m, outputs, k, bits, 128), f"{absent} offsets"
            types = CODES if bits == 4 else FLOATS
        strides, counts = "K stride_b stride_h stride_t", "heads kv_heads capacity keep"
        forms |= {"seq": 1, **head_constants(head_dim, rotary)}
        shipped.append(of_tile(plan, norm_qkv_kernel, m, dtype, strides, forms, counts, absent, types=types))
    return shipped
