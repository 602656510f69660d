"""Run the tasks of all stages in processes: prepared side by side, timed one at a time, killed when they hang.

Every process lists all tasks itself, because functions cannot be sent; the pool sends names. A task that faults, dies
or hangs therefore loses only itself: its process is replaced, and the others continue. While one task is timed, all
other processes idle. The pool itself imports neither torch nor CUDA.
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

ROOT = Path(__file__).resolve().parents[2]
STAGES = {  # the module that lists the tasks of each stage, by `list_STAGE`
    "limits": "limits",
    "tests": "pool",
    "decode": "generation",
    "quality": "generation",
    "kernels": "kernel_timing",
    "prefill": "generation",
    "ort": "ort",
    "sweep": "kernel_timing",
}
TESTS = {"kernels": 3.0, "torch": 4.0, "ort_cuda": 3.0}  # tests/gpu/test_NAME.py: seconds of a check, estimated
Result = dict[str, Any]  # measured values; or "error", or "not_reached" with the reason
Source = Callable[[], Iterable["Task"]]
PATIENCE = 60.0  # seconds that every task may take beyond three times its estimate
STARTING, IDLE, PREPARING, READY, TIMING = "starting", "idle", "preparing", "ready", "timing"
ACTIVE = (STARTING, PREPARING, TIMING)  # states in which the pool waits for an answer


@dataclass(frozen=True)
class Task:
    """A measurement or a check. `run()` returns its result or None, or a function that is called with the device to
    itself and returns the result.

    Estimates: `seconds` of `run`, `alone` seconds of that function, `memory` in GiB on the device. Consecutive tasks of
    the same `group` share a process with its compiled kernels and caches.
    """

    name: str
    run: Callable[[], Any] | None
    seconds: float = 2.0
    alone: float = 0.0
    memory: float = 2.0
    group: str = ""


def serve(pipe: Any, source: Source, log: str) -> None:
    """Serve a process of the pool: list the tasks of `source`, then run those that the pool names, until None."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux ends this process when the pool's ends
    os.setpgid(0, 0)  # what this process starts is killed with it
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints where the process hangs
    tasks = {task.name: task for task in source()}
    gc.freeze()  # spares the collector a search of all modules after every task
    pipe.send([replace(task, run=None) for task in tasks.values()])
    for name in iter(pipe.recv, None):
        os.ftruncate(1, 0)
        result = _attempt(tasks[name].run)
        while callable(result):
            pipe.send(READY)
            pipe.recv()
            result = _attempt(result)
        state = _tidy()
        lost = "error" in state
        pipe.send(({**state, **result}, lost))
        if lost:
            return


def _attempt(step: Any) -> Any:
    try:
        return step() or {}
    except Exception as error:  # recorded, and the other tasks continue
        return {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc(limit=-3)[-1500:]}


