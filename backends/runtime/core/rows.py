"""The rows of a batch in use, whatever computes them: which tokens each holds, and how prompts get there."""

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
    """`batch` rows of at most `capacity` tokens; `lengths` counts those that each holds.

    `rewinds`: a row can go back to fewer tokens; `padded`: rows of a call may differ in length; `answers`: prompts are
    sources, which the rows do not hold. What computes fills `_scores` [batch, vocab], the logits of each row's last
    token.
    """

    _scores: Floats

    def __init__(self, batch: int, capacity: int, *, rewinds: bool, padded: bool, answers: bool) -> None:
        self.capacity = capacity
        self.lengths: Ints = np.zeros(batch, np.int64)
        self._ids = np.zeros((batch, capacity), np.int64)  # the tokens held
        self._whole = True  # no run was interrupted
        self._rewinds, self._padded, self._answers = rewinds, padded, answers

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes allocated for caches and states."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what the device holds for this context alone; it is not used again."""

    def reset(self) -> None:
        """Empty every row."""
        self._clear()
        self._cut(0)
        self._whole = True

    def held(self, prompt: Sequence[int]) -> int:
        """Return the number of first tokens of `prompt` that the single row has cached and may keep; never all, as the
        last gives the logits.

        None of a source: what is held then is its answer.
        """
        past = int(self.lengths[0]) if self._whole and not self._answers else 0
        known = np.array(prompt[:-1][:past], np.int64)
        differ = np.flatnonzero(self._ids[0, : known.size] != known)
        common = int(differ[0]) if differ.size else known.size
        return common if common == past or self._rewinds else 0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Floats:
        """Start every row anew with its prompt, at most `chunk` tokens a run; the logits after each, [batch, vocab].

        Neighbours run together, padded on the right, as far as they fit one chunk; without padding, hence of one
        length, where it would enter states or rolling caches or compete with tokens. A longer prompt runs alone, in its
        own part of the caches. Prompts fewer than rows are spread: each is read once and copied to as many neighbouring
        rows. Behind an encoder the prompts are sources, and the rows begin with its start token. `keep` says how many
        tokens of its prompt a single row keeps, see `held`.

        The result is valid until the next call.
        """
        if keep:
            self._cut(keep)
        else:
            self.reset()
        prompts = self._begin(prompts)
        for first, end in _groups([len(prompt) for prompt in prompts], chunk, padded=self._padded):
            group = prompts[first:end]
            runs = [group] if len(group) > 1 else [[part] for part in parts(group[0][keep:], chunk)]
            # Kept states are in use; they stay on their side of the memory.
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
        """Append `tokens` to the one row in one run: the logits as the model gives them, [seq or 1, vocab]."""
        logits: NDArray[Any] = self._extend(0, [tokens], every=True)[0]
        return float32(logits, np.empty(logits.shape, np.float32))

    def extend_all(self, given: Sequence[Sequence[int]]) -> list[Floats]:
        """Append its part to every row: the logits of all its tokens, [len(part), vocab] for each.

        A row whose part is empty stays as it is. Only for models that give logits of every position, in rows that can
        be padded and rewound. The longest part must fit behind the longest row.
        """
        resting = np.array([not part for part in given])
        self.lengths[resting] -= 1  # their last token is repeated
        parts = [part or [int(self._ids[row, self.lengths[row]])] for row, part in enumerate(given)]
        logits = self._extend(0, parts, every=True)
        return [np.array(logits[row, : len(part)], np.float32) for row, part in enumerate(given)]

    def rewind(self, lengths: Ints | int) -> None:
        """Every row with its first `lengths` tokens only, one at least."""
        self._cut(lengths)
        self._end([self._ids[row, :length].tolist() for row, length in enumerate(self.lengths)])

    def step(self, tokens: Sequence[int] | Ints, active: Bools | None = None) -> Floats:
        """Append a token to every row where `active`, all by default: the logits after it, [batch, vocab].

        The other rows repeat their last step: caches stay as they are, but states go on, so that only a row of caches
        can be taken up again. The result is valid until the next call.
        Raises WeftError when a row's cache is full.
        """
        rows = np.arange(self.lengths.size) if active is None else np.flatnonzero(active)
        row_tokens = np.asarray(tokens, np.int64)[rows]
        self._check_room(rows)
        # An interrupt between here and the end leaves caches half written: `held` then keeps nothing of them.
        self._whole = False
        self._step(rows, row_tokens)
        self._append(rows, row_tokens)
        self._whole = True
        return self._scores

    # -- rows that come and go, while the others stay as they are

    def vacate(self, row: int) -> None:
        """Empty one row."""
        self._vacate(row)
        self.lengths[row] = 0

    def append(self, first: int, parts: Sequence[Sequence[int]]) -> Floats:
        """Append one part to each of the rows from `first` on: the logits after each, [len(parts), vocab].

        Several rows must be empty before, and their parts of one length unless rows can be padded.
        """
        self._enter(first, len(parts))
        logits = self._extend(first, parts)
        ends = [min(len(part), logits.shape[1]) - 1 for part in parts]
        scores = np.stack([float32(logits[row, end], self._row()) for row, end in enumerate(ends)])
        self._leave(first, [part[-1] for part in parts])
        return scores

    def step_first(self, tokens: Ints) -> Floats:
        """Append a token to each of the first len(tokens) rows, which alone are computed: the logits after it,
        [len(tokens), vocab], valid until the next call. Raises WeftError when a row's cache is full."""
        rows = np.arange(tokens.size)
        self._check_room(rows)
        self._whole = False
        self._step_first(tokens)
        self._append(rows, tokens)
        self._whole = True
        return self._scores[: tokens.size]

    def move(self, row: int, to: int) -> None:
        """Let row `to` continue what `row` holds."""
        self._move(row, to, int(self.lengths[row]))
        self.lengths[to], self._ids[to] = self.lengths[row], self._ids[row]

    def _row(self) -> Floats:
        return np.empty(self._scores.shape[1], np.float32)

    def drawing(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function that appends a token to the active rows, as `step` does, and samples the next ones as
        `samplers` would; None if the host must."""
        return None

    def gather(self, rows: Ints) -> None:
        """Row r continues what row `rows[r]` holds: its tokens, caches, states and source."""
        self._gather(rows, int(self.lengths.max()))
        self.lengths[:], self._ids[:] = self.lengths[rows], self._ids[rows]

    def take(self, other: Self) -> None:
        """Hold what `other`, a context of as many rows and of no larger capacity, holds."""
        used = int(other.lengths.max())
        self._take(other, used)
        self.lengths[:], self._whole = other.lengths, other._whole
        self._ids[:, :used] = other._ids[:, :used]

    def _check_room(self, rows: Ints) -> None:
        if rows.size and int(self.lengths[rows].max()) >= self.capacity:
            raise WeftError(f"the cache is full: it holds {self.capacity} tokens a row")

    def _append(self, rows: Ints, tokens: Ints) -> None:
        """Note that each of `rows` holds its token."""
        self._ids[rows, self.lengths[rows]] = tokens
        self.lengths[rows] += 1

    def _extend(self, first: int, parts: Sequence[Sequence[int]], every: bool = False) -> NDArray[Any]:
        """Append one part to each of the rows from `first` on: what `_call` returns."""
        past = self.lengths[first : first + len(parts)]
        total = past + np.array([len(part) for part in parts])
        if int(total.max()) > self.capacity:
            raise WeftError(f"{int(total.max())} tokens do not fit the cache of {self.capacity} tokens a row")
        self._whole = False
        logits = self._call(first, parts, past, total, every)
        for row, (part, at) in enumerate(zip(parts, past.tolist(), strict=True), first):
            self._ids[row, at : at + len(part)] = part
        self.lengths[first : first + len(parts)] = total
        self._whole = True
        return logits

    # -- what computes

    @abstractmethod
    def _clear(self) -> None:
        """Let what is carried from call to call be as at the start of a text."""

    def _cut(self, lengths: Ints | int) -> None:
        """Every row with its first `lengths` tokens only."""
        self.lengths[:] = lengths

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the tokens that the rows begin with for these prompts, after encoding prompts that are sources."""
        return prompts

    @abstractmethod
    def _ready(self, calls: int) -> None:
        """Empty rows are about to be read in so many calls."""

    @abstractmethod
    def _end(self, prompts: Sequence[Sequence[int]]) -> None:
        """The first rows hold `prompts`: to repeat their last step is to append the last tokens of those again."""

    @abstractmethod
    def _call(self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool) -> NDArray[Any]:
        """Run one part for each of the rows from `first` on, which hold `past` tokens before and `total` after.

        Logits on the host [rows, seq or 1, vocab], valid until the next call: those of all tokens if `every` and the
        model gives them; otherwise perhaps the last of each row alone.
        """

    @abstractmethod
    def _step(self, rows: Ints, tokens: Ints) -> None:
        """Append its token to each of `rows`, while the others repeat their last step; the logits go to `_scores`."""

    @abstractmethod
    def _step_first(self, tokens: Ints) -> None:
        """Append a token to each of the first rows; the logits go to `_scores`."""

    @abstractmethod
    def _vacate(self, row: int) -> None:
        """Let what one row carries from call to call be as at the start of a text."""

    @abstractmethod
    def _move(self, row: int, to: int, used: int) -> None:
        """Let row `to` continue what `row` holds, `used` tokens."""

    def _enter(self, first: int, rows: int) -> None:  # noqa: B027 - most have nothing to prepare
        """So many rows from `first` on are about to be called without the others."""

    @abstractmethod
    def _leave(self, first: int, last: Sequence[int]) -> None:
        """Rows from `first` on were called without the others: to repeat their last step is to append `last` again."""

    @abstractmethod
    def _gather(self, rows: Ints, used: int) -> None:
        """Row r continues what row `rows[r]` holds, `used` tokens at most."""

    @abstractmethod
    def _take(self, other: Self, used: int) -> None:
        """Hold what `other` holds, `used` tokens a row at most."""


def parts(prompt: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """`prompt` in pieces of at most `chunk` tokens."""
    return (prompt[at : at + chunk] for at in range(0, len(prompt), chunk))


def _groups(lengths: Sequence[int], chunk: int, padded: bool) -> Iterator[tuple[int, int]]:
    """First row and end of each run of neighbours that fit `chunk` tokens together, one at least; when `padded` to the
    longest, otherwise only neighbours of one length."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        apart = longest * (row + 1 - first) > chunk or not (padded or length == lengths[first])
        if row > first and apart:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)
