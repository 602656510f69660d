"""Static batches: all answers of a batch begin together; the next batch begins when the last answer has ended."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from ..arrays import Bools, Ints
from ..core.answers import Answer
from ..core.batch_context import BatchContext
from ..core.decoder import CachedDecoder
from .batch import Batch, draw_token


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