def _tidy() -> Result:
    """Free the memory of a finished task; return its peak, or the error of a lost device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # dynamo keeps graphs and their weights
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    return {"peak_gib": round(peak / 2**30, 2)}


class Worker:
    """The pool's end of a process: its `state` and since when, its current task and the queue after it."""

    def __init__(self, source: Source, queue: Sequence[Task] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = tempfile.NamedTemporaryFile(prefix="weft-gpu-", suffix=".log")  # noqa: SIM115 # lives as long as this
        self.pipe, end = context.Pipe()
        self.process: Any = context.Process(target=serve, args=(end, source, self.log.name))
        self.process.start()
        end.close()
        self.task: Task | None = None
        self.queue = list(queue)
        self.begun = 0.0
        self.enter(STARTING)

    def enter(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    def begin(self, task: Task) -> None:
        self.task, self.begun = task, time.monotonic()
        self.send(task.name, PREPARING)

    def send(self, message: Any, state: str) -> None:
        with suppress(ConnectionError):  # `_listen` notices a process that has died
            self.pipe.send(message)
        self.enter(state)

    def late(self, patience: float) -> float:
        """Return the seconds since the process should have answered, negative before."""
        if self.state not in ACTIVE:
            return float("-inf")
        estimate = {PREPARING: self.task and self.task.seconds, TIMING: self.task and self.task.alone}
        return time.monotonic() - self.since - patience - 3 * (estimate.get(self.state, patience) or 0)

    def printed(self) -> str:
        """Return the end of the output of the process."""
        with open(self.log.name, encoding="utf-8", errors="replace") as log:
            return log.read()[-1500:].strip()

    def end(self, hung: bool = False) -> str:
        """Kill the process and its children, one that `hung` after it has printed where; return how it ended."""
        if hung and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        for kill in (os.killpg, os.kill):  # the group exists once the process has created it
            with suppress(ProcessLookupError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join(5)  # a process inside the driver may take longer; it ends on its own
        status = self.process.exitcode
        return f"died of {signal.Signals(-status).name}" if (status or 0) < 0 else f"ended with status {status}"


class Pool:
    """Run tasks in up to `jobs` processes until all are done or `deadline`, on the clock of `time.time`.

    `choose` selects from all tasks. `note(task, None)` is called before a task begins, `note(task, result)` when it has
    ended, however it did. Running tasks need at most `memory` GiB of the device together.
    """

    def __init__(
        self,
        source: Source,
        choose: Callable[[list[Task]], list[Task]],
        note: Callable[[Task, Result | None], None],
        jobs: int,
        deadline: float = float("inf"),
        memory: float = float("inf"),
        patience: float = PATIENCE,
    ) -> None:
        self.source, self.choose, self.note = source, choose, note
        self.deadline, self.memory, self.patience = deadline, memory, patience
        self.pending: list[list[Task]] | None = None  # by group; None until a process has listed the tasks
        self.timing = False  # from when all processes are ready until all of them are timed
        self.workers = [Worker(source) for _ in range(jobs)]

    def run(self) -> None:
        """Run all chosen tasks.

        Raises:
            SystemExit: if no process can list them.
        """
        try:
            while (
                self.workers
                and self.left() > 0
                and (self.pending != [] or any(w.task or w.queue for w in self.workers))
            ):
                self._advance()
                self._listen()
        finally:
            for worker in self.workers:
                if worker.state in (PREPARING, READY, TIMING):
                    self._end(worker, {"not_reached": "the budget ended it"})
                elif worker.state == IDLE:
                    worker.send(None, IDLE)
            for worker in self.workers:
                worker.process.join(1 if worker.state == IDLE else 0)
                worker.end()
        why: Result = {"not_reached": "the budget was over"} if self.workers else {"error": "no process is left"}
        for task in chain(*(worker.queue for worker in self.workers), *(self.pending or [])):
            self.note(task, why)

    def left(self) -> float:
        return self.deadline - time.time()

    def _advance(self) -> None:
        """Give tasks to idle processes, or the device to one that is ready when no other process is active."""
        if not self.timing:
            for worker in self.workers:
                if worker.state == IDLE and (task := self._next(worker)) is not None:
                    self.note(task, None)
                    worker.begin(task)
        if not any(worker.state in ACTIVE for worker in self.workers):
            ready = [worker for worker in self.workers if worker.state == READY]
            self.timing = bool(ready)
            for worker in sorted(ready, key=lambda worker: worker.begun)[:1]:
                worker.send(None, TIMING)

    def _next(self, worker: Worker) -> Task | None:
        """Return the next task of an idle process, if device memory and budget allow one."""
        used = sum(other.task.memory for other in self.workers if other.task)
        while worker.queue or self.pending:
            if not worker.queue:
                fitting = [group for group in self.pending or [] if not used or used + group[0].memory <= self.memory]
                if not fitting:
                    return None
                worker.queue = fitting[0]
                self.pending = [group for group in self.pending or [] if group is not fitting[0]]
            task = worker.queue.pop(0)
            if task.seconds + task.alone <= self.left():
                return task
            self.note(task, {"not_reached": f"{self.left():.0f} s left, {task.seconds + task.alone:.0f} s needed"})
        return None

    def _listen(self) -> None:
        """Wait until a process answers, ends, or is late."""
        active = [worker for worker in self.workers if worker.state in ACTIVE]
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
        elif worker.state == STARTING:
            worker.enter(IDLE)
            if self.pending is None:
                chosen = enumerate(self.choose(message))
                self.pending = [[task for _, task in same] for _, same in groupby(chosen, lambda n: n[1].group or n[0])]
        else:
            result, lost = message
            self._end(worker, result)
            worker.enter(IDLE)
            if lost:
                self._replace(worker)

    def _end(self, worker: Worker, result: Result) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        output = {"printed": worker.printed()} if "error" in result else {}
        self.note(task, {"seconds": round(time.monotonic() - worker.begun, 2), **result, **output})

    def _replace(self, worker: Worker, error: str = "") -> None:
        """Replace a process that hung, died or lost the device; one that did not start is not replaced."""
        started, fate = worker.state != STARTING, worker.end(hung=bool(error))
        if worker.task is not None:
            self._end(worker, {"error": error or fate})
        self.workers.remove(worker)
        if started and (worker.queue or self.pending):
            self.workers.append(Worker(self.source, worker.queue))
        elif not started:
            print(f"a process {error or fate} at its start\n{worker.printed()}", flush=True)
            self.pending = [worker.queue, *(self.pending or [])] if worker.queue else self.pending
            if self.pending is None and not self.workers:
                raise SystemExit("no process can list the tasks")


def list_tasks(args: Namespace) -> Iterator[Task]:
    """Yield the tasks of the stages, named stage/name, limits first."""
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if args.no_pdl:
        import_module("weft.backends.torch.kernels.shared.launch").PDL_SINCE = (99, 0)
    for stage in [stage for stage in STAGES if stage in {"limits", *args.stages}]:
        for task in getattr(import_module(f".{STAGES[stage]}", __package__), f"list_{stage}")(args):
            yield replace(task, name=f"{stage}/{task.name}", group=task.group and f"{stage}/{task.group}")


def load_tasks(args: Namespace) -> list[Task]:
    """List the tasks in a process of the pool; on a CPU, speed up Triton's interpreter first."""
    if args.device == "cpu" and find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(str(ROOT))
        import_module("tests.interpreter").quicken(load=True)
    return [*list_tasks(args)]


def list_tests(args: Namespace) -> Iterator[Task]:
    """Yield every check of tests/gpu as FILE/CHECK-CASE-DTYPE; those of one case and dtype share a process."""
    os.environ["WEFT_DEVICE"] = args.device
    sys.path.append(str(ROOT / "tests/gpu"))
    for file, seconds in TESTS.items():
        try:
            module = import_module(f"test_{file}")
        except ImportError:  # a dependency of the file is missing, ONNX Runtime for example
            yield Task(f"{file}/import", partial(import_module, f"test_{file}"))  # reports the error
            continue
        for name, check in module.checks():
            group = f"{file}/{name.partition('-')[2]}"
            yield Task(f"{file}/{name}", partial(module.test_on_the_gpu, check), seconds, group=group)
