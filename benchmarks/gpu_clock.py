"""A clock for a device.

Small kernels are timed as replays of one CUDA graph that holds many calls over several sets of buffers, larger than the
L2 cache together: so weights come from memory, and launches cost what they cost in a decoder. Larger work is timed call
by call with CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from machine import spread

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
