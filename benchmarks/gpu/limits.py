"""A clock, the limits of the device, and the floor of a prefill: the sum of its bare products and attentions.

Small kernels are timed as replays of a CUDA graph of many calls on several sets of buffers, together larger than the L2
cache: weights then come from memory, and launches cost what they cost in a decoder. Larger work is timed call by call
with CUDA events.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product as combinations
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from machine import spread
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .pool import Task

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

if TYPE_CHECKING:
    from .models import Shape

Call = Callable[[], object]
T = TypeVar("T")
cuda: Any = torch.cuda  # partly untyped
ROUNDS = 7  # repeats of every measurement
BLOCK = 8192  # elements of a tile of the reading kernel: 16 bytes for each of 256 threads, eight times
CHAIN = 256  # kernels of a chain
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


class Clock:
    """Time calls on one device. On a CPU, graphs are plain calls, and there is one repeat."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        self.l2: int = torch.cuda.get_device_properties(0).L2_cache_size if self.cuda else 1 << 16

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, call: Call) -> float:
        """Return the seconds of one call, from an idle device to an idle device."""
        self.wait()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def calls(self, call: Call, rounds: int = ROUNDS, warm: int = 3) -> list[float]:
        """Return the seconds of each of `rounds` calls after `warm` warm-up calls."""
        for _ in range(warm if self.cuda else 1):
            call()
        return [self.once(call) for _ in range(rounds if self.cuda else 1)]

    def graph(self, calls: Sequence[Call], least: float = 2e-3, rounds: int = ROUNDS) -> list[float]:
        """Return the seconds per call of a CUDA graph of all `calls` in order, for each of `rounds` rounds.

        A round replays the graph for at least `least` seconds.

        Raises:
            RuntimeError: if the calls cannot be captured.
        """
        replay = capture(calls)
        replay()
        count = max(1, round(least / max(self.once(replay), 1e-6)))
        repeat = partial(_call_all, [replay] * count)
        return [seconds / count / len(calls) for seconds in self.calls(repeat, rounds, warm=1)]

    def rotation(self, make: Callable[[int], T], size: int) -> list[T]:
        """Return `make(seed)` for 2 to 64 seeds, until sets of `size` bytes each fill four L2 caches."""
        count = max(2, min(64, -(-4 * self.l2 // max(size, 1)))) if self.cuda else 2
        return [make(seed) for seed in range(count)]


def capture(calls: Sequence[Call]) -> Call:
    """Return the replay of a CUDA graph of `calls`, each of which is run before; without a GPU, call them one by one.

    Raises:
        RuntimeError: if the first of them waits for the device.
    """
    if not cuda.is_available():
        return partial(_call_all, calls)
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _call_all([calls[0], *calls])
        # What waits for the device cannot be captured, and fails so late that it spoils later captures: raise here.
        cuda.set_sync_debug_mode("error")
        try:
            calls[0]()
        finally:
            cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _call_all(calls)
    replay: Call = graph.replay
    return replay


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def repeat_calls(calls: Sequence[Call], count: int) -> list[Call]:
    """Return `calls`, repeated in turn if they are fewer than `count`."""
    return [calls[i % len(calls)] for i in range(max(count, len(calls)))]


def microseconds(seconds: Iterable[float]) -> dict[str, float]:
    return spread([1e6 * t for t in seconds], 2)


def _jit(fn: Any) -> Any:
    return fn if triton is None else triton.jit(fn)


@_jit
def _read_kernel(x, y, tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # a Triton kernel
    """Read: each program sums every `programs`-th tile of `x` [tiles · BLOCK] and stores one value."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=1, loop_unroll_factor=2):
        total += tl.load(x + tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(y + program, tl.sum(total))


@_jit
def _empty_kernel(x, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # a Triton kernel
    """Do nothing; with PDL, let the next kernel start at once and wait for the previous one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@_jit
def _small_kernel(x, y, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # a Triton kernel
    """Copy 1024 elements per program: in a chain, data passes from kernel to kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + at, tl.load(x + at) + 1)


def variants() -> list[dict[str, Any]]:
    """Return the launched variants of the kernels with types, constants and options, to compile without a GPU."""
    types = {"x": "*fp32", "y": "*fp32"}
    reads = {"x": "*bf16", "y": "*fp32", "tiles": "i32"}
    listed: list[dict[str, Any]] = []
    for pdl in (False, True):
        options = {"constants": {"PDL": pdl}, "pdl": pdl}
        listed.append({"kernel": _empty_kernel, "types": {"x": "*fp32"}, "vectors": False, **options})
        listed.append({"kernel": _small_kernel, "types": types, **options})
    return [*listed, {"kernel": _read_kernel, "types": reads, "constants": {"BLOCK": BLOCK}, "warps": 8, "pdl": False}]


def read(clock: Clock, size: int) -> dict[str, Any]:
    """Measure GB/s of reading `size` bytes by torch's sum and by a kernel of k programs per processor, the best k."""
    x = torch.rand(size // 2, device=clock.device, dtype=torch.bfloat16)
    calls: dict[str, Call] = {"torch_sum": partial(torch.sum, x, dtype=torch.float32)}
    if clock.cuda and triton is not None:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for factor in (2, 4, 8, 16):
            y = torch.empty(processors * factor, device=x.device)
            launch = partial(_read_kernel[(processors * factor,)], x, y, x.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
            calls[f"kernel_{factor}_per_processor"] = launch
    rates = {name: spread([size / t / 1e9 for t in clock.calls(call, 9)], 1) for name, call in calls.items()}
    return {"bytes": size, **rates, "gb_per_s": max(rates.values(), key=lambda s: s["median"])}


def copy(clock: Clock, size: int) -> dict[str, Any]:
    """Measure GB/s of copying `size` bytes; read and written bytes both count."""
    x = torch.rand(size // 4, device=clock.device)
    seconds = clock.calls(partial(torch.empty_like(x).copy_, x), 15)
    return {"bytes": 2 * size, "gb_per_s": spread([2 * size / t / 1e9 for t in seconds], 1)}


def multiply(clock: Clock, side: int, dtype: torch.dtype) -> dict[str, Any]:
    """Measure TFLOP/s of a product of square matrices with normal random elements."""
    a, b = (torch.randn(side, side, device=clock.device, dtype=dtype) for _ in range(2))
    rates = [2 * side**3 / t / 1e12 for t in clock.graph([partial(torch.matmul, a, b)] * 4, 0.02, 9)]
    return {"side": side, "tflop_per_s": spread(rates, 1)}


def chain(clock: Clock, kernel: str, programs: int, pdl: bool) -> dict[str, Any]:
    """Measure microseconds per kernel of a chain of CHAIN in a CUDA graph, with or without dependent launch."""
    x, y = torch.zeros(2, programs * 1024, device=clock.device)
    calls: list[Call] = [partial(y.copy_, x), partial(x.copy_, y)]
    if clock.cuda:
        launch = partial((_empty_kernel if kernel == "empty" else _small_kernel)[(programs,)], PDL=pdl, launch_pdl=pdl)
        calls = [partial(launch, x), partial(launch, y)]
        if kernel == "small":
            calls = [partial(launch, x, y), partial(launch, y, x)]
    return {"programs": programs, "us": microseconds(clock.graph(repeat_calls(calls, CHAIN)))}


def launch_cost(clock: Clock, count: int) -> dict[str, Any]:
    """Measure microseconds of the host to launch torch's add, an empty Triton kernel, and a graph of 256 kernels."""
    x = torch.zeros(1, device=clock.device)
    calls: dict[str, Call] = {"torch_add_": partial(x.add_, 1)}
    if clock.cuda and triton is not None:
        calls["triton_empty"] = partial(_empty_kernel[(1,)], x, PDL=False)
        calls["graph_of_256"] = capture([partial(x.add_, 1)] * 256)
    result = {}
    for name, call in calls.items():
        times = []
        for _ in range(6):
            clock.wait()
            start = time.perf_counter()
            _call_all([call] * count)
            times.append((time.perf_counter() - start) / count)
        clock.wait()
        result[f"{name}_us"] = microseconds(times[1:])
    return result


def list_limits(args: Namespace) -> Iterator[Task]:
    """Yield every limit."""
    large = args.device == "cuda"
    size = (2 if args.quick else 8) << 30 if large else 1 << 22
    side = 8192 if large else 128

    def limit(name: str, measure: Callable[..., dict[str, Any]], *sizes: Any) -> Task:
        def run() -> Callable[[], dict[str, Any]]:
            return partial(measure, Clock(args.device), *sizes)

        return Task(name, run, alone=2, memory=17 if size in sizes else 2)

    yield limit("read", read, size)
    yield limit("copy", copy, size)
    yield limit("product", multiply, side, torch.bfloat16)
    yield limit("product_f16", multiply, side, torch.float16)
    for kernel, programs, pdl in combinations(("empty", "small"), (1, 132, 1056) if large else (1,), (False, True)):
        yield limit(f"chain_{kernel}_{programs}{'_pdl' if pdl else ''}", chain, kernel, programs, pdl)
    yield limit("host", launch_cost, 200)


def product_seconds(clock: Clock, rows: int, out: int, inner: int, dtype: torch.dtype) -> list[float]:
    """Return the seconds of one product [rows, inner] · [out, inner]ᵀ with operands from memory."""

    def make(seed: int) -> Call:
        x, w = (torch.randn(n, inner, device=clock.device, dtype=dtype) for n in (rows, out))
        return partial(F.linear, x, w)

    return clock.graph(repeat_calls(clock.rotation(make, 2 * inner * (rows + out)), 8))


def attention_seconds(clock: Clock, shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, list[float] | str]:
    """Return the seconds of causal attention of one layer by each of torch's backends, or its error."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1, n, rows, shape.head_dim, device=clock.device, dtype=dtype) for n in heads)
    call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    seconds: dict[str, list[float] | str] = {}
    for name, backend in BACKENDS.items():
        if clock.cuda != (name != "math"):  # on a GPU it is far slower and fills the memory
            continue
        try:
            with sdpa_kernel(backend):
                seconds[name] = clock.graph([call] * 4)
        except RuntimeError as error:  # not built in, or not for these heads
            seconds[name] = f"{error}"[:200]
    return seconds


def prefill_floor(device: str, shape: Shape, rows: int) -> dict[str, Any]:
    """Measure the products and attentions of a prompt of `rows` tokens, in microseconds each and milliseconds in sum.

    The sum takes each product of a layer by itself by cuBLAS and the fastest attention of torch, times the layers, and
    the head for one token. Norms, activations, rotations and residuals come on top.
    """
    clock, dtype = Clock(device), torch.bfloat16
    result: dict[str, Any] = {}
    total = 0.0
    for name, (out, inner) in shape.products().items():
        result[f"{name}_us"] = microseconds(times := product_seconds(clock, rows, out, inner, dtype))
        result[f"{name}_tflop_per_s"] = round(2 * rows * out * inner / median(times) / 1e12, 1)
        total += shape.layers * median(times)
    operations = 2 * rows * rows * shape.heads * shape.head_dim  # half of 4 · rows²: causal
    least = float("inf")
    for name, seconds in attention_seconds(clock, shape, rows, dtype).items():
        if isinstance(seconds, str):
            result[f"attention_{name}"] = seconds
        else:
            result[f"attention_{name}_us"] = microseconds(seconds)
            result[f"attention_{name}_tflop_per_s"] = round(operations / median(seconds) / 1e12, 1)
            least = min(least, median(seconds))
    total += shape.layers * least + median(product_seconds(clock, 1, shape.vocab, shape.dim, dtype))
    return {**result, "floor_ms": round(1e3 * total, 3)}
