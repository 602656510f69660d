"""Detection of this CPU's instruction set, and a warning about kernels that are slow on it."""

from __future__ import annotations

import functools
import platform

SLOW_BLOCKS = "products of 4- and 8-bit blocks are slower there than products of f32 weights (docs/compile.md)"


@functools.cache
def detect_instruction_set() -> str:
    """Return the widest vector instructions of this CPU: AVX-512, AVX2 or SSE; the machine's name if it is not an x86.

    They are read from numpy, because PyTorch may not be installed. numpy before 2.4 has other names for them.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return platform.machine()
    import numpy as np

    config = np.show_config(mode="dicts")
    extensions = config["SIMD Extensions"]["found"] if config else []
    if any(name == "X86_V4" or name.startswith("AVX512") for name in extensions):
        return "AVX-512"
    return "AVX2" if {"X86_V3", "AVX2"} & {*extensions} else "SSE"


def warn_slow_blocks() -> str | None:
    """Return a warning if this x86 CPU lacks AVX-512, so ONNX Runtime's products by blocks are slow; else None."""
    if (instructions := detect_instruction_set()) in ("AVX2", "SSE"):
        return f"this CPU has {instructions} and no AVX-512: {SLOW_BLOCKS}; leave out --keep-blocks for speed"
    return None
