"""Runs mutated inputs in worker processes, with a watchdog, and counts what came of them by format."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .formats import FORMATS as FIRST
from .more_formats import MORE

FORMATS = {**FIRST, **MORE}
ROOT = Path(__file__).resolve().parents[2]
HANG = 10.0  # seconds of CPU
LIVES = 1000  # inputs of one process: what one leaves behind cannot pile up
GOOD = ("fine", "refused")
CLASSES = (*GOOD, "traceback", "hang", "memory", "overlap accepted", "too long", "left over")


@dataclass
class Tally:
    """Count outcomes by format; `bad` describes the unexpected ones."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, kind: str, number: int, found: dict[str, Any], seconds: float) -> None:
        """Count one input."""
        self.counts.setdefault(kind, Counter())[found["class"]] += 1
        self.slowest = max(self.slowest, seconds)
        if found["class"] not in GOOD:
            self.bad.append({"input": f"{kind} {number}", **found})

    def totals(self) -> dict[str, int]:
        """Return the outcomes of all formats together."""
        summed = sum(self.counts.values(), Counter[str]())
        return {name: summed[name] for name in CLASSES}


class Worker:
    """A process of `worker`, started anew after a hang, a crash, or `LIVES` inputs."""

    def __init__(self, corpus: Path, seed: int) -> None:
        self._command = [sys.executable, "-m", "tests.fuzz.worker", str(corpus), str(seed)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lives, self._read = 0, b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it is closed with the worker

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()

    def run(self, kind: str, number: int) -> tuple[dict[str, Any], float]:
        """Run an input: its outcome, and the seconds it took."""
        if self._process is None or self._lives == 0:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._lives -= 1
        start = time.monotonic()
        self._process.stdin.write(f"{kind} {number}\n".encode())
        self._process.stdin.flush()
        told = self._line(60)  # the files are written
        begun = time.monotonic()
        found = self._line(HANG) if told else None
        seconds = time.monotonic() - (begun if told else start)
        if found is not None and told is not None:
            return {**json.loads(found), **json.loads(told)}, seconds
        status = self._process.poll()
        self._end()
        last = self._said()
        args = json.loads(told) if told else {}
        if status is None:
            return {"class": "hang", "what": f"over {HANG:g} s", **args}, seconds
        return {"class": "traceback", "what": f"the process ended with status {status}: {last}", **args}, seconds

    def _start(self) -> None:
        self._end()
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self._lives, self._read = LIVES, b""
        if self._line(120) != "ready":
            raise RuntimeError(f"the worker does not start: {' '.join(self._command)}")

    def _line(self, seconds: float) -> str | None:
        """The next line of the process, if one comes within `seconds` of CPU, or six times as many of the clock."""
        assert self._process is not None and self._process.stdout is not None
        begun, spent, stream = time.monotonic(), self._spent(), self._process.stdout.fileno()
        while b"\n" not in self._read:
            if select.select([stream], [], [], 0.5)[0]:
                piece = os.read(stream, 1 << 16)
                if not piece:
                    self._process.wait()
                    return None
                self._read += piece
            elif self._spent() - spent > seconds or time.monotonic() - begun > 6 * seconds:
                return None
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def _said(self) -> str:
        """The end of what the process wrote on stderr."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 400))
        return self._log.read().decode("utf-8", "replace")

    def _spent(self) -> float:
        """The seconds of CPU that the process has had: on a busy machine those of the clock say little."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def inputs(seed: int, count: int, kinds: Sequence[str] = tuple(FORMATS)) -> Iterator[tuple[str, int]]:
    """The formats, those in `kinds`, and numbers of `count` inputs, every format in its share."""
    rng = random.Random(seed)
    shares = [FORMATS[kind][1] for kind in kinds]
    numbers = Counter[str]()
    for i in range(count):
        kind = kinds[i] if i < len(kinds) else rng.choices(kinds, shares)[0]
        yield kind, numbers[kind]
        numbers[kind] += 1


def fuzz(
    corpus: Path,
    seed: int,
    count: int,
    tell: Callable[[int, Tally], None] = lambda done, tally: None,
    kinds: Sequence[str] = tuple(FORMATS),
    jobs: int = 1,
) -> Tally:
    """Run `count` inputs of the formats `kinds` in `jobs` processes at once."""
    tally, waiting, lock = Tally(), inputs(seed, count, kinds), threading.Lock()

    def work() -> None:
        with Worker(corpus, seed) as worker:
            while True:
                with lock:
                    kind, number = next(waiting, ("", 0))
                if not kind:
                    return
                found, seconds = worker.run(kind, number)
                with lock:
                    tally.add(kind, number, found, seconds)
                    tell(sum(tally.totals().values()), tally)

    with ThreadPoolExecutor(jobs) as pool:
        for task in [pool.submit(work) for _ in range(jobs)]:
            task.result()
    return tally
