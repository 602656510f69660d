"""Batch contexts: the tokens that each row of a batch has cached, and prefill and decode steps, for any executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ..arrays import Bools, Floats, Ints, convert_to_float32
from .async_calls import raise_if_cancelled
from .sampler import Sampler


class BatchContext(ABC):
    """The cached tokens of a batch of `batch` rows of at most `capacity` tokens; `lengths` [batch] counts them per row.

    - can_rewind: a row can drop its last tokens
    - padded: the rows of a model call may have different numbers of new tokens
    - answers: the model is an encoder-decoder: prompts are sources of its encoder, and rows contain only answers

    Subclasses fill `_scores` [batch, vocab], the logits of the last token of each row.
    """

    _scores: Floats

    def __init__(self, batch: int, capacity: int, *, can_rewind: bool, padded: bool, answers: bool) -> None:
        self.capacity = capacity
        self.lengths: Ints = np.zeros(batch, np.int64)
        self._ids = np.zeros((batch, capacity), np.int64)  # the cached tokens
        self._intact = True  # no run was interrupted
        self._can_rewind, self._padded, self._answers = can_rewind, padded, answers

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes allocated for caches and states."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release device resources of this context, such as captured graphs; it must not be used afterwards."""

    def reset(self) -> None:
        """Remove the tokens of every row and reset all recurrent states."""
        self._clear_states()
        self._truncate_rows(0)
        self._intact = True

    def count_cached(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens at the start of `prompt` that the only row has cached, so that they need not run.
        The last token never counts, because its logits are needed. Return 0 for a source of an encoder, after an
        interrupted run, and if the row would have to drop tokens but cannot."""
        length = int(self.lengths[0]) if self._intact and not self._answers else 0
        prefix = np.array(prompt[:-1][:length], np.int64)
        differ = np.flatnonzero(self._ids[0, : prefix.size] != prefix)
        common = int(differ[0]) if differ.size else prefix.size
        return common if common == length or self._can_rewind else 0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Floats:
        """Replace the tokens of every row by its prompt; return the logits after the prompt, [batch, vocab].

        A model call has at most `chunk` tokens. Adjacent prompts that fit into one call run together, right-padded;
        unless the batch is `padded`, only prompts of equal length do. A prompt above `chunk` tokens runs alone, in
        pieces. If there are fewer prompts than rows, each prompt runs once and is copied to an equal number of adjacent
        rows. For an encoder-decoder, prompts are sources, and the rows begin with the decoder's start token. `keep` is
        the number of prompt tokens that the only row has cached already (`count_cached`); they do not run again.

        The result is valid until the next call of any method.
        """
        if keep:
            self._truncate_rows(keep)
        else:
            self.reset()
        prompts = self._begin_rows(prompts)
        for first, end in _group_rows([len(prompt) for prompt in prompts], chunk, padded=self._padded):
            group = prompts[first:end]
            runs = [group] if len(group) > 1 else [[part] for part in split_chunks(group[0][keep:], chunk)]
            # States to be kept stay on their side of the double buffer.
            if not keep:
                self._prepare_prefill(len(runs))
            for run in runs:
                logits = self._append_tokens(first, run)
            for row, part in enumerate(run):
                convert_to_float32(logits[row, min(len(part), logits.shape[1]) - 1], self._scores[first + row])
        self._record_ends(0, [prompt[-1] for prompt in prompts])
        if len(prompts) < self.lengths.size:
            rows = np.repeat(np.arange(len(prompts)), self.lengths.size // len(prompts))
            self.gather_rows(rows)
            self._scores[:] = self._scores[rows]
        return self._scores

    def extend(self, tokens: Sequence[int]) -> Floats:
        """Append `tokens` to the only row in one model call; return their logits [seq, vocab], or [1, vocab] for the
        last token if the model returns no others. Raises WeftError if the tokens exceed the capacity."""
        logits: NDArray[Any] = self._append_tokens(0, [tokens], every=True)[0]
        return convert_to_float32(logits, np.empty(logits.shape, np.float32))

    def extend_all(self, parts: Sequence[Sequence[int]]) -> list[Floats]:
        """Append the tokens `parts[r]` to every row r; return a list of their logits, [len(parts[r]), vocab]. A row
        without new tokens is unchanged. The model must return logits of every position and allow padding and rewinding.
        The longest of `parts` must fit after the longest row."""
        resting = np.array([not part for part in parts])
        self.lengths[resting] -= 1  # resting rows repeat their last token
        padded = [part or [int(self._ids[row, self.lengths[row]])] for row, part in enumerate(parts)]
        logits = self._append_tokens(0, padded, every=True)
        return [np.array(logits[row, : len(part)], np.float32) for row, part in enumerate(parts)]

    def rewind(self, lengths: Ints | int) -> None:
        """Drop the tokens of every row after its first `lengths` (a number, or an array [batch]; at least 1)."""
        self._truncate_rows(lengths)
        self._record_ends(0, self._ids[np.arange(self.lengths.size), self.lengths - 1].tolist())

    def step(self, tokens: Sequence[int] | Ints, active: Bools | None = None) -> Floats:
        """Append token `tokens[r]` to each row r with `active[r]` (default: all rows). Return the logits [batch, vocab]
        after these tokens, valid until the next call of any method. Inactive rows repeat their last token: caches stay
        the same, but recurrent states advance, so they cannot continue. Raises WeftError if a cache is full."""
        rows = np.arange(self.lengths.size) if active is None else np.flatnonzero(active)
        return self._run_step(rows, np.asarray(tokens, np.int64)[rows], None)

    def _run_step(self, rows: Ints, tokens: Ints, first: int | None) -> Floats:
        self._check_room(rows)
        self.discard_step()
        # An interrupt before the end leaves caches half written: `count_cached` then returns 0.
        self._intact = False
        self._step(rows, tokens, first)
        self._record_tokens(rows, tokens)
        self._intact = True
        return self._scores[:first]

    # -- single rows that join and leave, while the others are unchanged

    def clear_row(self, row: int) -> None:
        """Remove all tokens of one row and reset its recurrent states."""
        self.discard_step()
        self._clear_row(row)
        self.lengths[row] = 0

    def append(self, first: int, parts: Sequence[Sequence[int]]) -> Floats:
        """Append the tokens `parts[i]` to row `first + i` for each i; return the logits after them, [len(parts),
        vocab]. Several parts require empty rows, and equal lengths unless the batch is `padded`."""
        logits = self._append_tokens(first, parts)
        ends = [min(len(part), logits.shape[1]) - 1 for part in parts]
        scores = np.empty((len(parts), self._scores.shape[1]), np.float32)
        for row, end in enumerate(ends):
            convert_to_float32(logits[row, end], scores[row])
        self._record_ends(first, [part[-1] for part in parts])
        return scores

    def step_first(self, tokens: Ints) -> Floats:
        """Append token `tokens[r]` to each row r < len(tokens), and compute only these rows. Return the logits after
        the new tokens, [len(tokens), vocab], valid until the next call of any method. Raises WeftError if a cache is
        full."""
        return self._run_step(np.arange(tokens.size), tokens, tokens.size)

    def copy_row(self, row: int, to: int) -> None:
        """Copy the tokens, caches and states of row `row` to row `to`."""
        rows = np.arange(self.lengths.size)
        rows[to] = row
        self.gather_rows(rows)

    def new_sampling_step(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function (tokens [batch], active [batch]) → next tokens [batch]. The function runs a step as `step`
        does and draws on the device the tokens that `samplers` (one per row) would draw. None if only the host can."""
        return None

    def gather_rows(self, rows: Ints) -> None:
        """Copy the tokens, caches, states and encoder source of row `rows[r]` to row r, for every r."""
        self.discard_step()
        moved = rows != np.arange(rows.size)
        self._gather_rows(rows, int(self.lengths[rows[moved]].max(initial=0)))
        self.lengths[:], self._ids[:] = self.lengths[rows], self._ids[rows]

    def copy_from(self, other: Self) -> None:
        """Copy the tokens, caches and states of `other`, of the same batch and at most the same capacity."""
        self.discard_step()
        other.discard_step()
        used = int(other.lengths.max())
        self._copy_from(other, used)
        self.lengths[:], self._intact = other.lengths, other._intact
        self._ids[:, :used] = other._ids[:, :used]

    # -- the tensors of a row, which `PrefixCache` stores

    def get_tokens(self, row: int) -> list[int]:
        """Return the cached tokens of batch row `row`; [] after an interrupted run."""
        tokens: list[int] = self._ids[row, : self.lengths[row]].tolist() if self._intact else []
        return tokens

    def read_row(self, row: int, start: int, end: int) -> list[Any]:
        """Return copies of the tensors of batch row `row`: the slots `start` to `end` of caches (all slots of rolling
        caches, if `start` is 0 and `end` the length of the row), and recurrent states."""
        self.discard_step()
        with self._open_tensors(row) as tensors:
            parts = [t[row : row + 1, :, start:end] if has_slots else t[row : row + 1] for t, has_slots in tensors]
            return [part.clone() if hasattr(part, "clone") else part.copy() for part in parts]  # PyTorch, numpy

    def write_row(self, row: int, tokens: Sequence[int], parts: Iterable[tuple[int, Sequence[Any]]]) -> None:
        """Replace the tokens of row `row`; `parts` has (first slot, result of `read_row`) for the new `tokens`."""
        self.clear_row(row)
        with self._open_tensors(row) as tensors:
            for start, values in parts:
                for (tensor, has_slots), value in zip(tensors, values, strict=True):
                    target = tensor[row : row + 1]
                    (target[:, :, start : start + value.shape[2]] if has_slots else target)[:] = value
        self._ids[row, : len(tokens)] = tokens
        self.lengths[row] = len(tokens)
        self._record_ends(row, tokens[-1:])

    def _check_room(self, rows: Ints) -> None:
        """Check before a step that a cache has room for one more token in `rows`, and that its task goes on."""
        raise_if_cancelled()
        if rows.size and int(self.lengths[rows].max()) >= self.capacity:
            raise WeftError(f"the cache is full with {self.capacity} tokens in a row: create a context of more tokens")

    def _record_tokens(self, rows: Ints, tokens: Ints) -> None:
        self._ids[rows, self.lengths[rows]] = tokens
        self.lengths[rows] += 1

    def _append_tokens(self, first: int, parts: Sequence[Sequence[int]], every: bool = False) -> NDArray[Any]:
        """Append `parts[i]` to row `first + i`; return logits as `_run_tokens`. Raises WeftError if one is full."""
        past = self.lengths[first : first + len(parts)]
        total = past + np.array([len(part) for part in parts])
        if int(total.max()) > self.capacity:
            raise WeftError(
                f"{int(total.max())} tokens in a row do not fit the cache of {self.capacity}: create a larger context"
            )
        raise_if_cancelled()
        self.discard_step()
        self._intact = False
        logits = self._run_tokens(first, parts, past, total, every)
        for row, (part, at) in enumerate(zip(parts, past.tolist(), strict=True), first):
            self._ids[row, at : at + len(part)] = part
        self.lengths[first : first + len(parts)] = total
        self._intact = True
        return logits

    # -- implemented by executors

    def discard_step(self) -> None:  # noqa: B027 - most begin no steps ahead
        """Discard a step that was begun ahead for the current rows. Every method that changes rows calls this first."""

    @abstractmethod
    def _clear_states(self) -> None:
        """Set the recurrent states of all rows to their values at the start of a sequence."""

    def _truncate_rows(self, lengths: Ints | int) -> None:
        self.discard_step()
        self.lengths[:] = lengths

    def _begin_rows(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the tokens that rows begin with; an encoder-decoder encodes `prompts`, returns start tokens."""
        return prompts

    def _prepare_prefill(self, calls: int) -> None:  # noqa: B027 - some have nothing to prepare
        """Prepare for `calls` model calls that together run one prompt, or a group of prompts, in empty rows."""

    @abstractmethod
    def _record_ends(self, first: int, last: Sequence[int]) -> None:
        """Record that row `first + i` ran `last[i]` as its last token, for each i: an idle row repeats this token."""

    @abstractmethod
    def _run_tokens(
        self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool
    ) -> NDArray[Any]:
        """Run the tokens `parts[i]` in row `first + i`, for each i; the row has `past[i]` tokens before the call and
        `total[i]` after. Return logits on the host, valid until the next call: [len(parts), 1, vocab] for the last
        token of each row, or [len(parts), seq, vocab] for all tokens. With `every`, return all if the model can."""

    @abstractmethod
    def _step(self, rows: Ints, tokens: Ints, first: int | None) -> None:
        """Run token `tokens[i]` in row `rows[i]` for each i, and write the logits to `_scores`. If `first` is None,
        other rows repeat their last token; else `rows` are the first `first` rows, and no others are computed."""

    @abstractmethod
    def _clear_row(self, row: int) -> None:
        """Set the recurrent states of row `row` to their initial values."""

    @abstractmethod
    def _open_tensors(self, row: int) -> AbstractContextManager[Sequence[tuple[Any, bool]]]:
        """Return a context manager for reading and writing row `row` of the caches and states: arrays or tensors
        [batch, ...] that share their memory, each with whether axis 2 has the slots of a cache."""

    @abstractmethod
    def _gather_rows(self, rows: Ints, used: int) -> None:
        """Copy the caches (at most `used` tokens), states and source of row `rows[r]` to row r, for every r."""

    @abstractmethod
    def _copy_from(self, other: Self, used: int) -> None:
        """Copy the caches and states of `other`, whose rows have at most `used` tokens, into this context."""


def split_chunks(prompt: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """Return an iterator over pieces of `prompt`, in order, of `chunk` tokens each (the last may be shorter)."""
    return (prompt[at : at + chunk] for at in range(0, len(prompt), chunk))


def _group_rows(lengths: Sequence[int], chunk: int, padded: bool) -> Iterator[tuple[int, int]]:
    """Yield (first row, exclusive end row) of groups of adjacent rows with at most `chunk` tokens, padding included.
    `lengths` has the number of tokens of each row. A row above `chunk` tokens is a group by itself. Unless `padded`,
    all rows of a group have equal length."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        splits = longest * (row + 1 - first) > chunk or not (padded or length == lengths[first])
        if row > first and splits:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)
