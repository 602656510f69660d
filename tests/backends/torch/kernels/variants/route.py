"""Variants of the kernel file route.py."""

from __future__ import annotations

from weft.backends.torch.kernels.route import route_kernel
from weft.backends.torch.kernels.shared import top_k as choice

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Mixtral-8x7B, Qwen3-30B-A3B, gpt-oss-120b, as many experts as there may be with a bias; DeepSeek-V3, V2, and
    groups that fill the most places. A few loads: no vectors."""
    found = []
    for dtype, bias, experts, k, scoring, groups in (
        (BF16, False, 8, 2, "softmax", (1, 1, "max")),
        (FP32, False, 128, 8, "softmax", (1, 1, "max")),
        (FP16, False, 128, 4, "softmax", (1, 1, "max")),
        (FP32, True, 512, 16, "sigmoid", (1, 1, "max")),
        (BF16, True, 256, 8, "sigmoid", (8, 4, "top2")),
        (BF16, False, 160, 6, "softmax", (8, 3, "max")),
        (FP32, True, 495, 16, "sigmoid", (33, 32, "top2")),
    ):
        sizes = choice.constants(experts, k, scoring, True, *groups)
        types = {"chosen": "*i32", "weights": "*fp32", "bias": "*fp32"}
        absent = "" if bias else "bias"
        found.append(variant(route_kernel, dtype, sizes, "row_stride", "", absent, types, warps=1, vectors=False))
    return found
