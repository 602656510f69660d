"""Beam search: the likeliest texts rather than the likeliest token, with the scores and rules of Hugging Face's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np

from weft.ir.errors import WeftError

from ..arrays import Floats, Ints
from .decoder import Decoder
from .results import Timings
from .sampling import Forced, check_count, check_logits

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beams:
    """Options of beam search: the number of `beams`, and of best texts `returned`.

    The score of a text of n tokens is its log-probability / n^length_penalty. A search ends when `beams` texts have,
    and then at once (early_stopping True), when none of those still open scores higher as it stands (False), or when
    none can score higher at any length ("never"; Meister et al. 2020, arXiv 2010.02650, discuss such rules).

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
    """A text and its score: a log-probability while it is open, divided by its length penalty once it has ended."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """The search of one prompt; goes on while `open`, then `best` are the texts that ended, best first."""

    def __init__(self, how: Beams, limit: int, stop_ids: frozenset[int], forced: Forced) -> None:
        self.open, self.best = True, list[Hypothesis]()
        self.width, self._how, self._limit, self._stop_ids, self._forced = how.beams, how, limit, stop_ids, forced
        # One text at first, because equal ones would all continue with the same tokens.
        self._running = [Hypothesis((), 0.0)]
        self._count = 0

    def advance(self, logits: Floats) -> tuple[list[int], list[int]]:
        """From logits [beams, vocab] of the running texts: which of them each continues next, and with which token.

        Raises WeftError when the logits are not numbers.
        """
        scores = _log_softmax(logits[: len(self._running)])
        # Forced behind the softmax, so that a forced token is certain and leaves the score as it is.
        scores = self._forced(scores, self._count, self._limit)
        scores += np.array([[text.score] for text in self._running], np.float32)
        self._count += 1
        candidates = max(2, 1 + len(self._stop_ids)) * self.width  # leaves `beams` that have not ended
        full = len(self.best) == self.width
        going: list[tuple[int, Hypothesis]] = []  # with the row that each continues
        for rank, (at, score) in enumerate(_largest(scores.ravel(), candidates)):
            parent, token = divmod(at, scores.shape[1])
            text = (*self._running[parent].tokens, token)
            if token in self._stop_ids or self._count == self._limit:
                # As in Hugging Face, an ended text counts only where it is among the `width` best candidates.
                if rank < self.width and not (full and self._how.early_stopping is True):
                    self.best.append(Hypothesis(text, score / self._count**self._how.length_penalty))
            elif len(going) < self.width:
                going.append((parent, Hypothesis(text, score)))
        self.best = sorted(self.best, key=lambda text: -text.score)[: self.width]
        going = _settled(going)
        self._running = [text for _, text in going]
        self.open = bool(going) and self._may_improve()
        idle = self.width - len(going)  # rows with nothing to do follow the first
        parents, tokens = [parent for parent, _ in going], [text.tokens[-1] for _, text in going]
        return parents + parents[:1] * idle, tokens + tokens[:1] * idle

    def _may_improve(self) -> bool:
        if len(self.best) < self.width:
            return True
        if self._how.early_stopping is True:
            return False
        # Scores are negative, so with a positive penalty the longest text divides them most: a bound for every length.
        far = self._how.early_stopping == "never" and self._how.length_penalty > 0
        length = self._limit if far else self._count
        likeliest = max(text.score for text in self._running)
        possible: float = likeliest / length**self._how.length_penalty
        return possible > self.best[-1].score


def search(
    decoder: Decoder[Any],
    prompts: Sequence[Sequence[int]],
    most: int,
    searches: Sequence[BeamSearch],
    chunk: int,
    timings: Timings,
) -> None:
    """Run the `searches` of `prompts` together to their end, every row of at most `most` tokens; fills in `timings`.

    Raises WeftError when the caches cannot be had.
    """
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
            for first, one in zip(rows[::beams], searches, strict=True):
                part = slice(first, first + beams)
                if one.open:
                    parents, drawn = one.advance(logits[part])
                if one.open:
                    origin[part], tokens[part], active[part] = first + np.array(parents), drawn, True
            if not active.any():
                break
            context.gather(origin)
            logits = context.step(tokens, active)
            timings.decoded_tokens += int(active.sum())
    timings.decode_seconds = perf_counter() - start


def _settled(going: Sequence[tuple[int, Hypothesis]]) -> list[tuple[int, Hypothesis]]:
    """Texts in an order that leaves one of each row in that row, so that few caches must be moved."""
    rows: list[tuple[int, Hypothesis] | None] = [None] * len(going)
    moved = []
    for one in going:
        if one[0] < len(rows) and rows[one[0]] is None:
            rows[one[0]] = one
        else:
            moved.append(one)
    return [one or moved.pop(0) for one in rows]


def _log_softmax(logits: Floats) -> Floats:
    top = logits.max(-1, keepdims=True)
    check_logits(top)
    shifted = logits - top
    log_probabilities: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probabilities


def _largest(scores: Floats, count: int) -> Iterator[tuple[int, float]]:
    """The places and values of the `count` largest finite scores, largest first."""
    # Partition first: linear in the vocabulary, and only a few candidates are left to sort.
    places = np.arange(scores.size) if count >= scores.size else np.argpartition(-scores, count - 1)[:count]
    places = places[np.argsort(-scores[places], kind="stable")]
    return ((int(at), float(scores[at])) for at in places if np.isfinite(scores[at]))
