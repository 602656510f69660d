"""Detect the instruction set of this CPU, and warn where a kernel is slow on it."""

from __future__ import annotations

import functools
import platform

SLOW_BLOCKS = "products of 4- and 8-bit blocks are slower than those of f32 weights there (docs/compile.md)"


@functools.cache
def instruction_set() -> str:
    """Return the widest vector instructions of this CPU: AVX-512, AVX2, SSE, or the name of another architecture.

    numpy asks every kind of CPU when it is imported, and PyTorch need not be there. Its names changed in 2.4.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return platform.machine()
    import numpy as np

    config = np.show_config(mode="dicts")
    found = config["SIMD Extensions"]["found"] if config else []
    if any(name == "X86_V4" or name.startswith("AVX512") for name in found):
        return "AVX-512"
    return "AVX2" if {"X86_V3", "AVX2"} & {*found} else "SSE"


def slow_blocks() -> str | None:
    """Return a warning where ONNX Runtime's kernel that multiplies by quantized blocks is the slow one on this CPU."""
    if (found := instruction_set()) in ("AVX2", "SSE"):
        return f"this CPU has {found} and no AVX-512: {SLOW_BLOCKS}; leave out --keep-blocks for speed"
    return None
