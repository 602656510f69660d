"""Batch contexts: the tokens that each row of a batch has cached, and prefill and decode steps, for any executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ..arrays import Bools, Floats, Ints, float32
from .sampling import Sampler


class BatchContext(ABC):
    """A context of `batch` rows of at most `capacity` tokens; `lengths` counts the cached tokens of each row.

    `rewinds`: a row can drop its last tokens; `padded`: rows of a call may differ in length; `answers`: prompts are
    sources of an encoder, and the rows hold only the answers. Subclasses fill `_scores` [batch, vocab], the logits of
    each row's last token.
    """

    _scores: Floats

    def __init__(self, batch: int, capacity: int, *, rewinds: bool, padded: bool, answers: bool) -> None:
        self.capacity = capacity
        self.lengths: Ints = np.zeros(batch, np.int64)
        self._ids = np.zeros((batch, capacity), np.int64)  # the cached tokens
        self._intact = True  # no run was interrupted
        self._rewinds, self._padded, self._answers = rewinds, padded, answers

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes allocated for caches and states."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release device resources of this context, such as captured graphs; it must not be used afterwards."""

    def reset(self) -> None:
        """Empty every row."""
        self._clear()
        self._cut(0)
        self._intact = True

    def count_cached(self, prompt: Sequence[int]) -> int:
        """Return how many first tokens of `prompt` the single row has cached and may keep.

        Never all, because the last token must run for its logits. 0 for a source: the row then holds its answer.
        """
        length = int(self.lengths[0]) if self._intact and not self._answers else 0
        prefix = np.array(prompt[:-1][:length], np.int64)
        differ = np.flatnonzero(self._ids[0, : prefix.size] != prefix)
        common = int(differ[0]) if differ.size else prefix.size
        return common if common == length or self._rewinds else 0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Floats:
        """Restart every row with its prompt, at most `chunk` tokens a run; return the logits after it, [batch, vocab].

        Neighbouring prompts run together, right-padded, if they fit one chunk; only prompts of the same length run
        together where padding would enter states or rolling caches or compete for experts. A longer prompt runs alone,
        in its own part of the caches. If there are fewer prompts than rows, each is read once and copied to an equal
        number of neighbouring rows. In an encoder-decoder, prompts are sources, and the rows begin with the decoder's
        start token. `keep` is the number of tokens of its prompt that a single row keeps, see `count_cached`.

        The result is valid until the next call.
        """
        if keep:
            self._cut(keep)
        else:
            self.reset()
        prompts = self._begin(prompts)
        for first, end in _group_rows([len(prompt) for prompt in prompts], chunk, padded=self._padded):
            group = prompts[first:end]
            runs = [group] if len(group) > 1 else [[part] for part in parts(group[0][keep:], chunk)]
            # States to be kept stay on their side of the double buffer.
            if not keep:
                self._ready(len(runs))
            for run in runs:
                logits = self._extend(first, run)
            for row, part in enumerate(run):
                float32(logits[row, min(len(part), logits.shape[1]) - 1], self._scores[first + row])
        self._end(prompts)
        if len(prompts) < self.lengths.size:
            rows = np.repeat(np.arange(len(prompts)), self.lengths.size // len(prompts))
            self.gather(rows)
            self._scores[:] = self._scores[rows]
        return self._scores

    def extend(self, tokens: Sequence[int]) -> Floats:
        """Append `tokens` to the single row in one run; return the logits, [seq, vocab] or of the last token only,
        [1, vocab], depending on the model."""
        logits: NDArray[Any] = self._extend(0, [tokens], every=True)[0]
        return float32(logits, np.empty(logits.shape, np.float32))

    def extend_all(self, given: Sequence[Sequence[int]]) -> list[Floats]:
        """Append its part to every row; return the logits of all new tokens, [len(part), vocab] per row.

        A row whose part is empty is unchanged. Requires a model with logits of every position whose rows can be padded
        and rewound. The longest part must fit after the longest row.
        """
        resting = np.array([not part for part in given])
        self.lengths[resting] -= 1  # resting rows repeat their last token
        parts = [part or [int(self._ids[row, self.lengths[row]])] for row, part in enumerate(given)]
        logits = self._extend(0, parts, every=True)
        return [np.array(logits[row, : len(part)], np.float32) for row, part in enumerate(given)]

    def rewind(self, lengths: Ints | int) -> None:
        """Cut every row to its first `lengths` tokens, at least one."""
        self._cut(lengths)
        self._end([self._ids[row, :length].tolist() for row, length in enumerate(self.lengths)])

    def step(self, tokens: Sequence[int] | Ints, active: Bools | None = None) -> Floats:
        """Append a token to every row where `active` (default: all); return the logits after it, [batch, vocab].

        Inactive rows repeat their last step: caches are unchanged, but states advance, so only rows without states can
        be resumed. The result is valid until the next call.
        Raises WeftError when a row's cache is full.
        """
        rows = np.arange(self.lengths.size) if active is None else np.flatnonzero(active)
        row_tokens = np.asarray(tokens, np.int64)[rows]
        self._check_room(rows)
        # An interrupt before the end leaves caches half written: `count_cached` then returns 0.
        self._intact = False
        self._step(rows, row_tokens)
        self._append(rows, row_tokens)
        self._intact = True
        return self._scores

    # -- single rows that join and leave, while the others are unchanged

    def vacate(self, row: int) -> None:
        """Empty one row."""
        self._vacate(row)
        self.lengths[row] = 0

    def append(self, first: int, parts: Sequence[Sequence[int]]) -> Floats:
        """Append one part to each row from `first` on; return the logits after each part, [len(parts), vocab].

        If there are several parts, their rows must be empty, and the parts of equal length unless rows can be padded.
        """
        self._enter(first, len(parts))
        logits = self._extend(first, parts)
        ends = [min(len(part), logits.shape[1]) - 1 for part in parts]
        scores = np.stack([float32(logits[row, end], self._row()) for row, end in enumerate(ends)])
        self._leave(first, [part[-1] for part in parts])
        return scores

    def step_first(self, tokens: Ints) -> Floats:
        """Append a token to each of the first len(tokens) rows and compute only these rows.

        Return the logits after it, [len(tokens), vocab], valid until the next call. Raises WeftError when a row's cache
        is full.
        """
        rows = np.arange(tokens.size)
        self._check_room(rows)
        self._intact = False
        self._step_first(tokens)
        self._append(rows, tokens)
        self._intact = True
        return self._scores[: tokens.size]

    def move(self, row: int, to: int) -> None:
        """Copy the contents of `row` to row `to`."""
        self._move(row, to, int(self.lengths[row]))
        self.lengths[to], self._ids[to] = self.lengths[row], self._ids[row]

    def _row(self) -> Floats:
        return np.empty(self._scores.shape[1], np.float32)

    def drawing(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function that appends a token to the active rows, as `step` does, and draws the next tokens on the
        device as `samplers` would; None if the host must draw."""
        return None

    def gather(self, rows: Ints) -> None:
        """Copy the contents of row `rows[r]` to every row r: tokens, caches, states and source."""
        self._gather(rows, int(self.lengths.max()))
        self.lengths[:], self._ids[:] = self.lengths[rows], self._ids[rows]

    def take(self, other: Self) -> None:
        """Copy the contents of `other`, a context with the same number of rows and at most this capacity."""
        used = int(other.lengths.max())
        self._take(other, used)
        self.lengths[:], self._intact = other.lengths, other._intact
        self._ids[:, :used] = other._ids[:, :used]

    def _check_room(self, rows: Ints) -> None:
        if rows.size and int(self.lengths[rows].max()) >= self.capacity:
            raise WeftError(f"the cache is full: it holds {self.capacity} tokens a row")

    def _append(self, rows: Ints, tokens: Ints) -> None:
        """Record that each of `rows` has cached its token."""
        self._ids[rows, self.lengths[rows]] = tokens
        self.lengths[rows] += 1

    def _extend(self, first: int, parts: Sequence[Sequence[int]], every: bool = False) -> NDArray[Any]:
        """Append one part to each row from `first` on; return the logits that `_call` returns."""
        past = self.lengths[first : first + len(parts)]
        total = past + np.array([len(part) for part in parts])
        if int(total.max()) > self.capacity:
            raise WeftError(f"{int(total.max())} tokens do not fit the cache of {self.capacity} tokens a row")
        self._intact = False
        logits = self._call(first, parts, past, total, every)
        for row, (part, at) in enumerate(zip(parts, past.tolist(), strict=True), first):
            self._ids[row, at : at + len(part)] = part
        self.lengths[first : first + len(parts)] = total
        self._intact = True
        return logits

    # -- implemented by executors

    @abstractmethod
    def _clear(self) -> None:
        """Reset the recurrent states to those at the start of a sequence."""

    def _cut(self, lengths: Ints | int) -> None:
        """Cut every row to its first `lengths` tokens."""
        self.lengths[:] = lengths

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Encode prompts that are sources; return the tokens that the rows begin with."""
        return prompts

    @abstractmethod
    def _ready(self, calls: int) -> None:
        """Prepare for `calls` calls that read prompts into empty rows."""

    @abstractmethod
    def _end(self, prompts: Sequence[Sequence[int]]) -> None:
        """Record the last tokens of `prompts`, which the first rows hold: an idle row repeats its last token."""

    @abstractmethod
    def _call(self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool) -> NDArray[Any]:
        """Run one part for each row from `first` on; rows hold `past` tokens before and `total` after.

        Return logits on the host [rows, seq or 1, vocab], valid until the next call: of all tokens if `every` and the
        model returns them; otherwise possibly of the last token of each row only.
        """

    @abstractmethod
    def _step(self, rows: Ints, tokens: Ints) -> None:
        """Append its token to each of `rows` while the others repeat their last step; write logits to `_scores`."""

    @abstractmethod
    def _step_first(self, tokens: Ints) -> None:
        """Append a token to each of the first rows; write their logits to `_scores`."""

    @abstractmethod
    def _vacate(self, row: int) -> None:
        """Reset the recurrent states of one row to those at the start of a sequence."""

    @abstractmethod
    def _move(self, row: int, to: int, used: int) -> None:
        """Copy the contents of `row`, `used` tokens, to row `to`."""

    def _enter(self, first: int, rows: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare for a call of `rows` rows from `first` on without the others."""

    @abstractmethod
    def _leave(self, first: int, last: Sequence[int]) -> None:
        """Record the `last` tokens of the rows from `first` on, called without the others: idle rows repeat them."""

    @abstractmethod
    def _gather(self, rows: Ints, used: int) -> None:
        """Copy the contents of row `rows[r]`, at most `used` tokens, to every row r."""

    @abstractmethod
    def _take(self, other: Self, used: int) -> None:
        """Copy the contents of `other`, at most `used` tokens a row."""


def parts(prompt: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """Split `prompt` into pieces of at most `chunk` tokens."""
    return (prompt[at : at + chunk] for at in range(0, len(prompt), chunk))


def _group_rows(lengths: Sequence[int], chunk: int, padded: bool) -> Iterator[tuple[int, int]]:
    """Yield (first row, end) of groups of neighbours that fit `chunk` tokens together, at least one row each.

    If `padded`, rows of a group are padded to the longest; otherwise only neighbours of equal length form a group.
    """
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        splits = longest * (row + 1 - first) > chunk or not (padded or length == lengths[first])
        if row > first and splits:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)
