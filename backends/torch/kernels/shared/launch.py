"""What every kernel here needs to know: whether Triton can run on a tensor, on which device, and with which launch.

The kernels stand beside a generated model as a package of their own and import nothing but torch and Triton. Where
Triton cannot run, a launcher computes the same with torch, and `refusal` says why. Where `refusal` is None, a tensor
that is not on a CUDA device means Triton's interpreter: `INTERP=not x.is_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only machine: launchers compute with torch
    triton = tl = None

__all__ = ["INTERPRETED", "Variant", "assumed", "has_pdl", "jit", "options", "refusal", "tl", "triton"]

INTERPRETED = False  # tests set it where TRITON_INTERPRET was 1 on import: kernels then run on the CPU, block by block
OLDEST = (8, 0)  # compute capability with bf16 products
_assumed: tuple[int, int] | None = None  # what `assumed` says
PDL_SINCE = (9, 0)  # programmatic dependent launch: a kernel starts while the one before it still runs


def jit(fn: Callable[..., Any]) -> Any:
    """`triton.jit` where there is Triton; elsewhere `fn`, which nobody calls."""
    return fn if triton is None else triton.jit(fn)


@lru_cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of CUDA device `index`."""
    return torch.cuda.get_device_capability(index)


def refusal(x: torch.Tensor) -> str | None:
    """Why Triton cannot run on the device of `x`, in a few words; None if it can."""
    if _assumed is None:
        if triton is None:
            return "Triton is not installed"
        if INTERPRETED:
            return None
        if not x.is_cuda:
            return f"Triton does not run on {x.device.type}"
    if (found := _assumed or capability(x.device.index or 0)) < OLDEST:
        return f"compute capability {found[0]}.{found[1]} is older than {OLDEST[0]}.{OLDEST[1]}"
    return None


@contextmanager
def assumed(found: tuple[int, int]) -> Iterator[None]:
    """Inside, `refusal` tells of a device of this compute capability, with Triton, wherever tensors are."""
    global _assumed
    before, _assumed = _assumed, found
    try:
        yield
    finally:
        _assumed = before


def has_pdl(x: torch.Tensor) -> bool:
    """Whether kernels on the device of `x` may start before the ones before them have ended."""
    return x.is_cuda and capability(x.device.index or 0) >= PDL_SINCE


def options(x: torch.Tensor, warps: int = 4, stages: int = 3) -> dict[str, Any]:
    """The keywords of a launch that are not arguments of the kernel; a multiply-add is one instruction."""
    return {"num_warps": warps, "num_stages": stages, "launch_pdl": has_pdl(x), "enable_fp_fusion": True}


@dataclass(frozen=True)
class Variant:
    """A compiled form of a kernel that ships: what the offline check compiles, and what it must find.

    `types` are the Triton types of the arguments that are not constants ("*bf16", "*fp32", "i32", …); pointers count
    as aligned to 16 bytes, and the integers named in `divisible` are multiples of 16. `constants` are all other
    arguments, with None for a pointer that is not given. `vectors` says that 16-byte loads from global memory must be
    there, `pdl` that the kernel waits for the one before it and lets the next one start, `ahead` that some of those
    loads come before the wait.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    pdl: bool = True
    vectors: bool = True
    ahead: bool = False
    divisible: Sequence[str] = field(default=())
