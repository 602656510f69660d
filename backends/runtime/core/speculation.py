"""Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192): one call of the model verifies drafted tokens.

The drafts here are deterministic: the draft distribution puts probability 1 on its token. The rule of speculative
sampling, accept token x with probability p(x) and else draw from p without x, is then: draw from p, and accept x if it
was drawn. So every position is sampled from the model's own logits with the same random number of the same sampler as
without drafts, and the tokens are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError

from .batch_context import parts
from .decoder import CachedDecoder
from .sampler import check_count

LONGEST, SHORTEST = 4, 2  # tokens of the n-grams that are looked up
MOST_REST = 16


class Drafter(ABC):
    """A source of drafts for one sequence."""

    @abstractmethod
    def propose(self, text: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow the tokens `text`. Each call has all tokens of the last call."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release resources; the drafter must not be used afterwards."""


class PromptLookup(Drafter):
    """A drafter by prompt look-up (Saxena 2023): it takes the longest n-gram at the end of the sequence that occurred
    before, and proposes the tokens that followed its last occurrence."""

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> end of its last occurrence
        self._indexed = 0

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        for end in range(max(self._indexed, SHORTEST), len(text)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._follows[tuple(text[end - n : end])] = end
        self._indexed = len(text)
        for n in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            if (at := self._follows.get(tuple(text[-n:]))) is not None:
                return _repeat_from(text, at, most)
        return []


def _repeat_from(text: Sequence[int], at: int, most: int) -> list[int]:
    """Return `most` tokens: `text[at:]`, repeated as often as necessary and cut to length."""
    period = len(text) - at
    return [text[at + i % period] for i in range(most)]


class Assistant(Drafter):
    """A drafter that proposes the greedy continuation of a smaller model with the same vocabulary."""

    def __init__(self, decoder: CachedDecoder[Any], capacity: int) -> None:
        self._context = decoder.new_context(1, min(capacity, decoder.max_length))
        self._chunk = decoder.chunk

    def close(self) -> None:
        self._context.close()

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        context = self._context
        room = context.capacity - len(text)
        if room < 1:
            return []
        context.rewind(keep) if (keep := context.count_cached(text)) else context.reset()
        for part in parts(text[keep:], self._chunk):
            scores = context.extend(part)[-1]
        drafted = [int(scores.argmax())]
        while len(drafted) < min(most, room):
            drafted.append(int(context.step(drafted[-1:])[0].argmax()))
        return drafted


@dataclass(frozen=True)
class Speculation:
    """The source of drafts: prompt look-up of at most `prompt_lookup_num_tokens` tokens at a time, or the model
    `assistant` with at most `num_assistant_tokens`; False if neither is set.

    Raises WeftError on a value outside its range, and on `num_assistant_tokens` without an assistant.
    """

    prompt_lookup_num_tokens: int = 0
    assistant: CachedDecoder[Any] | None = None
    num_assistant_tokens: int = 5

    def __post_init__(self) -> None:
        if self.prompt_lookup_num_tokens != 0:
            check_count("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens)
        check_count("num_assistant_tokens", self.num_assistant_tokens)
        if self.assistant is None and self.num_assistant_tokens != Speculation.num_assistant_tokens:
            raise WeftError(f"num_assistant_tokens is {self.num_assistant_tokens}, but there is no assistant: give one")
        if self.prompt_lookup_num_tokens and self.assistant is not None:
            raise WeftError("tokens are drafted by prompt look-up or by an assistant: give one of them")

    def __bool__(self) -> bool:
        return self.prompt_lookup_num_tokens > 0 or self.assistant is not None

    def check(self, decoder: CachedDecoder[Any]) -> None:
        """Check that `decoder` can verify drafts and that the assistant can propose them. Raises WeftError if not."""
        if not decoder.rewinds or not decoder.padded:
            why = "its tokens compete" if decoder.rewinds else "states and rolling caches cannot drop tokens again"
            raise WeftError(f"the model cannot verify drafted tokens: {why}")
        if not decoder.every_position:
            raise WeftError(
                "the model gives the logits of the last token alone, so it cannot verify drafted tokens: "
                'compile it with --passes "default,-last-token-logits"'
            )
        if self.assistant is None:
            return
        if self.assistant.vocab != decoder.vocab:
            raise WeftError(
                f"the assistant has {self.assistant.vocab} tokens, but the model has {decoder.vocab}: it must be one "
                "of the same vocabulary"
            )
        if not self.assistant.rewinds or self.assistant.start is not None:
            raise WeftError(
                "the assistant must be a decoder that can drop tokens: one without states and rolling caches"
            )

    def drafts(self, capacity: int) -> Drafts:
        """Return new drafts for a batch row of at most `capacity` tokens."""
        if self.assistant is None:
            return Drafts(PromptLookup(), self.prompt_lookup_num_tokens)
        return Drafts(Assistant(self.assistant, capacity), self.num_assistant_tokens)


class Drafts:
    """The drafts of one batch row, of at most `most` tokens. A draft has one token more than the last draft had
    correct tokens, or twice the length of the last draft if all its tokens were correct.

    After n consecutive drafts without a correct token, the next 2^(n-1) steps (at most 16) draft nothing.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter, self._most, self._count = drafter, most, most
        self._wrong = self._rest = 0  # drafts in a row without a right token; steps left without a draft

    def propose(self, text: Sequence[int], room: int) -> list[int]:
        """Return at most `room` tokens that may follow the tokens `text`."""
        if self._rest > 0:
            self._rest -= 1
            return []
        count = min(self._count, room)
        return self._drafter.propose(text, count) if count > 0 else []

    def close(self) -> None:
        """Release the drafter's resources."""
        self._drafter.close()

    def adapt(self, drafted: int, accepted: int) -> None:
        """Adapt the length of later drafts: the model accepted `accepted` of the `drafted` tokens."""
        if drafted:
            self._wrong = 0 if accepted else self._wrong + 1
            self._rest = 0 if accepted else min(2 ** (self._wrong - 1), MOST_REST)
            self._count = min(self._most, 2 * accepted if accepted == drafted else accepted + 1)
