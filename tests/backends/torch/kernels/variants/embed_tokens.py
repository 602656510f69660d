"""Variants of the kernel file embed_tokens.py."""

from __future__ import annotations

from weft.backends.torch.kernels.embed_tokens import BLOCK, embed_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Gemma-3 with its two tables and scale, learned positions, Llama-3."""
    types = {"ids": "*i64", "frequencies": "*fp64", "frequencies_2": "*fp64", "cos_2": "*fp32", "sin_2": "*fp32"}
    types |= dict.fromkeys(("scale", "amplitude", "amplitude_2"), "fp32")
    second = "frequencies_2 cos_2 sin_2"
    return [
        variant(
            embed_kernel,
            dtype,
            {"BLOCK": BLOCK},
            "vocab length pairs pairs_2 offset",
            "D",
            absent,
            types,
            vectors=False,
        )
        for dtype, absent in (
            (BF16, "table"),
            (FP16, f"frequencies cos sin {second}"),
            (FP32, f"table {second}"),
        )
    ]
