"""Variants of the kernel file choose_tokens.py."""

from __future__ import annotations

from weft.backends.torch.kernels.choose_tokens import BLOCK, CHUNK, PARTS, keep_kernel, scan_kernel

from .form import BF16, FP16, FP32, Variant, variant


def variants() -> list[Variant]:
    """Llama-3's vocabulary by every way to choose, Gemma's and GPT-2's. Doubles, and rows of any length: no vectors."""
    types = {
        **dict.fromkeys(("uniforms", "sums", "totals"), "*fp64"),
        **dict.fromkeys(("spent", "chosen", "ids"), "*i64"),
        **dict.fromkeys(("parts", "tops", "bounds", "values"), "*fp32"),
        **dict.fromkeys(("firsts", "numbers", "tokens"), "*i32"),
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), "fp32"),
        "active": "*i1",
    }
    found = []
    for dtype, vocab, draw, filters in (
        (BF16, 128_256, False, False),
        (BF16, 128_256, True, False),
        (BF16, 128_256, True, True),
        (FP32, 262_144, True, True),
        (FP16, 50_257, True, True),
    ):
        sizes = {"BLOCK": BLOCK, "PARTS": PARTS, "CHUNK": CHUNK, "DRAW": draw, "FILTER": filters}
        sizes["PLACES"] = 1 << (-(-vocab // BLOCK) - 1).bit_length()
        absent = "" if draw else "uniforms spent"
        kernels = [scan_kernel, keep_kernel] if filters else [scan_kernel]
        found += [
            variant(kernel, dtype, sizes, "vocab most rows", "row_stride", absent, types, vectors=False)
            for kernel in kernels
        ]
    return found
