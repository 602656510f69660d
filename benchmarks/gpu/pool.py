"""Works that run by name in processes of their own: prepared side by side, timed one at a time, killed where they hang.

Every process of the pool lists all works itself, because functions cannot be sent; the pool sends names. So a work that
faults, dies or hangs loses only itself: its process is replaced, and the others go on. While one is timed, no other
process works. The pool itself imports neither torch nor CUDA.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, groupby
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

Found = dict[str, Any]  # what is known of a work: its numbers, or its "error", or that it is "not_reached"
Source = Callable[[], Iterable["Work"]]
PATIENCE = 60.0  # seconds that every work may take beyond three times what is expected of it
STARTS, IDLE, WORKS, READY, ALONE = "starts", "idle", "works", "ready", "alone"


@dataclass(frozen=True)
class Work:
    """`run()` gives numbers or nothing; of a work that is timed, a function that gives them, called with the device to
    itself.

    To expect are `seconds` of `run`, `alone` seconds of that function, and `memory` in GiB on the device. Works of the
    same `group` that follow one another share a process, and what it has compiled and cached.
    """

    name: str
    run: Callable[[], Any] | None
    seconds: float = 2.0
    alone: float = 0.0
    memory: float = 2.0
    group: str = ""


def serve(pipe: Any, source: Source, log: str) -> None:
    """Run works in a process of the pool: list them, then do what is asked for, until nothing is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the kernel ends this process when the pool's ends
    os.setpgid(0, 0)  # what this process starts is killed with it
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # says where the process hangs
    works = {work.name: work for work in source()}
    gc.freeze()  # modules need not be searched after every work
    pipe.send([replace(work, run=None) for work in works.values()])
    for name in iter(pipe.recv, None):
        os.ftruncate(1, 0)
        found = _attempt(works[name].run)
        while callable(found):
            pipe.send(READY)
            pipe.recv()
            found = _attempt(found)
        state = _tidy()
        lost = "error" in state
        pipe.send(({**state, **found}, lost))
        if lost:
            return


def _attempt(step: Any) -> Any:
    try:
        return step() or {}
    except Exception as error:  # recorded; the other works go on
        return {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc(limit=-3)[-1500:]}


