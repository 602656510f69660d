"""A decoder in numpy whose next token is the sum of a row's tokens, modulo the vocabulary; it counts its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.backends.runtime.arrays import Ints
from weft.backends.runtime.core.batch_context import BatchContext
from weft.backends.runtime.core.decoder import CachedDecoder

VOCAB, WIDTH = 11, 1024


def continue_sums(prompt: Sequence[int], count: int) -> list[int]:
    """Return the next `count` tokens: each is the sum of all tokens before it, modulo the vocabulary."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


class SumContext(BatchContext):
    """A context that caches the tokens of its rows, a slot each, or if it cannot rewind their sums; `calls` has (first
    row, tokens of each row) of prompt calls."""

    def __init__(self, batch: int, capacity: int, *, can_rewind: bool = True, padded: bool = True) -> None:
        super().__init__(batch, capacity, can_rewind=can_rewind, padded=padded, answers=False)
        self._scores = np.zeros((batch, VOCAB), np.float32)
        self.slots, self.sums = np.zeros((batch, 1, capacity, WIDTH), np.int64), np.zeros((batch, 1), np.int64)
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.steps: list[list[int]] = []
        self.closed = False

    @property
    def cache_bytes(self) -> int:
        return int(self._ids.nbytes)

    def close(self) -> None:
        self.closed = True

    def _run(self, row: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        past = int(self.lengths[row])
        total = int(self.slots[row, 0, :past, 0].sum() if self._can_rewind else self.sums[row, 0])
        self.slots[row, 0, past : past + len(tokens)] = np.array(tokens)[:, None]
        self.sums[row] += sum(tokens)
        return np.eye(VOCAB, dtype=np.float32)[(total + np.cumsum(tokens)) % VOCAB]

    def _clear_states(self) -> None:
        self.sums[:] = 0

    def _record_ends(self, first: int, last: Sequence[int]) -> None: ...

    def _run_tokens(
        self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool
    ) -> NDArray[Any]:
        self.calls.append((first, tuple(map(len, parts))))
        logits = np.full((len(parts), max(map(len, parts)), VOCAB), np.nan, np.float32)
        for i, part in enumerate(parts):
            logits[i, : len(part)] = self._run(first + i, part)
        return logits

    def _step(self, rows: Ints, tokens: Ints, first: int | None) -> None:
        self.steps.append(rows.tolist())
        for row, token in zip(rows, tokens, strict=True):
            self._scores[row] = self._run(row, [token])[0]

    def _clear_row(self, row: int) -> None:
        self.sums[row] = 0

    @contextmanager
    def _open_tensors(self, row: int) -> Iterator[Sequence[tuple[Any, bool]]]:
        yield [(self.slots, True)] if self._can_rewind else [(self.sums, False)]

    def _gather_rows(self, rows: Ints, used: int) -> None:
        self.slots[:], self.sums[:] = self.slots[rows], self.sums[rows]

    def _copy_from(self, other: SumContext, used: int) -> None:
        self.slots[:, :, :used], self.sums = other.slots[:, :, :used], other.sums.copy()


class SumDecoder(CachedDecoder[SumContext]):
    """A decoder on "cpu" whose contexts are `SumContext`s; `contexts` has all of them."""

    every_position = True

    def __init__(self, max_length: int = 1000, *, can_rewind: bool = True, start: int | None = None) -> None:
        super().__init__("cpu", VOCAB, max_length, start, max_source=9)
        self.can_rewind, self.padded, self.contexts = can_rewind, True, list[SumContext]()

    def new_context(self, batch: int, capacity: int) -> SumContext:
        self.contexts.append(SumContext(batch, capacity, can_rewind=self.can_rewind))
        return self.contexts[-1]
