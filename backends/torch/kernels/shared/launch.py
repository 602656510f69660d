"""The launch of kernels: whether Triton can run on a tensor, and with which options.

The kernels stand beside a generated model as a package of their own and import nothing but torch and Triton. Where
Triton cannot run, a launcher computes the same with torch, and `refusal` says why. Where `refusal` is None, a tensor
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
    "assumed",
    "jit",
    "operator",
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
_assumed: tuple[int, int] | None = None  # what `assumed` says
PDL_SINCE = (9, 0)  # programmatic dependent launch: a kernel starts while the one before it still runs
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # of the kernels, as Triton names them

Operands = ParamSpec("Operands")
Result = TypeVar("Result")


def jit(fn: Callable[..., Any]) -> Any:
    """`triton.jit` where there is Triton; elsewhere `fn`, which nobody calls."""
    return fn if triton is None else triton.jit(fn)


def constant(fn: Callable[..., Any]) -> Any:
    """A function of constants that kernels call while they are compiled."""
    return fn if triton is None else triton.constexpr_function(fn)


def fixed(number: float) -> Any:
    """A number at the top of a file that kernels know while they are compiled."""
    return number if triton is None else tl.constexpr(number)


@lru_cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of CUDA device `index`."""
    return torch.cuda.get_device_capability(index)


# All that `torch.compiler.assume_constant_result` does, but for importing the compiler, which takes a second.
vars(capability)["_dynamo_marked_constant"] = True


def refusal(x: torch.Tensor, float8: bool = False) -> str | None:
    """Say why Triton cannot run on the device of `x`, with floats of 8 bits if `float8`, in a few words; None if it
    can."""
    if _assumed is None:
        if triton is None:
            return "Triton is not installed"
        if INTERPRETED:
            return None
        if not x.is_cuda:
            return f"Triton does not run on {x.device.type}"
    oldest = FLOAT8_SINCE if float8 else OLDEST
    if (found := _assumed or capability(x.device.index or 0)) < oldest:
        return f"compute capability {found[0]}.{found[1]} is older than {oldest[0]}.{oldest[1]}"
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


def uses_torch(
    kernel: bool | None, refusal: Callable[Operands, str | None], *operands: Operands.args, **more: Operands.kwargs
) -> bool:
    """Return whether a launcher computes with torch: `kernel` is False, or `refusal` gives a reason for the operands.

    Every launcher has a keyword `kernel`. None, the default, takes the kernel where it can run. False takes the same
    formula in torch, which is the `reference` of a kernel file.

    Raises:
        ValueError: `kernel` is True, which asks for the kernel and nothing else, and there is a reason against it.
    """
    if kernel is False:
        return True
    reason = refusal(*operands, **more)
    if kernel and reason:
        raise ValueError(f"the kernel does not compute this: {reason}")
    return reason is not None


def operator(like: Callable[..., Result]) -> Callable[[Callable[Operands, Result]], Callable[Operands, Result]]:
    """Make what launches kernels an operator of torch, `weft::` and its name, of compiled and exported models.

    torch.compile and torch.export cannot look into kernels, and keep the call of an operator as it stands. It is called
    only while they look on: anywhere else it would cost microseconds. `like` gives a result of the same form, of
    operands that have no numbers. Where a process imports this package several times, as that of several models, its
    operators are those of the first: torch would pull them from under what has been compiled.
    """

    def of(launch: Callable[Operands, Result]) -> Callable[Operands, Result]:
        name, schema = launch.__name__, torch.library.infer_schema(launch, mutates_args=())
        known = torch.ops.weft
        if hasattr(known, name) and str(getattr(known, name).default._schema) != f"weft::{name}{schema}":
            name = f"{name}_{hashlib.sha256(schema.encode()).hexdigest()[:8]}"  # of another version of weft
        if not hasattr(known, name):
            torch.library.custom_op(f"weft::{name}", launch, mutates_args=()).register_fake(like)
        whole = getattr(known, name).default

        @wraps(launch)
        def call(*operands: Operands.args, **more: Operands.kwargs) -> Result:
            compute: Callable[Operands, Result] = whole if torch.compiler.is_compiling() else launch
            return compute(*operands, **more)

        return call

    return of


def has_pdl(x: torch.Tensor) -> bool:
    """Return whether kernels on the device of `x` may start before the ones before them have ended."""
    return x.is_cuda and capability(x.device.index or 0) >= PDL_SINCE


def options(x: torch.Tensor, warps: int = 4, stages: int = 3) -> dict[str, Any]:
    """The keywords that every launch has: whether it is a dependent one, which the kernel must know as PDL, and how
    Triton compiles; a multiply-add is one instruction."""
    pdl = has_pdl(x)
    return {"PDL": pdl, "launch_pdl": pdl, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


@jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start, which then runs up to its own `wait`; so this comes first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel ahead. What it writes is read after this; before it, weights are asked for."""
    if PDL:
        tl.extra.cuda.gdc_wait()
