"""What the card reaches in this run: reading, copying, bf16 products, and what a kernel in a chain of kernels costs."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as combinations
from typing import Any

import torch
from gpu_clock import Clock, captured, cycled, microseconds
from gpu_pool import Work
from machine import spread
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

BLOCK = 8192  # elements of a tile of the reading kernel: 16 bytes for each of 256 threads, eight times
CHAIN = 256  # kernels of a chain
BRIEF = ("read", "copy", "product")  # limits that results are shares of


def _jit(fn: Any) -> Any:
    return fn if triton is None else triton.jit(fn)


@_jit
def _read_kernel(x, y, tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # a Triton kernel
    """Each program adds up every `programs`-th tile of `x` [tiles · BLOCK] and stores one number: reading, no more."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=1, loop_unroll_factor=2):
        total += tl.load(x + tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(y + program, tl.sum(total))


@_jit
def _empty_kernel(x, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # a Triton kernel
    """Nothing; with PDL the next kernel may start at once, and this one waits for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@_jit
def _small_kernel(x, y, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # a Triton kernel
    """Copies 1024 numbers a program: a chain of these hands data from kernel to kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + at, tl.load(x + at) + 1)


def variants() -> list[dict[str, Any]]:
    """The kernels as they are launched, for a compiler without a GPU: each with its types, constants and options."""
    numbers, found = {"x": "*fp32", "y": "*fp32"}, []
    for pdl in (False, True):
        own = {"constants": {"PDL": pdl}, "pdl": pdl}
        found.append({"kernel": _empty_kernel, "types": {"x": "*fp32"}, "vectors": False, **own})
        found.append({"kernel": _small_kernel, "types": numbers, **own})
    reads = {"x": "*bf16", "y": "*fp32", "tiles": "i32"}
    return [*found, {"kernel": _read_kernel, "types": reads, "constants": {"BLOCK": BLOCK}, "warps": 8, "pdl": False}]


def reading(clock: Clock, size: int) -> dict[str, Any]:
    """GB/s of reading `size` bytes by torch's sum and by a kernel of 132 × k programs, the best k."""
    x = torch.rand(size // 2, device=clock.device, dtype=torch.bfloat16)
    found: dict[str, Any] = {"bytes": size}
    rates = {"torch_sum": [size / t / 1e9 for t in clock.calls(partial(torch.sum, x, dtype=torch.float32), 9)]}
    if clock.cuda and triton is not None:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for factor in (2, 4, 8, 16):
            y = torch.empty(processors * factor, device=x.device)
            launch = partial(_read_kernel[(processors * factor,)], x, y, x.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
            rates[f"kernel_{factor}_per_processor"] = [size / t / 1e9 for t in clock.calls(launch, 9)]
    found |= {name: spread(values, 1) for name, values in rates.items()}
    found["gb_per_s"] = max((found[name] for name in rates), key=lambda s: s["median"])
    return found


def copying(clock: Clock, size: int) -> dict[str, Any]:
    """GB/s of copying `size` bytes, those read and those written."""
    x = torch.rand(size // 4, device=clock.device)
    y = torch.empty_like(x)
    return {
        "bytes": 2 * size,
        "gb_per_s": spread([2 * size / t / 1e9 for t in clock.calls(partial(y.copy_, x), 15)], 1),
    }


def product(clock: Clock, side: int, dtype: torch.dtype) -> dict[str, Any]:
    """TFLOP/s of a square product of normal random numbers."""
    a, b = (torch.randn(side, side, device=clock.device, dtype=dtype) for _ in range(2))
    rates = [2 * side**3 / t / 1e12 for t in clock.graph([partial(torch.matmul, a, b)] * 4, 0.02, 9)]
    return {"side": side, "tflop_per_s": spread(rates, 1)}


def chain(clock: Clock, kernel: str, programs: int, pdl: bool) -> dict[str, Any]:
    """Microseconds per kernel of a chain of CHAIN in a CUDA graph, with and without programmatic dependent launch."""
    x, y = torch.zeros(2, programs * 1024, device=clock.device)
    if clock.cuda:

        def launch(source: Tensor, target: Tensor) -> None:
            if kernel == "empty":
                _empty_kernel[(programs,)](source, PDL=pdl, launch_pdl=pdl)
            else:
                _small_kernel[(programs,)](source, target, PDL=pdl, launch_pdl=pdl)

        works = [partial(launch, x, y), partial(launch, y, x)]
    else:
        works = [partial(y.copy_, x), partial(x.copy_, y)]
    return {"programs": programs, "us": microseconds(clock.graph(cycled(works, CHAIN)))}


def host_cost(clock: Clock, count: int) -> dict[str, Any]:
    """Microseconds of the host to start one kernel: torch's add, an empty Triton kernel, and a graph of 256."""
    x = torch.zeros(1, device=clock.device)
    works: dict[str, Any] = {"torch_add_": partial(x.add_, 1)}
    if clock.cuda and triton is not None:
        works["triton_empty"] = partial(_empty_kernel[(1,)], x, PDL=False)
        works["graph_of_256"] = captured([partial(x.add_, 1)] * 256)
    found = {}
    for name, work in works.items():
        times = []
        for _ in range(6):
            clock.wait()
            start = time.perf_counter()
            for _ in range(count):
                work()
            times.append((time.perf_counter() - start) / count)
        clock.wait()
        found[f"{name}_us"] = microseconds(times[1:])
    return found


def works(args: Namespace) -> Iterator[Work]:
    """Every limit; those of BRIEF are what other stages divide by."""
    large = args.device == "cuda"
    size = (2 if args.quick else 8) << 30 if large else 1 << 22
    side = 8192 if large else 128

    def limit(name: str, measure: Callable[..., dict[str, Any]], *sizes: Any) -> Work:
        return Work(
            name, lambda: lambda: measure(Clock(args.device), *sizes), alone=2, memory=17 if size in sizes else 2
        )

    yield limit("read", reading, size)
    yield limit("copy", copying, size)
    yield limit("product", product, side, torch.bfloat16)
    yield limit("product_f16", product, side, torch.float16)
    for kernel, programs, pdl in combinations(("empty", "small"), (1, 132, 1056) if large else (1,), (False, True)):
        yield limit(f"chain_{kernel}_{programs}{'_pdl' if pdl else ''}", chain, kernel, programs, pdl)
    yield limit("host", host_cost, 200)
