"""The thread that owns the model: it accepts jobs, runs them in batches, and sends their results."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Condition, Thread

from weft.backends.runtime.batching import Batch, new_batch
from weft.backends.runtime.core.answers import Answer
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.ir.errors import WeftError

from .jobs import AnswerPiece, Job, JobError, QueueFull, ServerClosing
from .metrics import Metrics

_log = logging.getLogger("weft.serve")


class Worker(ABC):
    """A queue of jobs, run in order of arrival by one thread; at most `max_waiting` jobs wait for the model.

    Jobs are submitted and cancelled in the event loop that reads their channels.
    """

    def __init__(self, max_waiting: int, metrics: Metrics) -> None:
        self.metrics, self.max_waiting = metrics, max_waiting
        self._changed = Condition()
        self._new: list[Job] = []
        self._cancelled: list[Job] = []
        self._draining = self._ended = False
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.add_gauge("weft_running", "Answers that the model is working on.", lambda: self.n_running)
        metrics.add_gauge("weft_waiting", "Answers that wait for the model.", lambda: self.n_waiting)

    @property
    @abstractmethod
    def n_running(self) -> int:
        """Return the number of jobs that the model is working on."""

    @property
    @abstractmethod
    def n_waiting(self) -> int:
        """Return the number of jobs that wait."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread, which sends pieces to channels in the event loop `loop`."""
        self._loop = loop
        self._thread = Thread(target=self._run, name="weft-serve", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all `jobs`; raise QueueFull if too many wait, ServerClosing if the server shuts down."""
        with self._changed:
            self.check_room(len(jobs))
            self._new += jobs
            self._changed.notify()

    def check_room(self, jobs: int) -> None:
        """Raise QueueFull if a nonempty queue lacks room for `jobs` more jobs, ServerClosing during a shutdown."""
        if self._draining:
            raise ServerClosing("The server is shutting down.")
        # A request for any number of answers is accepted if the queue is empty.
        if self.n_waiting and self.n_waiting + jobs > self.max_waiting:
            raise QueueFull(f"The queue of this server is full: {self.n_waiting} answers wait. Try again later.")

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Have the thread drop `jobs` before its next step; jobs that have ended already are ignored."""
        with self._changed:
            self._cancelled += jobs
            self._changed.notify()

    def drain(self) -> None:
        """Reject new and waiting jobs; running jobs continue."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def stop(self) -> None:
        """End all jobs and the thread."""
        with self._changed:
            self._draining = self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        draining = False
        while True:
            with self._changed:
                while not (
                    self.n_running or self.n_waiting or self._cancelled or self._ended or self._draining != draining
                ):
                    self._changed.wait()
                new, to_cancel, self._new, self._cancelled = self._new, self._cancelled, [], []
                ended, draining = self._ended, self._draining
            self._admit(new)
            self._drop(to_cancel)
            if draining or ended:
                self._end_jobs(ServerClosing("The server is shutting down."), running=ended)
            if ended:
                return
            try:
                self._run_step()
            except Exception as error:  # the model failed on these jobs; the next request may succeed
                is_weft_error = isinstance(error, WeftError)
                _log.error("the model failed: %s", error if is_weft_error else f"{type(error).__name__}: {error}")
                self._end_jobs(JobError("The model failed."))

    def _send(self, pieces: Sequence[tuple[Job, AnswerPiece]]) -> None:
        if not pieces:
            return
        assert self._loop is not None

        def deliver() -> None:
            for job, piece in pieces:
                job.channel.put(piece)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed, so there is no reader
            self._ended = True

    @abstractmethod
    def _admit(self, jobs: Sequence[Job]) -> None:
        """Start new jobs."""

    @abstractmethod
    def _drop(self, jobs: Sequence[Job]) -> None:
        """Drop waiting and running jobs of `jobs`; ignore jobs that have ended."""

    @abstractmethod
    def _end_jobs(self, error: JobError, running: bool = True) -> None:
        """End all jobs with `error`; unless `running`, only jobs that have not started."""

    @abstractmethod
    def _run_step(self) -> None:
        """Do one step of work for the running jobs."""


class DecodingWorker(Worker):
    """A worker of a language model, which decodes at most `max_rows` answers of it, and of each adapter, together."""

    def __init__(self, model: Generator, max_rows: int, max_waiting: int, metrics: Metrics, prompt_lookup: int) -> None:
        super().__init__(max_waiting, metrics)
        prefixes = model.prefixes
        self._batches = batches = {
            name: new_batch(m.decoder, max_rows, prefixes=prefixes, prompt_lookup=prompt_lookup)
            for name, m in {"": model, **model.adapters}.items()
        }
        rows = batches.values()
        for name, help, read in (
            ("prefix_hits", "Prompts that began with stored caches.", lambda: prefixes.hits),
            ("prefix_tokens", "Tokens of prompts whose caches were stored.", lambda: prefixes.tokens),
            ("drafted_tokens", "Tokens drafted by prompt look-up.", lambda: sum(b.drafted_tokens for b in rows)),
            ("accepted_tokens", "Drafted tokens that were right.", lambda: sum(b.accepted_tokens for b in rows)),
        ):
            metrics.add_gauge(f"weft_{name}_total", help, read, "counter")
        metrics.add_gauge("weft_prefix_bytes", "Size of the stored caches.", lambda: prefixes.nbytes)
        self._jobs: dict[Answer, Job] = {}

    @property
    def n_running(self) -> int:
        return sum(len(batch.active) for batch in self._batches.values())

    @property
    def n_waiting(self) -> int:
        return sum(len(batch.waiting) for batch in self._batches.values()) + len(self._new)

    def _admit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            assert job.answer is not None
            self._jobs[job.answer] = job
            self._batches[job.adapter].join(job.answer)

    def _drop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.answer in self._jobs:
                del self._jobs[job.answer]
                self._batches[job.adapter].leave(job.answer)
                with self.metrics.lock:
                    self.metrics.answers.add(1, "cancelled")

    def _end_jobs(self, error: JobError, running: bool = True) -> None:
        waiting = [a for batch in self._batches.values() for a in batch.waiting if not a.result.tokens]
        answers = list(self._jobs) if running else waiting
        jobs = [self._jobs.pop(answer) for answer in answers]
        for answer, job in zip(answers, jobs, strict=True):
            self._batches[job.adapter].leave(answer)
        with self.metrics.lock:
            self.metrics.answers.add(len(jobs), "failed")
        self._send([(job, AnswerPiece(job.index, error=error)) for job in jobs])
        for batch in self._batches.values() if running else ():
            batch.close()

    def _run_step(self) -> None:
        for batch in self._batches.values():
            if len(batch):
                self._advance(batch)

    def _advance(self, batch: Batch) -> None:
        n_read_before = batch.read_tokens
        updated = batch.advance()
        now, pieces, metrics = time.monotonic(), [], self.metrics
        with metrics.lock:
            metrics.prompt_tokens.add(batch.read_tokens - n_read_before)
            if updated:
                metrics.batch.observe(len(updated))
            for answer in updated:
                job, result = self._jobs[answer], answer.result
                if result.tokens and not job.n_tokens:
                    metrics.first_token.observe(now - job.start_time)
                # A step that completes a prompt generates two tokens: the first one, and that of the decode step.
                metrics.generated_tokens.add(len(result.tokens) - job.n_tokens)
                job.n_tokens = len(result.tokens)
                if (piece := job.next_piece()) is not None:
                    pieces.append((job, piece))
                if result.finish is not None or answer.error is not None:
                    state = "failed" if answer.error else "length" if result.finish == "length" else "stop"
                    metrics.answers.add(1, state)
                    metrics.answer_time.observe(now - job.start_time)
                    del self._jobs[answer]
                    if answer.error is not None:
                        _log.error("an answer failed: %s", answer.error)
        self._send(pieces)


class EncodingWorker(Worker):
    """A worker of an encoder, which computes embeddings or head logits of at most `max_batch` inputs together."""

    def __init__(self, model: EncoderModel, max_batch: int, max_waiting: int, metrics: Metrics) -> None:
        super().__init__(max_waiting, metrics)
        self._model, self._max_batch = model, max_batch
        self._queue: list[Job] = []
        self._working = 0

    @property
    def n_running(self) -> int:
        return self._working

    @property
    def n_waiting(self) -> int:
        return len(self._queue) + len(self._new)

    def _admit(self, jobs: Sequence[Job]) -> None:
        self._queue += jobs

    def _drop(self, jobs: Sequence[Job]) -> None:
        cancelled = set(map(id, jobs))
        self._queue = [job for job in self._queue if id(job) not in cancelled]

    def _end_jobs(self, error: JobError, running: bool = True) -> None:
        jobs, self._queue, self._working = self._queue, [], 0
        self._send([(job, AnswerPiece(job.index, error=error)) for job in jobs])

    def _run_step(self) -> None:
        if not self._queue:
            return
        is_scored = self._queue[0].encoded is not None
        jobs = [*itertools.takewhile(lambda j: (j.encoded is not None) == is_scored, self._queue[: self._max_batch])]
        self._working = len(jobs)
        inputs = [job.encoded for job in jobs if job.encoded is not None]
        ids = [job.ids for job in jobs]
        results = self._model.logits(inputs) if is_scored else self._model.encode(ids, batch=self._max_batch)
        del self._queue[: len(jobs)]
        self._working, now = 0, time.monotonic()
        with self.metrics.lock:
            self.metrics.batch.observe(len(jobs))
            self.metrics.prompt_tokens.add(sum(map(len, ids)))
            self.metrics.answers.add(len(jobs), "stop")
            for job in jobs:
                self.metrics.answer_time.observe(now - job.start_time)
        self._send([(job, AnswerPiece(job.index, value=vector)) for job, vector in zip(jobs, results, strict=True)])
