"""Batch contexts: the tokens that each row of a batch has cached, and prefill and decode steps, for any executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ..arrays import Bools, Floats, Ints, float32
from .sampler import Sampler


class BatchContext(ABC):
    """A context of `batch` rows of at most `capacity` tokens; `lengths` counts the cached tokens of each row.

    `rewinds`: a row can drop its last tokens.
    `padded`: the rows of a call may have different numbers of new tokens.
    `answers`: prompts are sources of an encoder, and the rows contain only the answers.
    Subclasses fill `_scores` [batch, vocab], the logits of the last token of each row.
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
        """Remove the tokens of every row and reset all recurrent states."""
        self._clear()
        self._cut(0)
        self._intact = True

    def count_cached(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens at the start of `prompt` that the single row has cached and can keep.

        The last token never counts, because it must run for its logits. The number is 0 for a source of an encoder.
        """
        length = int(self.lengths[0]) if self._intact and not self._answers else 0
        prefix = np.array(prompt[:-1][:length], np.int64)
        differ = np.flatnonzero(self._ids[0, : prefix.size] != prefix)
        common = int(differ[0]) if differ.size else prefix.size
        return common if common == length or self._rewinds else 0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Floats:
        """Restart every row with its prompt, at most `chunk` tokens a run; return the logits after it, [batch, vocab].

        Adjacent prompts that fit one chunk run together, right-padded; if padding would enter states or rolling caches
        or compete for experts, only prompts of equal length do. A prompt above `chunk` tokens runs alone, in pieces. If
        there are fewer prompts than rows, each is read once and copied to an equal number of adjacent rows. For an
        encoder-decoder, prompts are sources, and the rows begin with the decoder's start token. `keep` is the number of
        prompt tokens that a single row has cached and keeps, see `count_cached`.

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
        """Append `tokens` to the single row in one run; return their logits [seq, vocab], or [1, vocab] for the last
        token if the model does not return logits of every position."""
        logits: NDArray[Any] = self._extend(0, [tokens], every=True)[0]
        return float32(logits, np.empty(logits.shape, np.float32))

    def extend_all(self, given: Sequence[Sequence[int]]) -> list[Floats]:
        """Append the tokens `given[r]` to every row r; return their logits, [len(given[r]), vocab] for each row.

        A row without new tokens is unchanged. The model must return logits of every position and allow padding and
        rewinding. The longest item of `given` must fit after the longest row.
        """
        resting = np.array([not part for part in given])
        self.lengths[resting] -= 1  # resting rows repeat their last token
        parts = [part or [int(self._ids[row, self.lengths[row]])] for row, part in enumerate(given)]
        logits = self._extend(0, parts, every=True)
        return [np.array(logits[row, : len(part)], np.float32) for row, part in enumerate(given)]

    def rewind(self, lengths: Ints | int) -> None:
        """Cut every row to its first `lengths` tokens (one number, or one per row), at least one token."""
        self._cut(lengths)
        self._end([self._ids[row, :length].tolist() for row, length in enumerate(self.lengths)])

    def step(self, tokens: Sequence[int] | Ints, active: Bools | None = None) -> Floats:
        """Append `tokens` [batch] to the rows that are `active` [batch] (default: all); return the logits after these
        tokens, [batch, vocab], valid until the next call.

        Inactive rows repeat their last step: caches are unchanged, but states advance, so only rows without states can
        be resumed.

        Raises:
            WeftError: if a row's cache is full.
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
        """Remove all tokens of one row and reset its recurrent states."""
        self._vacate(row)
        self.lengths[row] = 0

    def append(self, first: int, parts: Sequence[Sequence[int]]) -> Floats:
        """Append the tokens `parts[i]` to row `first + i` for each i; return logits after them, [len(parts), vocab].

        If there are several parts, their rows must be empty; unless rows can be padded, the parts have equal length.
        """
        self._enter(first, len(parts))
        logits = self._extend(first, parts)
        ends = [min(len(part), logits.shape[1]) - 1 for part in parts]
        scores = np.stack([float32(logits[row, end], self._row()) for row, end in enumerate(ends)])
        self._leave(first, [part[-1] for part in parts])
        return scores

    def step_first(self, tokens: Ints) -> Floats:
        """Append `tokens` to the first len(tokens) rows, one to each, and compute only these rows.

        Return the logits after the new tokens, [len(tokens), vocab], valid until the next call. Raises WeftError when
        the cache of a row is full.
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
        """Return a function (tokens [batch], active [batch]) → next tokens [batch] that runs a step as `step` does and
        draws on the device as `samplers` would; None if the host must draw."""
        return None

    def gather(self, rows: Ints) -> None:
        """Copy the contents of row `rows[r]` to every row r: tokens, caches, states and source."""
        self._gather(rows, int(self.lengths.max()))
        self.lengths[:], self._ids[:] = self.lengths[rows], self._ids[rows]

    def take(self, other: Self) -> None:
        """Copy the contents of `other`, which has the same batch size and at most the same capacity, into this
        context."""
        used = int(other.lengths.max())
        self._take(other, used)
        self.lengths[:], self._intact = other.lengths, other._intact
        self._ids[:, :used] = other._ids[:, :used]

    def _check_room(self, rows: Ints) -> None:
        if rows.size and int(self.lengths[rows].max()) >= self.capacity:
            raise WeftError(f"the cache is full: it holds {self.capacity} tokens a row")

    def _append(self, rows: Ints, tokens: Ints) -> None:
        """Record that each of `rows` has cached one of `tokens`, in the same order."""
        self._ids[rows, self.lengths[rows]] = tokens
        self.lengths[rows] += 1

    def _extend(self, first: int, parts: Sequence[Sequence[int]], every: bool = False) -> NDArray[Any]:
        """Append the tokens `parts[i]` to row `first + i` for each i; return the logits that `_call` returns."""
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
        """Set the recurrent states of all rows to their values at the start of a sequence."""

    def _cut(self, lengths: Ints | int) -> None:
        """Cut every row to its first `lengths` tokens."""
        self.lengths[:] = lengths

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the first tokens of each row: `prompts`; the start token of an encoder-decoder after encoding them."""
        return prompts

    @abstractmethod
    def _ready(self, calls: int) -> None:
        """Prepare for `calls` model calls that read a prompt (or several prompts together) into empty rows."""

    @abstractmethod
    def _end(self, prompts: Sequence[Sequence[int]]) -> None:
        """Record the last tokens of `prompts`, which the first rows hold: an idle row repeats its last token."""

    @abstractmethod
    def _call(self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool) -> NDArray[Any]:
        """Run the tokens `parts[i]` in row `first + i` for each i, which has `past[i]` tokens before, `total[i]` after.

        Return logits on the host, valid until the next call: [rows, seq, vocab] if `every` and the model returns logits
        of every position, else this or [rows, 1, vocab] for the last token of each row.
        """

    @abstractmethod
    def _step(self, rows: Ints, tokens: Ints) -> None:
        """Append one of `tokens` to each of `rows` while all other rows repeat their last step; fill `_scores`."""

    @abstractmethod
    def _step_first(self, tokens: Ints) -> None:
        """Append `tokens` to the first rows, one to each; write the logits of these rows to `_scores`."""

    @abstractmethod
    def _vacate(self, row: int) -> None:
        """Set the recurrent states of one row to their values at the start of a sequence."""

    @abstractmethod
    def _move(self, row: int, to: int, used: int) -> None:
        """Copy the contents of `row`, `used` tokens, to row `to`."""

    def _enter(self, first: int, rows: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare for a call that runs only `rows` rows, from `first` on."""

    @abstractmethod
    def _leave(self, first: int, last: Sequence[int]) -> None:
        """Record the `last` token of each row that a call ran, from `first` on: an idle row repeats it."""

    @abstractmethod
    def _gather(self, rows: Ints, used: int) -> None:
        """Copy the contents of row `rows[r]`, at most `used` tokens, to every row r."""

    @abstractmethod
    def _take(self, other: Self, used: int) -> None:
        """Copy the contents of `other`, whose rows have at most `used` tokens, into this context."""


def parts(prompt: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """Return an iterator over pieces of `prompt`, in order, of `chunk` tokens each (the last may be shorter)."""
    return (prompt[at : at + chunk] for at in range(0, len(prompt), chunk))


def _group_rows(lengths: Sequence[int], chunk: int, padded: bool) -> Iterator[tuple[int, int]]:
    """Yield (first row, end row) of groups of adjacent rows with at most `chunk` tokens, padding included.

    A row above `chunk` tokens is a group by itself. Unless `padded`, all rows of a group have equal length.
    """
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        splits = longest * (row + 1 - first) > chunk or not (padded or length == lengths[first])
        if row > first and splits:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)
