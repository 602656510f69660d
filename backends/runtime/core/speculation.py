"""Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192): one call of the model verifies drafted tokens.

The drafts here are deterministic: the draft distribution puts probability 1 on its token. The rule of speculative
sampling, accept token x with probability p(x) and else draw from p without x, is then: draw from p, and accept x if it
was drawn. So each token is drawn from the model's own logits, by the same sampler and with the same random number as
without drafts: the answers are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from weft.ir.errors import WeftError

from .batch_context import split_chunks
from .decoder import CachedDecoder
from .sampler import check_count

LONGEST, SHORTEST = 4, 2  # tokens of the n-grams that are looked up
MAX_PAUSE = 16
MOST = 8  # tokens of a draft by default
TRIAL_SHARE, MOST_CREDIT = 0.01, 8.0  # decode steps: for trials, per step; saved ones that trials may use up


class Drafter(ABC):
    """A source of drafts for one sequence."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow `tokens`, prompt and answer, which grow from call to call."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release resources; the drafter must not be used afterwards."""


class PromptLookup(Drafter):
    """A drafter by prompt look-up (Saxena 2023): it finds the longest n-gram (2 to 4 tokens) at the end of the sequence
    that occurred before, and proposes the tokens that followed its last earlier occurrence, repeated if there are too
    few. Without such an n-gram, of at least `shortest` tokens, it proposes nothing."""

    def __init__(self) -> None:
        self.shortest = SHORTEST
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> end of its last occurrence
        self._indexed = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for end in range(max(self._indexed, SHORTEST), len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._follows[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens)
        for n in range(min(LONGEST, len(tokens)), self.shortest - 1, -1):
            if (at := self._follows.get(tuple(tokens[-n:]))) is not None:
                return list(islice(cycle(tokens[at:]), most))
        return []


class Assistant(Drafter):
    """A drafter that proposes the greedy continuation by a smaller model with the same vocabulary."""

    def __init__(self, decoder: CachedDecoder[Any], capacity: int) -> None:
        self._context = decoder.new_context(1, min(capacity, decoder.max_length))
        self._chunk = decoder.chunk

    def close(self) -> None:
        self._context.close()

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        context = self._context
        room = context.capacity - len(tokens)
        if room < 1:
            return []
        context.rewind(cached) if (cached := context.count_cached(tokens)) else context.reset()
        for part in split_chunks(tokens[cached:], self._chunk):
            scores = context.extend(part)[-1]
        drafted = [int(scores.argmax())]
        while len(drafted) < min(most, room):
            drafted.append(int(context.step(drafted[-1:])[0].argmax()))
        return drafted


@dataclass(frozen=True)
class Speculation:
    """The settings of speculative decoding: drafts of at most `prompt_lookup_num_tokens` tokens by prompt look-up
    (None: `ThriftyDrafts`; 0: none), or of at most `num_assistant_tokens` by the model `assistant`. Its truth value is
    False if there are no drafts. Raises WeftError on a value outside its range, if both are set, and on
    `num_assistant_tokens` without an assistant."""

    prompt_lookup_num_tokens: int | None = 0
    assistant: CachedDecoder[Any] | None = None
    num_assistant_tokens: int = 5

    def __post_init__(self) -> None:
        if self.prompt_lookup_num_tokens not in (None, 0):
            check_count("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens)
        check_count("num_assistant_tokens", self.num_assistant_tokens)
        if self.assistant is None and self.num_assistant_tokens != Speculation.num_assistant_tokens:
            raise WeftError(f"num_assistant_tokens is {self.num_assistant_tokens}, but there is no assistant: set one")
        if self.prompt_lookup_num_tokens and self.assistant is not None:
            raise WeftError(
                f"prompt_lookup_num_tokens is {self.prompt_lookup_num_tokens}, but there is an assistant too, and only "
                "one can draft tokens: leave out either"
            )

    def __bool__(self) -> bool:
        return self.prompt_lookup_num_tokens != 0 or self.assistant is not None

    def check(self, decoder: CachedDecoder[Any]) -> None:
        """Check that `decoder` can verify drafts: it must rewind, accept padding and return all logits. The assistant,
        if set, must be a decoder that can rewind, with the same vocabulary. Raises WeftError if not."""
        if not decoder.can_rewind or not decoder.padded:
            why = "tokens compete for experts" if decoder.can_rewind else "states and rolling caches cannot drop tokens"
            raise WeftError(f"the model cannot verify drafted tokens, because {why}: generate without drafts")
        if not decoder.every_position:
            raise WeftError(
                "the model returns the logits of the last token only, so it cannot verify drafted tokens: "
                'compile it with --passes "default,-last-token-logits"'
            )
        if self.assistant is None:
            return
        if self.assistant.vocab != decoder.vocab:
            raise WeftError(
                f"the assistant has {self.assistant.vocab} tokens, but the model has {decoder.vocab}: use an assistant "
                "with the same vocabulary"
            )
        if not self.assistant.can_rewind or self.assistant.start is not None:
            raise WeftError(
                "the assistant cannot drop rejected tokens: use a decoder without recurrent states and rolling caches"
            )

    def new_drafts(self, capacity: int) -> Drafts:
        """Return the `Drafts` of a new row of at most `capacity` tokens; an assistant gets caches for it."""
        if self.prompt_lookup_num_tokens is None:
            return ThriftyDrafts()
        if self.assistant is None:
            return Drafts(PromptLookup(), self.prompt_lookup_num_tokens)
        return Drafts(Assistant(self.assistant, capacity), self.num_assistant_tokens)


class Drafts:
    """The drafts for one batch row, of at most `most` tokens each. If n > 0 tokens of a draft were correct, the next
    draft has up to 2n tokens if it was correct entirely, else up to n + 1. After k consecutive drafts without a correct
    token, the next min(2^(k−1), 16) steps draft nothing."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter, self._most, self._count = drafter, most, most
        self._failures = self._pause = 0  # drafts in a row without a right token; steps left without a draft

    def propose(self, tokens: Sequence[int], room: int) -> list[int]:
        """Return a draft of at most `room` tokens that may follow `tokens`, the prompt and the answer so far."""
        if self._pause > 0:
            self._pause -= 1
            return []
        count = min(self._count, room)
        return self._drafter.propose(tokens, count) if count > 0 else []

    def close(self) -> None:
        """Release the drafter's resources."""
        self._drafter.close()

    def record(self, drafted: int, accepted: int, seconds: float) -> None:
        """Adapt later drafts to the last model call, which took `seconds`: the model accepted `accepted` of the
        `drafted` tokens (0 of 0: a decode step without a draft)."""
        if drafted:
            self._failures = 0 if accepted else self._failures + 1
            self._pause = 0 if accepted else min(2 ** (self._failures - 1), MAX_PAUSE)
            self._count = min(self._most, 2 * accepted if accepted == drafted else accepted + 1)


