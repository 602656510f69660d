"""Variants of the kernel file moe_grouped.py."""

from __future__ import annotations

from typing import Any

from weft.backends.torch.kernels.moe_grouped import ADDED, _shapes, grouped_close_kernel, grouped_open_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Eight tokens of Mixtral-8x7B, 32 of Qwen3-30B-A3B and of gpt-oss-20b with its biases, few of a small one."""
    shipped, biases = [], "up_bias gate_bias down_bias"
    types = {"chosen": "*i32", "weights": "*fp32", "partial": "*fp32"}
    for tokens, choices, experts, hidden, dim, dtype, activation, limit, added, absent in (
        (8, 2, 8, 14336, 4096, BF16, "silu", None, 0.0, f"shift {biases}"),
        (64, 2, 8, 14336, 4096, BF16, "silu", None, 0.0, f"shift {biases}"),
        (32, 8, 128, 768, 2048, FP16, "silu", None, 0.0, f"shift {biases}"),
        (32, 4, 32, 2880, 2880, BF16, "gelu_quick", 7.0, 1.0, "shift"),
        (4, 2, 4, 1536, 576, FP32, "relu", None, 0.0, f"shift gate {biases}"),
    ):
        forms: dict[str, Any] = {"CHOICES": choices, "ACTIVATION": activation, "LIMIT": limit, "SHIFT": added}
        shapes = _shapes(tokens, choices, experts, hidden, dim, dtype, "gate" not in absent.split())
        for kernel, shape, counts, rows in zip(
            (grouped_open_kernel, grouped_close_kernel), shapes, ("slots", "tokens slots"), ("H K", "N K"), strict=True
        ):
            constants = {**shape, **forms, "NORM": "rms", "ADDED": ADDED}
            launch = {"warps": shape["BLOCK_N"] // 16, "stages": 1}
            shipped.append(variant(kernel, dtype, constants, counts, rows, absent, types, **launch))
    return shipped
