"""Tests here need an NVIDIA GPU: without one, a plain `pytest` does not collect them; named by path, they run."""

from __future__ import annotations

import ctypes


def _gpus() -> int:
    """How many GPUs the NVIDIA driver reports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


collect_ignore_glob = [] if _gpus() else ["test_*.py"]