class ThriftyDrafts(Drafts):
    """Drafts by prompt look-up that take no more time than they save, except for trials in 1% of the time.

    An account in units of decode steps starts with one step, and gets 0.01 for each step. A draft must be affordable if
    all its tokens are wrong, at the measured cost per token. Until a draft is right, it needs the longest n-gram.
    """

    def __init__(self, most: int = MOST) -> None:
        self._lookup = PromptLookup()
        super().__init__(self._lookup, most)
        self._account, self._cost, self._step_seconds = 1.0, 0.3, 0.0
        self._count, self._lookup.shortest = min(SHORTEST, most), LONGEST

    def propose(self, tokens: Sequence[int], room: int) -> list[int]:
        # Without the time of a step, the cost of a draft cannot be measured.
        affordable = int(self._account / self._cost) if self._step_seconds else 0
        return super().propose(tokens, min(room, affordable))

    def record(self, drafted: int, accepted: int, seconds: float) -> None:
        if not drafted:
            self._step_seconds += (seconds - self._step_seconds) / (4 if self._step_seconds else 1)
            self._account = min(self._account + TRIAL_SHARE, MOST_CREDIT)
            return
        # Clipped, because another process may have delayed this call.
        cost = min(max((seconds / self._step_seconds - 1) / drafted, 0.01), 1.0)
        self._cost += (cost - self._cost) / 4
        self._account = min(self._account + accepted - drafted * self._cost, MOST_CREDIT)
        self._count = min(self._most, 2 * accepted if accepted == drafted else max(accepted + 1, SHORTEST))
        self._lookup.shortest = SHORTEST if accepted else LONGEST
