"""Variants of the kernel file matrix_step.py."""

from __future__ import annotations

from weft.backends.torch.kernels.matrix_step import WARPS, _sizes, matrix_step_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Qwen3-Next and OLMo Hybrid, Kimi Linear with a gate for every key, MiniMax, xLSTM 7B and RWKV-6; the largest."""
    shipped = []
    for dtype, heads, groups, keys, width, decay, delta, normed in (
        (BF16, 32, 16, 128, 128, "head", True, 1),
        (FP16, 30, 30, 96, 192, "head", True, 1),
        (BF16, 32, 32, 128, 128, "key", True, 1),
        (BF16, 64, 64, 128, 128, "head", False, 64),
        (BF16, 8, 8, 256, 513, "head", False, 0),
        (BF16, 64, 64, 64, 64, "key", False, 0),
        (FP32, 32, 16, 128, 128, "head", True, 1),
        (FP16, 16, 16, 128, 128, "", True, 0),
        (FP32, 4, 4, 1024, 1024, "key", True, 0),
    ):
        form = {"UNIT": delta, "NORM": "rms" if normed else "none"}
        constants = _sizes(heads, groups, keys, width, decay == "key", heads // max(normed, 1)) | form
        absent = "decay " * (not decay) + "beta " * (not delta) + "a_log bias " * (not (delta and decay))
        absent += "" if normed else "gate gain raw tickets"
        even = width % 4 == 0  # otherwise rows of the state begin anywhere in 16 bytes
        rows = "q_row k_row gate_row" + " v_row" * even + " decay_row" * (decay == "key")
        counts = "beta_row" + " v_row" * (not even) + " decay_row" * (decay == "head")
        types = dict.fromkeys(("q_scale", "k_scale", "beta_scale"), "fp32")
        more = {"warps": WARPS, "vectors": even}
        shipped.append(variant(matrix_step_kernel, dtype, constants, counts, rows, absent, types, **more))
    return shipped
