"""Variants of the kernel file norm_route.py."""

from __future__ import annotations

from typing import Any

from weft.backends.torch.kernels.norm_route import _constants, norm_route_kernel
from weft.backends.torch.kernels.shared import top_k as choice
from weft.backends.torch.kernels.shared.gemv import choose_tile

from .form import BF16, FP16, FP32, Variant, of_tile


def variants() -> list[Variant]:
    """Mixtral-8x7B, Qwen3-30B-A3B, gpt-oss-120b with its bias, DeepSeek-V3 in groups, a LayerNorm."""
    shipped = []
    types = {"correction": "*fp32", "logits": "*fp32", "chosen": "*i32", "weights": "*fp32"}
    for m, experts, k, width, dtype, norm, scoring, groups, absent in (
        (1, 8, 2, 4096, BF16, "rms", "softmax", (1, 1, "max"), "shift bias correction"),
        (1, 128, 8, 2048, BF16, "rms", "softmax", (1, 1, "max"), "shift bias correction"),
        (32, 128, 8, 2048, BF16, "rms", "softmax", (1, 1, "max"), "shift bias correction"),
        (8, 128, 4, 2880, FP16, "rms", "softmax", (1, 1, "max"), "shift correction"),
        (1, 256, 8, 7168, BF16, "rms", "sigmoid", (8, 4, "top2"), "shift bias"),
        (64, 256, 8, 7168, BF16, "rms", "sigmoid", (8, 4, "top2"), "shift bias"),
        (2, 64, 6, 2048, FP32, "layer", "softmax", (1, 1, "max"), "bias correction"),
    ):
        plan = choose_tile(m, experts, width, dtype)
        forms = {"NORM": norm, **_constants(choice.constants(experts, k, scoring, True, *groups), plan)}
        more: dict[str, Any] = {"absent": absent, "types": types}
        shipped.append(of_tile(plan, norm_route_kernel, m, dtype, "N K x_row", forms, **more))
    return shipped
