"""Detect NVIDIA GPUs by the driver, not by a library that takes seconds to import."""

from __future__ import annotations

import ctypes


def gpus() -> int:
    """Count the GPUs that the NVIDIA driver reports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
