"""A clock for a device.

Small kernels are timed as replays of one CUDA graph that holds many calls over several sets of buffers, larger than the
L2 cache together: so weights come from memory, and launches cost what they cost in a decoder. Larger work is timed call
by call with CUDA events.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product as combinations
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from machine import spread
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .pool import Work

if TYPE_CHECKING:
    from .models import Shape

Call = Callable[[], object]
T = TypeVar("T")
cuda: Any = torch.cuda  # partly untyped
ROUNDS = 7  # repeats of every measurement


class Clock:
    """Seconds of work on one device. On a CPU graphs are plain calls, and there is one repeat."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        self.l2: int = torch.cuda.get_device_properties(0).L2_cache_size if self.cuda else 1 << 16

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, work: Call) -> float:
        """Seconds of one call, from an idle device to an idle device."""
        self.wait()
        if not self.cuda:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def calls(self, work: Call, rounds: int = ROUNDS, warm: int = 3) -> list[float]:
        """Seconds of each of `rounds` calls, after `warm` that do not count."""
        for _ in range(warm if self.cuda else 1):
            work()
        return [self.once(work) for _ in range(rounds if self.cuda else 1)]

    def graph(self, works: Sequence[Call], least: float = 2e-3, rounds: int = ROUNDS) -> list[float]:
        """Seconds of one call, the mean over a CUDA graph of all `works` in order, replayed `rounds` times or more.

        A round replays the graph until `least` seconds are over.

        Raises:
            RuntimeError: if the work cannot be captured.
        """
        replay = captured(works)
        replay()
        count = max(1, round(least / max(self.once(replay), 1e-6)))

        def repeat() -> None:
            for _ in range(count):
                replay()

        return [seconds / count / len(works) for seconds in self.calls(repeat, rounds, warm=1)]

    def rotation(self, make: Callable[[int], T], size: int, least: int = 1) -> list[T]:
        """`make(seed)` until sets of `size` bytes each fill four L2 caches; at most 64 sets, at least two."""
        count = max(2, least, min(64, -(-4 * self.l2 // max(size, 1)))) if self.cuda else 2
        return [make(seed) for seed in range(count)]


@contextmanager
def unsynchronized() -> Iterator[None]:
    """Inside, an operation of torch that waits for the device raises a RuntimeError.

    What waits cannot be captured, and finding that out during a capture spoils the process for later ones.
    """
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode("default")


def captured(works: Sequence[Call]) -> Callable[[], None]:
    """The replay of a CUDA graph of all `works`, each of which runs before; without a GPU, all of them call by call.

    Raises:
        RuntimeError: if the first of them waits for the device.
    """
    if not cuda.is_available():
        return partial(_all, works)
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for work in [works[0], *works]:
            work()
        with unsynchronized():
            works[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    replay: Callable[[], None] = graph.replay
    return replay


def _all(works: Sequence[Call]) -> None:
    for work in works:
        work()


def cycled(works: Sequence[Call], count: int) -> list[Call]:
    """The first `count` of `works` repeated."""
    return [works[i % len(works)] for i in range(max(count, len(works)))]


def microseconds(seconds: Iterable[float]) -> dict[str, float]:
    return spread([1e6 * t for t in seconds], 2)


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


def list_limits(args: Namespace) -> Iterator[Work]:
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


BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def product_seconds(clock: Clock, rows: int, out: int, inner: int, dtype: torch.dtype) -> list[float]:
    """Seconds of one product [rows, inner] · [out, inner]ᵀ of normal numbers, operands from memory."""

    def make(seed: int) -> tuple[Tensor, Tensor]:
        x, w = (torch.randn(n, inner, device=clock.device, dtype=dtype) for n in (rows, out))
        return x, w

    sets = clock.rotation(make, 2 * inner * (rows + out))
    return clock.graph(cycled([partial(F.linear, x, w) for x, w in sets], 8))


def attention_seconds(clock: Clock, shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, list[float] | str]:
    """Seconds of causal attention of one layer by each of torch's backends, or why one does not take it."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1, n, rows, shape.head_dim, device=clock.device, dtype=dtype) for n in heads)
    found: dict[str, list[float] | str] = {}
    for name, backend in BACKENDS.items():
        if clock.cuda != (name != "math"):  # on a GPU it is far slower and fills the memory
            continue
        work = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        try:
            with sdpa_kernel(backend):
                found[name] = clock.graph([work] * 4)
        except RuntimeError as error:  # not built in, or not for these heads
            found[name] = f"{error}"[:200]
    return found


def floor(device: str, shape: Shape, rows: int) -> dict[str, Any]:
    """Milliseconds of the products and attentions of a prompt of `rows` tokens, and each by itself in microseconds."""
    clock, dtype = Clock(device), torch.bfloat16
    found: dict[str, Any] = {}
    total = 0.0
    for name, (out, inner) in shape.products().items():
        found[f"{name}_us"] = microseconds(times := product_seconds(clock, rows, out, inner, dtype))
        found[f"{name}_tflop_per_s"] = round(2 * rows * out * inner / median(times) / 1e12, 1)
        total += shape.layers * median(times)
    attention = attention_seconds(clock, shape, rows, dtype)
    operations = 2 * rows * rows * shape.heads * shape.head_dim  # half of 4 · rows²: causal
    least = float("inf")
    for name, result in attention.items():
        if isinstance(result, str):
            found[f"attention_{name}"] = result
        else:
            found[f"attention_{name}_us"] = microseconds(result)
            found[f"attention_{name}_tflop_per_s"] = round(operations / median(result) / 1e12, 1)
            least = min(least, median(result))
    total += shape.layers * least
    total += median(product_seconds(clock, 1, shape.vocab, shape.dim, dtype))
    return {**found, "floor_ms": round(1e3 * total, 3)}
