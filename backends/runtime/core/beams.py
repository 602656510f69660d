"""Beam search for the likeliest sequences, with the scores and rules of Hugging Face's implementation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np

from weft.ir.errors import WeftError

from ..arrays import Floats, Ints
from .decoder import CachedDecoder
from .results import Timings
from .sampler import TokenRules, check_count, check_logits

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beams:
    """Options of beam search: the number of `beams`, and the number of best sequences `returned`.

    The score of a sequence of n tokens is its log-probability / n^length_penalty. Once `beams` sequences have ended,
    `early_stopping` decides when the search ends: True: at once; False: when no open sequence, at its current length,
    has a higher score than the worst ended sequence; "never": when none can reach a higher score at any length up to
    the limit. Meister et al. 2020 (arXiv 2010.02650) discuss such rules.

    Raises WeftError on a value outside its range.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    returned: int = 1

    def __post_init__(self) -> None:
        check_count("beams", self.beams)
        check_count("returned", self.returned)
        if self.returned > self.beams:
            raise WeftError(f"returned is {self.returned}, but there are only {self.beams} beams to return")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise WeftError(f'early_stopping is {self.early_stopping!r}, but it must be True, False or "never"')
        number = isinstance(self.length_penalty, int | float | np.number)
        if not number or isinstance(self.length_penalty, bool) or not math.isfinite(self.length_penalty):
            raise WeftError(f"length_penalty is {self.length_penalty!r}, but it must be a finite number")


@dataclass(frozen=True)
class Hypothesis:
    """A sequence of n tokens and its score: its log-probability, divided by n^length_penalty once it has ended."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """The beam search of one prompt, with answers of at most `limit` tokens. `open` is True until the search ends;
    `best` lists the ended sequences, best first, at most as many as beams."""

    def __init__(self, how: Beams, limit: int, stop_ids: frozenset[int], forced: TokenRules) -> None:
        self.open, self.best = True, list[Hypothesis]()
        self.width, self._how, self._limit, self._stop_ids, self._forced = how.beams, how, limit, stop_ids, forced
        # One hypothesis at first: equal ones would all continue with the same tokens.
        self._running = [Hypothesis((), 0.0)]
        self._count = 0

    def advance(self, logits: Floats) -> tuple[list[int], list[int]]:
        """Extend the running sequences by one token, given their logits [beams, vocab]; update `open` and `best`.
        Return two lists with an item per beam: the row of `logits` that it continues, and its next token; [] if no
        sequence is left. Raises WeftError if the largest logit of a row is NaN or infinite."""
        scores = _log_softmax(logits[: len(self._running)])
        # Forced after the softmax, so that a forced token is certain and leaves the score unchanged.
        scores = self._forced(scores, self._count, self._limit)
        scores += np.array([[hypothesis.score] for hypothesis in self._running], np.float32)
        self._count += 1
        candidates = max(2, 1 + len(self._stop_ids)) * self.width  # enough for `width` open sequences to remain
        full = len(self.best) == self.width
        running: list[tuple[int, Hypothesis]] = []  # with the row that each hypothesis continues
        for rank, (at, score) in enumerate(_select_largest(scores.ravel(), candidates)):
            parent, token = divmod(at, scores.shape[1])
            sequence = (*self._running[parent].tokens, token)
            if token in self._stop_ids or self._count == self._limit:
                # As in Hugging Face, an ended sequence counts only if it is among the `width` best candidates.
                if rank < self.width and not (full and self._how.early_stopping is True):
                    self.best.append(Hypothesis(sequence, score / self._count**self._how.length_penalty))
            elif len(running) < self.width:
                running.append((parent, Hypothesis(sequence, score)))
        self.best = sorted(self.best, key=lambda hypothesis: -hypothesis.score)[: self.width]
        running = _arrange_rows(running)
        self._running = [hypothesis for _, hypothesis in running]
        self.open = bool(running) and self._may_improve()
        idle = self.width - len(running)  # rows without a hypothesis copy the first
        parents, tokens = [parent for parent, _ in running], [hypothesis.tokens[-1] for _, hypothesis in running]
        return parents + parents[:1] * idle, tokens + tokens[:1] * idle

    def _may_improve(self) -> bool:
        if len(self.best) < self.width:
            return True
        if self._how.early_stopping is True:
            return False
        # Scores are negative: with a positive penalty the longest sequence divides them most, a bound for every length.
        to_limit = self._how.early_stopping == "never" and self._how.length_penalty > 0
        length = self._limit if to_limit else self._count
        likeliest = max(hypothesis.score for hypothesis in self._running)
        possible: float = likeliest / length**self._how.length_penalty
        return possible > self.best[-1].score


def run_beam_search(
    decoder: CachedDecoder[Any],
    prompts: Sequence[Sequence[int]],
    most: int,
    searches: Sequence[BeamSearch],
    chunk: int,
    timings: Timings,
) -> None:
    """Run `searches` (one per prompt, with equal numbers of beams) as one batch to their end; the results are in
    `searches` and `timings`. `most` is the maximum number of cached tokens per row, `chunk` of prompt tokens per model
    call. Raises WeftError if the caches cannot be allocated."""
    beams = searches[0].width
    rows: Ints = np.arange(len(prompts) * beams)
    tokens = np.zeros_like(rows)
    start = perf_counter()
    with decoder.context(rows.size, most) as context:
        timings.cache_bytes = context.cache_bytes
        logits = context.prefill(prompts, chunk)
        timings.prefill_seconds, start = perf_counter() - start, perf_counter()
        while True:
            origin, active = rows.copy(), np.zeros(rows.size, np.bool_)
            for first, beam_search in zip(rows[::beams], searches, strict=True):
                part = slice(first, first + beams)
                if beam_search.open:
                    parents, drawn = beam_search.advance(logits[part])
                if beam_search.open:
                    origin[part], tokens[part], active[part] = first + np.array(parents), drawn, True
            if not active.any():
                break
            context.gather_rows(origin)
            logits = context.step(tokens, active)
            timings.decoded_tokens += int(active.sum())
    timings.decode_seconds = perf_counter() - start


def _arrange_rows(running: Sequence[tuple[int, Hypothesis]]) -> list[tuple[int, Hypothesis]]:
    """Return `running`, items (batch row that a hypothesis continues, hypothesis), in an order that needs few copies of
    caches: if r is an index, the first item that continues row r is there, where the cache of row r is already."""
    rows: list[tuple[int, Hypothesis] | None] = [None] * len(running)
    moved = []
    for item in running:
        if item[0] < len(rows) and rows[item[0]] is None:
            rows[item[0]] = item
        else:
            moved.append(item)
    return [item or moved.pop(0) for item in rows]


def _log_softmax(logits: Floats) -> Floats:
    top = logits.max(-1, keepdims=True)
    check_logits(top)
    shifted = logits - top
    log_probabilities: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probabilities


def _select_largest(scores: Floats, count: int) -> Iterator[tuple[int, float]]:
    """Yield (index, value) of the `count` largest of `scores` [n], largest first, but leave out infinite ones."""
    # Partition first: linear in the vocabulary, and only a few candidates remain to sort.
    indices = np.arange(scores.size) if count >= scores.size else np.argpartition(-scores, count - 1)[:count]
    indices = indices[np.argsort(-scores[indices], kind="stable")]
    return ((int(at), float(scores[at])) for at in indices if np.isfinite(scores[at]))
