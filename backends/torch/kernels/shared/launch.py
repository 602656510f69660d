"""Kernel launches: checks whether Triton can run on a tensor, and launch options.

The kernels are copied into generated models as a separate package and import nothing but torch and Triton. Where Triton
cannot run, a launcher falls back to torch, and `refusal` returns the reason. Where `refusal` returns None, a tensor
that is not on a CUDA device means Triton's interpreter: `INTERP=not x.is_cuda`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only machine: launchers compute with torch
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "assume_capability",
    "custom_operator",
    "jit",
    "options",
    "refusal",
    "tl",
    "triton",
    "uses_torch",
]

INTERPRETER = None if triton is None else tl.constexpr(triton.knobs.runtime.interpret)  # whether kernels see no GPU
INTERPRETED = False  # tests set it where TRITON_INTERPRET was 1 on import: kernels then run on the CPU, block by block
OLDEST = (8, 0)  # compute capability with bf16 products
FLOAT8_SINCE = (8, 9)  # with floats of 8 bits
_assumed: tuple[int, int] | None = None  # set by `assume_capability`
PDL_SINCE = (9, 0)  # programmatic dependent launch: a kernel starts while the one before it still runs
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # of the kernels, as Triton names them

Operands = ParamSpec("Operands")
Result = TypeVar("Result")


def jit(fn: Callable[..., Any]) -> Any:
    """Return `fn` compiled by `triton.jit`; without Triton, `fn` itself, which is then never called."""
    return fn if triton is None else triton.jit(fn)


def constant(fn: Callable[..., Any]) -> Any:
    """Mark `fn`, which kernels call at compile time with constexpr arguments. Without Triton, return it unchanged."""
    return fn if triton is None else triton.constexpr_function(fn)


def constexpr(number: float) -> Any:
    """Return a module-level number as a constexpr, so that kernels can use it. Without Triton, return it unchanged."""
    return number if triton is None else tl.constexpr(number)


@lru_cache
def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of CUDA device `index`."""
    return torch.cuda.get_device_capability(index)


# `torch.compiler.assume_constant_result` does the same, but it first imports the compiler, which takes a second.
vars(capability)["_dynamo_marked_constant"] = True


def refusal(x: torch.Tensor, float8: bool = False, dtype: torch.dtype | None = None) -> str | None:
    """Return the reason why Triton, with FP8 if `float8`, cannot run on the device of `x`, or `dtype`, if given, is not
    one that kernels compute in; None if neither."""
    if _assumed is None:
        if triton is None:
            return "Triton is not installed"
        if not x.is_cuda and not INTERPRETED:
            return f"Triton does not run on {x.device.type}"
    oldest = FLOAT8_SINCE if float8 else OLDEST
    if (_assumed or not INTERPRETED) and (version := _assumed or capability(x.device.index or 0)) < oldest:
        return f"compute capability {version[0]}.{version[1]} is older than {oldest[0]}.{oldest[1]}"
    return None if dtype is None or dtype in DTYPES else f"{dtype} is not one of {', '.join(DTYPES.values())}"


@contextmanager
def assume_capability(found: tuple[int, int]) -> Iterator[None]:
    """Make `refusal` assume Triton and a device of compute capability `found` within the context."""
    global _assumed
    before, _assumed = _assumed, found
    try:
        yield
    finally:
        _assumed = before


def uses_torch(
    kernel: bool | None, refusal: Callable[Operands, str | None], *operands: Operands.args, **more: Operands.kwargs
) -> bool:
    """Return whether a launcher falls back to torch: `kernel` is False, or `refusal` gives a reason for the operands.
    Every launcher has a keyword `kernel`. None, the default, uses the kernel unless `refusal` gives a reason. False
    uses the same formula in torch, the reference. True requires the kernel. Raise ValueError if `kernel` is True and
    `refusal` gives a reason."""
    if kernel is False:
        return True
    reason = refusal(*operands, **more)
    if kernel and reason:
        raise ValueError(f"the kernel does not compute this: {reason}")
    return reason is not None


def custom_operator(like: Callable[..., Result]) -> Callable[[Callable[Operands, Result]], Callable[Operands, Result]]:
    """Return a decorator that registers a launcher as the torch custom operator `weft::<name>`.

    torch.compile and torch.export cannot trace into kernels, so they record the call of a custom operator. The operator
    is called only while they trace: elsewhere it would cost microseconds, so the launcher is called directly. `like` is
    the fake implementation: it returns results of the same shape and dtype for operands without data. If a process
    imports this package several times, once per model, the operators of the first import are used: if torch registered
    them again, models compiled before would lose their operators.
    """

    def of(launch: Callable[Operands, Result]) -> Callable[Operands, Result]:
        name, schema = launch.__name__, torch.library.infer_schema(launch, mutates_args=())
        namespace = torch.ops.weft
        if hasattr(namespace, name) and str(getattr(namespace, name).default._schema) != f"weft::{name}{schema}":
            name = f"{name}_{hashlib.sha256(schema.encode()).hexdigest()[:8]}"  # of another version of weft
        if not hasattr(namespace, name):
            torch.library.custom_op(f"weft::{name}", launch, mutates_args=()).register_fake(like)
        operator = getattr(namespace, name).default

        @wraps(launch)
        def call(*operands: Operands.args, **more: Operands.kwargs) -> Result:
            compute: Callable[Operands, Result] = operator if torch.compiler.is_compiling() else launch
            return compute(*operands, **more)

        return call

    return of


def has_pdl(x: torch.Tensor) -> bool:
    """Return whether x is on a CUDA device whose kernels may start before the previous kernel has ended (PDL)."""
    return x.is_cuda and capability(x.device.index or 0) >= PDL_SINCE


def options(x: torch.Tensor, warps: int = 4, stages: int = 3) -> dict[str, Any]:
    """Return the keyword arguments of a kernel launch on the device of x: `warps` per program, pipeline `stages` of its
    loops, fused multiply-adds, and whether the launch is dependent, which the kernel also receives as PDL."""
    pdl = has_pdl(x)
    return {"PDL": pdl, "launch_pdl": pdl, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


@jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start, which then runs up to its own `wait_for_previous`; call this first in a kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the preceding kernel. Read its outputs after this call; before it, load or prefetch weights only."""
    if PDL:
        tl.extra.cuda.gdc_wait()
