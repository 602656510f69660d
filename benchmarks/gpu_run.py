"""What the stages of gpu.py share: a clock for a device, and a run that writes what it measures as it goes.

Small kernels are timed as replays of one CUDA graph that holds many calls over several sets of buffers, larger than the
L2 cache together: so weights come from memory, and launches cost what they cost in a decoder. Larger work is timed call
by call with CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from machine import facts, spread

Work = Callable[[], object]
T = TypeVar("T")
cuda: Any = torch.cuda  # partly untyped
ROUNDS = 7  # repeats of every measurement
SPARE = 20  # seconds a run keeps for its end


class Clock:
    """Seconds of work on one device. On a CPU graphs are plain calls, and there is one repeat."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        self.l2: int = torch.cuda.get_device_properties(0).L2_cache_size if self.cuda else 1 << 16

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, work: Work) -> float:
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

    def calls(self, work: Work, rounds: int = ROUNDS, warm: int = 3) -> list[float]:
        """Seconds of each of `rounds` calls, after `warm` that do not count."""
        for _ in range(warm if self.cuda else 1):
            work()
        return [self.once(work) for _ in range(rounds if self.cuda else 1)]

    def graph(self, works: Sequence[Work], least: float = 2e-3, rounds: int = ROUNDS) -> list[float]:
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


def captured(works: Sequence[Work]) -> Callable[[], None]:
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


def _all(works: Sequence[Work]) -> None:
    for work in works:
        work()


def cycled(works: Sequence[Work], count: int) -> list[Work]:
    """The first `count` of `works` repeated."""
    return [works[i % len(works)] for i in range(max(count, len(works)))]


def microseconds(seconds: Iterable[float]) -> dict[str, float]:
    return spread([1e6 * t for t in seconds], 2)


def gpu_state() -> dict[str, str]:
    """Clocks, temperature, power and why clocks are held, as nvidia-smi reads them; nothing is changed."""
    names = (
        "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    )
    query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}
    values = [value.strip() for value in found.splitlines()[0].split(",")]
    return dict(zip(names.split(","), values, strict=True))


class Run:
    """One call of gpu.py: what it may use, and a result file per stage, rewritten after every measurement.

    A measurement that fails is recorded with its error, and the others go on. A fault that leaves the device unusable,
    or a measurement longer than `limit` seconds, starts the program anew where it stopped.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out, self.device, self.quick = args, args.out, args.device, args.quick
        self.deadline: float = args.deadline
        self.only = re.compile(args.only)
        self.clock = Clock(args.device)
        self.results: dict[str, dict[str, Any]] = {}
        self.limit = 240.0
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def cuda(self) -> bool:
        return self.clock.cuda

    def left(self) -> float:
        """Seconds until the budget is spent, less those the end takes."""
        return self.deadline - time.time() - (SPARE if self.cuda else 0)

    def begin(self, stage: str) -> dict[str, Any]:
        """The stage's results: a new dictionary, or what the program wrote before it was started anew."""
        path = self.path(stage)
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if before and (self.args.again or before.get("until") == self.deadline):
            self.results[stage] = before
            kept = {k: v for k, v in self.results[stage]["results"].items() if "not_run" not in v}
            self.results[stage]["results"] = kept
        else:
            self.results[stage] = {
                **facts("numpy", "torch", "transformers"),
                "device": self.device,
                "until": self.deadline,
                "gpu": gpu_state() if self.cuda else None,
                "results": {},
            }
        if stage != "limits":
            self.results[stage]["limits"] = self.limits
        results: dict[str, Any] = self.results[stage]["results"]
        return results

    @property
    def limits(self) -> dict[str, Any]:
        """What the stage `limits` measured in this run."""
        found: dict[str, Any] = self.results.get("limits", {}).get("results", {})
        return found

    def share(self, value: float, name: str, key: str) -> float | None:
        """`value` over the median of a limit; None where that was not measured."""
        limit: float | None = self.limits.get(name, {}).get(key, {}).get("median")
        return round(value / limit, 3) if limit else None

    def path(self, stage: str) -> Path:
        """The file of a stage; limits that other stages begin with have their own, as the stage `limits` has more."""
        brief = stage == "limits" and stage not in self.args.stages
        return Path(self.out) / f"gpu_{stage}{'_again' if brief else ''}.json"

    def choice(self, large: T, small: T) -> T:
        """`large` on a GPU; on a CPU, where only the code is checked, `small`."""
        return large if self.cuda else small

    def skips(self, stage: str, name: str, cost: float) -> bool:
        """Whether `name` is measured already, not asked for, or longer than the time left, which is then recorded."""
        if name in self.results[stage]["results"] or (stage != "limits" and not self.only.search(f"{stage}/{name}")):
            return True
        if self.cuda and self.left() < cost:
            self._record(stage, name, {"not_run": f"{max(self.left(), 0):.0f} s left, {cost:.0f} s needed"})
            return True
        return False

    def measure(self, stage: str, name: str, work: Callable[[], dict[str, Any]], cost: float = 5) -> dict[str, Any]:
        """`work()` recorded as `name`, with the peak memory, unless `skips` says otherwise."""
        if self.skips(stage, name, cost):
            return dict(self.results[stage]["results"].get(name, {}))
        self._record(stage, name, {"error": "ended the program"}, show=False)
        watch = threading.Timer(self.limit, self._restart, (stage, name, f"longer than {self.limit:.0f} s"))
        watch.daemon = True
        watch.start()
        start = time.perf_counter()
        try:
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            found = work()
            if self.cuda:
                found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        except Exception as error:  # recorded; the other measurements go on
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        found["took_s"] = round(time.perf_counter() - start, 1)
        watch.cancel()
        self._tidy(stage, name, found)
        return self._record(stage, name, found)

    def attempt(self, stage: str, work: Callable[[Run], Any]) -> None:
        """`work(self)`, all measurements of a stage; what fails between them is recorded, and other stages go on."""
        try:
            work(self)
        except Exception as error:
            if stage not in self.results:
                self.begin(stage)
            self._tidy(stage, "stage", found := {"error": f"{type(error).__name__}: {error}"[:600]})
            self._record(stage, "stage", found)

    def _tidy(self, stage: str, name: str, found: dict[str, Any]) -> None:
        gc.collect()
        try:
            self.clock.wait()
            if self.cuda:
                torch.cuda.empty_cache()
        except RuntimeError as error:  # CUDA errors of this kind stay until the process ends
            self._restart(stage, name, found.get("error", str(error)))

    def _restart(self, stage: str, name: str, reason: str) -> None:
        """This program again, with what is left of its time and without the measurement that stopped it."""
        self._record(stage, name, {"error": reason})
        sys.stdout.flush()
        os.closerange(3, 1 << 16)  # the device's too, so that it takes back the memory that it gave
        rest = [a for a in sys.argv[1:] if not a.startswith("--deadline=")]
        os.execv(sys.executable, [sys.executable, sys.argv[0], *rest, f"--deadline={self.deadline!r}"])

    def _record(self, stage: str, name: str, found: dict[str, Any], show: bool = True) -> dict[str, Any]:
        self.results[stage]["results"][name] = found
        text = json.dumps(self.results[stage], indent=2) + "\n"
        partial = self.path(stage).with_suffix(".part")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path(stage))
        if show:
            print(f"{stage}/{name}: {json.dumps(found)}", flush=True)
        return found
