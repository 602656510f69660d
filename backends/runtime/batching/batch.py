"""The interface of batches, and static batches, in which all answers begin together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np

from weft.ir.errors import WeftError

from ..arrays import Bools, Floats, Ints
from ..core.answers import Answer
from ..core.batch_context import BatchContext
from ..core.decoder import CachedDecoder
from ..core.sampler import check_count


class Batch(ABC):
    """Answers that one decoder decodes together, at most `most` at a time; further answers wait in order of joining. An
    answer leaves the batch when its `result.finish` is set, or its own `error` (by NaN logits, for example). An error
    of a model call concerns all answers: `advance` raises it, and `close` must be called before its next use."""

    def __init__(self, decoder: CachedDecoder[Any], most: int) -> None:
        check_count("most", most)
        self.decoder, self.most = decoder, most
        self.waiting: deque[Answer] = deque()
        self.read_tokens = 0  # prompt tokens read so far; a resumed answer counts again
        self.drafted_tokens = self.accepted_tokens = 0  # of prompt look-up

    @property
    @abstractmethod
    def active(self) -> list[Answer]:
        """Return the answers that have a batch row and have not ended, in row order; waiting answers have none."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.active)

    def join(self, answer: Answer) -> None:
        """Add an answer to the end of the queue; it gets a batch row as soon as the kind of batch allows."""
        self.waiting.append(answer)

    @abstractmethod
    def leave(self, answer: Answer) -> None:
        """Remove an answer before it has ended; do nothing if it is not in the batch."""

    @abstractmethod
    def advance(self) -> list[Answer]:
        """Run prompt tokens of new answers, then at most one decode step; return the answers that got a token or an
        error. Answers that ended leave the batch."""

    @abstractmethod
    def close(self) -> None:
        """Empty the batch and release the caches; the batch may be used again."""


def draw_token(answer: Answer, logits: Floats) -> bool:
    """Draw the next token of `answer` from `logits` [vocab]; return whether the answer continues. A WeftError is not
    raised but stored as the answer's `error`."""
    try:
        answer.draw_token(logits)
    except WeftError as error:
        answer.error = error
    return answer.error is None and answer.result.finish is None


class StaticBatch(Batch):
    """A batch for encoder-decoders: an answer cannot join a running batch, as the encoder reads all sources at once."""

    def __init__(self, decoder: CachedDecoder[Any], most: int) -> None:
        super().__init__(decoder, most)
        self._rows: list[Answer] = []
        self._tokens: Ints = np.zeros(0, np.int64)
        self._continues: Bools = np.zeros(0, np.bool_)
        self._lease = ExitStack()
        self._context: BatchContext | None = None

    @property
    def active(self) -> list[Answer]:
        return [answer for answer, going in zip(self._rows, self._continues, strict=True) if going]

    def leave(self, answer: Answer) -> None:
        if answer in self.waiting:
            self.waiting.remove(answer)
        if answer in self._rows:
            self._continues[self._rows.index(answer)] = False
        if not self._continues.any():
            self._release_context()

    def advance(self) -> list[Answer]:
        if not self._rows:
            return self._begin_batch() if self.waiting else []
        assert self._context is not None
        return self._draw_tokens(self._context.step(self._tokens, self._continues))

    def close(self) -> None:
        self.waiting.clear()
        self._release_context()

    def _begin_batch(self) -> list[Answer]:
        decoder = self.decoder
        self._rows = [self.waiting.popleft() for _ in range(min(self.most, len(self.waiting)))]
        self._continues, self._tokens = np.ones(len(self._rows), np.bool_), np.zeros(len(self._rows), np.int64)
        prompts = [answer.result.prompt for answer in self._rows]
        most = max(len(answer.begin) + answer.limit - 1 for answer in self._rows)
        self._context = self._lease.enter_context(decoder.context(len(prompts), most))
        self.read_tokens += sum(map(len, prompts))
        return self._draw_tokens(self._context.prefill(prompts, decoder.chunk))

    def _draw_tokens(self, scores: Any) -> list[Answer]:
        rows = np.flatnonzero(self._continues).tolist()
        for at in rows:
            self._continues[at] = draw_token(self._rows[at], scores[at])
            if self._rows[at].error is None:
                self._tokens[at] = self._rows[at].result.tokens[-1]
        changed = [self._rows[at] for at in rows]
        if not self._continues.any():
            self._release_context()
        return changed

    def _release_context(self) -> None:
        self._rows, self._continues, self._context = [], np.zeros(0, np.bool_), None
        self._lease.close()
