"""Answers in progress: tokens drawn and text emitted for each prompt, token by token or with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from weft.ir.errors import WeftError

from ..arrays import Bools, Floats, Ints
from ..text.tokenizer import GrowingText, StopStrings, Tokenizer
from .batch_context import BatchContext
from .results import Result, TokenLogprobs
from .sampler import Sampler, TokenRules
from .speculation import Drafts


class Constraint(Protocol):
    """A formal language that an answer must belong to, checked token by token."""

    @property
    def complete(self) -> bool:
        """Return whether the accepted text belongs to the language and no token may follow it."""

    def masked(self, logits: Floats) -> Floats:
        """Return a copy of `logits` [vocab] with minus infinity for tokens that may not follow."""

    def accept(self, token: int) -> None:
        """Advance past `token`; a stop token of the model is allowed if the text may end here."""


class Answer:
    """The answer to one prompt, of at most `limit` tokens; its batch row begins with the tokens `begin`.

    With a `constraint`, the answer belongs to its language. With `logprobs` = n, the result has the log-probabilities
    of the answer's tokens and of the n most likely tokens at each position.
    """

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
        self._growing = GrowingText(tokenizer) if tokenizer else None
        self._stops = StopStrings(stops)
        self._constraint, self._logprobs = constraint, logprobs
        self._emitted = 0
        self.error: WeftError | None = None  # why it ended early, in a batch that continues

    def push(self, logits: Floats) -> int:
        """Draw the next token that forced tokens and the constraint allow from `logits` [vocab]; add and return it."""
        scores = self._forced(logits, len(self.result.tokens), self.limit)
        if self._constraint is not None:
            scores = self._constraint.masked(scores)
        token = self.sampler(scores)
        if self._logprobs is not None:
            self.result.logprobs.append(token_logprobs(logits, token, self._logprobs))
        return self.add(token)

    def add(self, drawn: int | np.int64) -> int:
        """Add the next token to the result, set `finish` if the answer ends with it, and return the token."""
        result, token = self.result, int(drawn)
        result.tokens.append(token)
        if token in self._stop_ids:
            result.finish = "stop"
        else:
            if self._growing:
                result.text += self._stops.push(self._growing.push(token))
            if self._constraint is not None:
                self._constraint.accept(token)
            if self._stops.found:
                result.finish = "stop_string"
            elif self._constraint is not None and self._constraint.complete:
                result.finish = "stop"
            elif len(result.tokens) == self.limit:
                result.finish = "length"
        if self._growing and result.finish in ("stop", "length"):
            result.text += self._stops.push(self._growing.flush()) + self._stops.flush()
            # The withheld text may complete a stop string.
            if self._stops.found:
                result.finish = "stop_string"
        return token

    def take(self) -> str:
        """Return the text that was added since the last call."""
        piece = self.result.text[self._emitted :]
        self._emitted += len(piece)
        return piece


def token_logprobs(logits: Floats, token: int, most: int) -> TokenLogprobs:
    """Return the log-probabilities of `token` and of the `most` likeliest tokens after `logits` [vocab]."""
    shifted = logits - logits.max()
    total = np.float32(np.log(np.exp(shifted, dtype=np.float32).sum(dtype=np.float64)))
    most = min(most, logits.size)
    best = np.argpartition(-shifted, most - 1)[:most] if most else np.empty(0, np.int64)
    best = best[np.lexsort((best, -shifted[best]))]
    return TokenLogprobs(
        token, float(shifted[token] - total), tuple((int(i), float(shifted[i] - total)) for i in best.tolist())
    )


def advance(
    rows: Sequence[Answer], add: Callable[[Answer, Any], int], values: Floats | Ints, tokens: Ints, active: Bools
) -> int:
    """Call `add(row, values[i])` for every active row i; `values` are next tokens or their logits, one per row.

    Store the added tokens in `tokens` and clear `active` for rows that end. Return the number of tokens added.
    """
    indices = np.flatnonzero(active).tolist()
    for at in indices:
        tokens[at] = add(rows[at], values[at])
        active[at] = rows[at].result.finish is None
    return len(indices)


def verify(
    context: BatchContext, answers: Sequence[Answer], drafts: Sequence[Drafts], tokens: Ints, active: Bools
) -> None:
    """Verify drafts of the active rows by one model call: push tokens up to the first that differs from its draft.

    Update `tokens` and `active` as `advance` does, the timings, and the cached lengths.
    """
    timings, starts = answers[0].result.timings, context.lengths.copy()
    inputs: list[list[int]] = [[] for _ in answers]
    for at in np.flatnonzero(active).tolist():
        answer = answers[at]
        # The last token drawn is never fed back, and the current token takes a cache slot itself.
        room = min(answer.limit - len(answer.result.tokens), context.capacity - int(starts.max())) - 1
        inputs[at] = [int(tokens[at]), *drafts[at].propose([*answer.begin, *answer.result.tokens], room)]
    if max(map(len, inputs)) == 1:
        timings.decoded_tokens += advance(answers, Answer.push, context.step(tokens, active), tokens, active)
        return
    logits = context.extend_all(inputs)
    for at in np.flatnonzero(active).tolist():
        answer, draft, count = answers[at], inputs[at][1:], 0
        for scores, expected in zip(logits[at], [*draft, None], strict=True):
            count += 1
            tokens[at] = answer.push(scores)
            if answer.result.finish is not None or tokens[at] != expected:
                break
        drafts[at].adapt(len(draft), count - 1)
        timings.drafted_tokens += len(draft)
        timings.accepted_tokens += count - 1
        timings.decoded_tokens += count
        starts[at] += count
        active[at] = answer.result.finish is None
    context.rewind(starts)
