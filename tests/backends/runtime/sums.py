"""A decoder in numpy whose next token is the sum of a row's tokens, modulo the vocabulary; it counts its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.backends.runtime.arrays import Ints
from weft.backends.runtime.core.batch_context import BatchContext
from weft.backends.runtime.core.decoder import CachedDecoder

VOCAB = 11


def continue_sums(prompt: Sequence[int], count: int) -> list[int]:
    """Return the next `count` tokens: each is the sum of all tokens before it, modulo the vocabulary."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


class SumContext(BatchContext):
    """The tokens of the rows are all that it caches; `calls` has (first row, tokens of each row) of prompt calls."""

    def __init__(self, batch: int, capacity: int, *, can_rewind: bool = True, padded: bool = True) -> None:
        super().__init__(batch, capacity, can_rewind=can_rewind, padded=padded, answers=False)
        self._scores = np.zeros((batch, VOCAB), np.float32)
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.steps: list[list[int]] = []
        self.closed = False

    @property
    def cache_bytes(self) -> int:
        return int(self._ids.nbytes)

    def close(self) -> None:
        self.closed = True

    def _score(self, row: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        past = int(self._ids[row, : self.lengths[row]].sum())
        return np.eye(VOCAB, dtype=np.float32)[(past + np.cumsum(tokens)) % VOCAB]

    def _clear_states(self) -> None: ...

    def _record_ends(self, first: int, last: Sequence[int]) -> None: ...

    def _run_tokens(
        self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool
    ) -> NDArray[Any]:
        self.calls.append((first, tuple(map(len, parts))))
        logits = np.full((len(parts), max(map(len, parts)), VOCAB), np.nan, np.float32)
        for i, part in enumerate(parts):
            logits[i, : len(part)] = self._score(first + i, part)
        return logits

    def _step(self, rows: Ints, tokens: Ints, first: int | None) -> None:
        self.steps.append(rows.tolist())
        for row, token in zip(rows, tokens, strict=True):
            self._scores[row] = self._score(row, [token])[0]

    def _clear_row(self, row: int) -> None: ...

    def _gather_rows(self, rows: Ints, used: int) -> None: ...

    def _copy_from(self, other: SumContext, used: int) -> None: ...


class SumDecoder(CachedDecoder[SumContext]):
    """A decoder on "cpu" whose contexts are `SumContext`s; `contexts` has all of them."""

    every_position = True

    def __init__(self, max_length: int = 1000, *, can_rewind: bool = True, start: int | None = None) -> None:
        super().__init__("cpu", VOCAB, max_length, start, max_source=9)
        self.can_rewind, self.padded, self.contexts = can_rewind, True, list[SumContext]()

    def new_context(self, batch: int, capacity: int) -> SumContext:
        self.contexts.append(SumContext(batch, capacity, can_rewind=self.can_rewind))
        return self.contexts[-1]
