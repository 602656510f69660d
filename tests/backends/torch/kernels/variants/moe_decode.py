"""Variants of the kernel file moe_decode.py."""

from __future__ import annotations

from weft.backends.torch.kernels.moe_decode import _close_kernel, _constants, _open_kernel, _tiles

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mixtral-8x7B, Qwen3-30B-A3B, gpt-oss-20b with its biases, one that is small and ungated in fp32."""
    shipped, biases = [], "up_bias gate_bias down_bias"
    for tokens, choices, hidden, dim, dtype, norm, activation, limit, added, absent in (
        (1, 2, 14336, 4096, BF16, "rms", "silu", None, 0.0, f"shift {biases}"),
        (3, 8, 768, 2048, FP16, "rms", "silu", None, 0.0, f"shift {biases}"),
        (1, 4, 2880, 2880, BF16, "rms", "gelu_quick", 7.0, 1.0, "shift"),
        (2, 2, 1536, 576, FP32, "layer", "relu", None, 0.0, f"gate {biases}"),
    ):
        forms = {"NORM": norm, "CHOICES": choices, "ACTIVATION": activation, "LIMIT": limit, "SHIFT": added}
        types, tiles = {"chosen": "*i64", "weights": "*fp32"}, _tiles(tokens, choices, hidden, dim, dtype)
        for kernel, plan, rows in zip((_open_kernel, _close_kernel), tiles, ("H K", "N K"), strict=True):
            constants, launch = _constants(plan) | forms, {"warps": plan.warps, "stages": 1}
            shipped.append(variant(kernel, dtype, constants, "", rows, absent, types, **launch))
    return shipped
