"""Answers in progress: the tokens and the text of each prompt's answer, one token at a time or by verified drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from weft.ir.errors import WeftError

from ..arrays import Bools, Floats, Ints
from ..text.tokenizer import StopStringFilter, StreamingDetokenizer, Tokenizer
from .batch_context import BatchContext
from .results import Result, TokenLogprobs
from .sampler import Sampler, TokenRules
from .speculation import Drafts


class Constraint(Protocol):
    """A formal language that an answer must belong to, checked token by token."""

    @property
    def is_complete(self) -> bool:
        """Return whether the accepted text belongs to the language and no token may follow it."""

    def mask_logits(self, logits: Floats) -> Floats:
        """Return a copy of `logits` [vocab] with minus infinity for tokens that may not follow the accepted tokens; a
        stop token may follow where the text may end."""

    def accept_token(self, token: int) -> None:
        """Add `token`, which `mask_logits` allows, to the accepted tokens."""


class Answer:
    """The answer to one prompt, of at most `limit` tokens; its batch row begins with the tokens `begin`. It ends with a
    token in `stop_ids`, before a string in `stops`, or once `constraint` is complete. `forced` and `constraint`
    restrict its tokens. Without a `tokenizer` the result has no text. With `logprobs` = n, the result has the
    log-probabilities of the answer's tokens and of the n most likely tokens at each position."""

    def __init__(
        self,
        prompt: list[int],
        begin: Sequence[int],
        limit: int,
        stop_ids: frozenset[int],
        sampler: Sampler,
        forced: TokenRules,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        *,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> None:
        self.result, self.begin, self.limit = Result(prompt), begin, limit
        self._stop_ids, self.sampler, self._forced = stop_ids, sampler, forced
        self._growing = StreamingDetokenizer(tokenizer) if tokenizer else None
        self._stops = StopStringFilter(stops)
        self._constraint, self._logprobs = constraint, logprobs
        self._emitted = 0
        self.error: WeftError | None = None  # why it ended early, in a batch that continues

    def draw_token(self, logits: Floats) -> int:
        """Draw the next token from `logits` [vocab], restricted by forced tokens and the constraint; add and return it.
        Raises WeftError when the largest logit is NaN or infinite."""
        scores = self._forced(logits, len(self.result.tokens), self.limit)
        if self._constraint is not None:
            scores = self._constraint.mask_logits(scores)
        token = self.sampler(scores)
        if self._logprobs is not None:
            self.result.logprobs.append(compute_logprobs(logits, token, self._logprobs))
        return self.add_token(token)

    def add_token(self, drawn: int | np.int64) -> int:
        """Add the next token and its text to the result, set `finish` if the answer now ends, and return the token."""
        result, token = self.result, int(drawn)
        result.tokens.append(token)
        if token in self._stop_ids:
            result.finish = "stop"
        else:
            if self._growing:
                result.text += self._stops.push(self._growing.push(token))
            if self._constraint is not None:
                self._constraint.accept_token(token)
            if self._stops.stopped:
                result.finish = "stop_string"
            elif self._constraint is not None and self._constraint.is_complete:
                result.finish = "stop"
            elif len(result.tokens) == self.limit:
                result.finish = "length"
        if self._growing and result.finish in ("stop", "length"):
            result.text += self._stops.push(self._growing.flush()) + self._stops.flush()
            # The withheld text may complete a stop string.
            if self._stops.stopped:
                result.finish = "stop_string"
        return token

    def pop_text(self) -> str:
        """Return the text that was added since the last call."""
        piece = self.result.text[self._emitted :]
        self._emitted += len(piece)
        return piece


def compute_logprobs(logits: Floats, token: int, most: int) -> TokenLogprobs:
    """Return the log-probabilities of `token` and of the `most` likeliest tokens, computed from `logits` [vocab]."""
    shifted = logits - logits.max()
    total = np.float32(np.log(np.exp(shifted, dtype=np.float32).sum(dtype=np.float64)))
    most = min(most, logits.size)
    best = np.argpartition(-shifted, most - 1)[:most] if most else np.empty(0, np.int64)
    best = best[np.lexsort((best, -shifted[best]))]
    return TokenLogprobs(
        token, float(shifted[token] - total), tuple((int(i), float(shifted[i] - total)) for i in best.tolist())
    )


def add_tokens(
    rows: Sequence[Answer], add: Callable[[Answer, Any], int], values: Floats | Ints, tokens: Ints, active: Bools
) -> int:
    """Call `add(rows[i], values[i])` for every i with `active[i]`: `Answer.add_token` with next tokens [rows] as
    `values`, or `Answer.draw_token` with logits [rows, vocab]. Store the token that it returns in `tokens[i]`, and set
    `active[i]` to False if the answer has ended. Return the number of tokens added."""
    indices = np.flatnonzero(active).tolist()
    for at in indices:
        tokens[at] = add(rows[at], values[at])
        active[at] = rows[at].result.finish is None
    return len(indices)


def verify_drafts(
    context: BatchContext,
    answers: Sequence[Answer],
    drafts: Sequence[Drafts],
    tokens: Ints,
    active: Bools,
    draw: Callable[[Answer, Floats], object] = Answer.draw_token,
) -> bool:
    """Draft tokens for the active rows, and verify the drafts by one model call; return False, and run nothing, if
    there are none. Until it ends, each answer gets the tokens that the model draws: the draft up to the first
    difference, then one more. `answers` are in the first rows of `context`, and `tokens` [answers] has the last token
    of each. Update `tokens`, `active`, the timings, and the cached lengths of `context`. `draw` may store an error of a
    draw in the answer instead of raising it."""
    timings, starts = answers[0].result.timings, context.lengths.copy()
    inputs: list[list[int]] = [[] for _ in starts]
    for at in np.flatnonzero(active).tolist():
        answer = answers[at]
        # The last token drawn is never fed back, and the current token takes a cache slot itself.
        room = min(answer.limit - len(answer.result.tokens), context.capacity - int(starts.max())) - 1
        inputs[at] = [int(tokens[at]), *drafts[at].propose([*answer.begin, *answer.result.tokens], room)]
    if max(map(len, inputs)) == 1:
        return False
    begin = perf_counter()
    logits = context.extend_all(inputs)
    seconds = perf_counter() - begin
    for at in np.flatnonzero(active).tolist():
        answer, draft, count = answers[at], inputs[at][1:], 0
        for scores, expected in zip(logits[at], [*draft, None], strict=True):
            count += 1
            draw(answer, scores)
            tokens[at] = answer.result.tokens[-1]
            active[at] = answer.result.finish is None and answer.error is None
            if not active[at] or tokens[at] != expected:
                break
        drafts[at].record(len(draft), count - 1, seconds)
        timings.drafted_tokens += len(draft)
        timings.accepted_tokens += count - 1
        timings.decoded_tokens += count
        starts[at] += count
    context.rewind(starts)
    return True