def _tidy() -> Found:
    """Free what a work has left behind; return its peak memory, or the error of a device that is lost."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # it holds graphs and their weights
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    return {"peak_gib": round(peak / 2**30, 2)}


class Worker:
    """The pool's end of a process: its `state` and since when, the work in hand and those that come after it."""

    def __init__(self, source: Source, queue: Sequence[Work] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = tempfile.NamedTemporaryFile(prefix="weft-gpu-", suffix=".log")  # noqa: SIM115 # lives as long as this
        self.pipe, end = context.Pipe()
        self.process: Any = context.Process(target=serve, args=(end, source, self.log.name))
        self.process.start()
        end.close()
        self.work: Work | None = None
        self.queue = list(queue)
        self.begun = 0.0
        self.enter(STARTS)

    def enter(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    def begin(self, work: Work) -> None:
        self.work, self.begun = work, time.monotonic()
        self.send(work.name, WORKS)

    def send(self, message: Any, state: str) -> None:
        with suppress(ConnectionError):  # a process that has died is noticed when it is listened to
            self.pipe.send(message)
        self.enter(state)

    def late(self, patience: float) -> float:
        """Seconds since the process should have answered; negative before."""
        expected = {STARTS: patience, WORKS: self.work and self.work.seconds, ALONE: self.work and self.work.alone}
        allowed = patience + 3 * (expected.get(self.state) or 0)
        return time.monotonic() - self.since - allowed if self.state in expected else float("-inf")

    def said(self) -> str:
        """The end of what the process has printed."""
        with open(self.log.name, encoding="utf-8", errors="replace") as log:
            return log.read()[-1500:].strip()

    def end(self, hung: bool = False) -> str:
        """Kill the process and all that it has started, one that `hung` after it has printed where; return its fate."""
        if hung and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        for kill in (os.killpg, os.kill):  # the group is not there before the process has made it
            with suppress(ProcessLookupError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join(5)  # a process inside the driver may take longer, and is left behind
        status = self.process.exitcode
        return f"died of {signal.Signals(-status).name}" if (status or 0) < 0 else f"ended with status {status}"


class Pool:
    """Run works in up to `jobs` processes until all are done or `deadline`, on the clock of `time.time`.

    `choose` picks those to do of all works. `note(work, None)` is called before a work begins, `note(work, found)` when
    it has ended, however it did. Works in hand need up to `memory` GiB of the device together.
    """

    def __init__(
        self,
        source: Source,
        choose: Callable[[list[Work]], list[Work]],
        note: Callable[[Work, Found | None], None],
        jobs: int,
        deadline: float = float("inf"),
        memory: float = float("inf"),
        patience: float = PATIENCE,
    ) -> None:
        self.source, self.choose, self.note = source, choose, note
        self.deadline, self.memory, self.patience = deadline, memory, patience
        self.pending: list[list[Work]] | None = None  # by group; None until a process has listed them
        self.timing = False  # since all of a round are ready and until all of them are timed
        self.workers = [Worker(source) for _ in range(jobs)]

    def run(self) -> None:
        """Do all works that are chosen.

        Raises:
            SystemExit: if no process can list them.
        """
        try:
            while self.workers and self.left() > 0 and (self.pending is None or self.pending or self._busy()):
                self._advance()
                self._listen()
        finally:
            for worker in self.workers:
                if worker.state in (WORKS, READY, ALONE):
                    self._end(worker, {"not_reached": "the budget ended it"})
                elif worker.state == IDLE:
                    worker.send(None, IDLE)
            for worker in self.workers:
                worker.process.join(1 if worker.state == IDLE else 0)
                worker.end()
        why: Found = {"not_reached": "the budget was over"} if self.workers else {"error": "no process is left"}
        for work in chain(*(worker.queue for worker in self.workers), *(self.pending or [])):
            self.note(work, why)

    def left(self) -> float:
        return self.deadline - time.time()

    def _busy(self) -> bool:
        return any(worker.work or worker.queue for worker in self.workers)

    def _advance(self) -> None:
        """Give works to idle processes, or the device to one that is ready when no other works."""
        if not self.timing:
            for worker in self.workers:
                if worker.state == IDLE and (work := self._next(worker)) is not None:
                    self.note(work, None)
                    worker.begin(work)
        if not any(worker.state in (STARTS, WORKS, ALONE) for worker in self.workers):
            ready = [worker for worker in self.workers if worker.state == READY]
            self.timing = bool(ready)
            for worker in sorted(ready, key=lambda worker: worker.begun)[:1]:
                worker.send(None, ALONE)

    def _next(self, worker: Worker) -> Work | None:
        """The work that an idle process does next, if the device has room for one and the budget time."""
        used = sum(other.work.memory for other in self.workers if other.work)
        while worker.queue or self.pending:
            if not worker.queue:
                fitting = [group for group in self.pending or [] if not used or used + group[0].memory <= self.memory]
                if not fitting:
                    return None
                worker.queue = fitting[0]
                self.pending = [group for group in self.pending or [] if group is not fitting[0]]
            work = worker.queue.pop(0)
            if work.seconds + work.alone <= self.left():
                return work
            self.note(work, {"not_reached": f"{self.left():.0f} s left, {work.seconds + work.alone:.0f} s needed"})
        return None

    def _listen(self) -> None:
        """Wait until a process answers, ends, or is late."""
        active = [worker for worker in self.workers if worker.state in (STARTS, WORKS, ALONE)]
        if not active:
            return
        soonest = min([self.left(), *(-worker.late(self.patience) for worker in active)])
        answered = wait([worker.pipe for worker in self.workers], max(soonest, 0) + 0.01)
        for worker in [*self.workers]:
            if worker.pipe in answered:
                try:
                    self._hear(worker, worker.pipe.recv())
                except (EOFError, ConnectionError):
                    self._replace(worker)
            elif worker.late(self.patience) >= 0 and self.left() > 0:
                self._replace(worker, f"hung: no answer for {time.monotonic() - worker.since:.0f} s")

    def _hear(self, worker: Worker, message: Any) -> None:
        if message == READY:
            worker.enter(READY)
        elif worker.state == STARTS:
            worker.enter(IDLE)
            if self.pending is None:
                chosen = enumerate(self.choose(message))
                self.pending = [[w for _, w in same] for _, same in groupby(chosen, lambda n: n[1].group or n[0])]
        else:
            found, lost = message
            self._end(worker, found)
            worker.enter(IDLE)
            if lost:
                self._replace(worker)

    def _end(self, worker: Worker, found: Found) -> None:
        work, worker.work = worker.work, None
        assert work is not None
        printed = {"printed": worker.said()} if "error" in found else {}
        self.note(work, {"seconds": round(time.monotonic() - worker.begun, 2), **found, **printed})

    def _replace(self, worker: Worker, error: str = "") -> None:
        """Put a new process in the place of one that hung, died or lost the device; of one that did not start, none."""
        started, fate = worker.state != STARTS, worker.end(hung=bool(error))
        if worker.work is not None:
            self._end(worker, {"error": error or fate})
        self.workers.remove(worker)
        if started and (worker.queue or self.pending):
            self.workers.append(Worker(self.source, worker.queue))
        elif not started:
            print(f"a process {error or fate} at its start\n{worker.said()}", flush=True)
            self.pending = [worker.queue, *(self.pending or [])] if worker.queue else self.pending
            if self.pending is None and not self.workers:
                raise SystemExit("no process can list the works")


FILES = {"kernels": 3.0, "torch": 4.0, "ort_cuda": 3.0}  # tests/gpu/test_NAME.py, and seconds to expect of a check


def list_tests(args: Namespace) -> Iterator[Work]:
    """Every check as FILE/CHECK-CASE-DTYPE; those of one case and dtype share a process."""
    os.environ["WEFT_DEVICE"] = args.device
    sys.path.append(str(ROOT / "tests/gpu"))
    for file, seconds in FILES.items():
        try:
            module = import_module(f"test_{file}")
        except ImportError as error:  # of what it tests with, ONNX Runtime say
            yield Work(f"{file}/import", partial(_fail, error))
            continue
        for name, check in module.checks():
            group = f"{file}/{name.partition('-')[2]}"
            yield Work(f"{file}/{name}", partial(module.test_on_the_gpu, check), seconds, group=group)


def _fail(error: ImportError) -> None:
    raise error


ROOT = Path(__file__).resolve().parents[2]
STAGES = {  # the module that lists the works of each stage
    "limits": "limits",
    "tests": "pool",
    "decode": "generation",
    "quality": "generation",
    "kernels": "kernel_timing",
    "prefill": "generation",
    "ort": "ort",
    "sweep": "kernel_timing",
}


def works(args: Namespace) -> Iterator[Work]:
    """All works of the stages, named stage/name, in a process that is to run them; limits first."""
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if args.no_pdl:
        import_module("weft.backends.torch.kernels.shared.launch").PDL_SINCE = (99, 0)
    for stage in [stage for stage in STAGES if stage in {"limits", *args.stages}]:
        for work in getattr(import_module(f".{STAGES[stage]}", __package__), f"list_{stage}")(args):
            yield replace(work, name=f"{stage}/{work.name}", group=work.group and f"{stage}/{work.group}")


def serving(args: Namespace) -> list[Work]:
    """The works of a process of the pool; on a CPU, kernels run in Triton's interpreter, quickened."""
    if args.device == "cpu" and find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(str(ROOT))
        import_module("tests.interpreter").quicken(load=True)
    return [*works(args)]
