"""Results of generation: text and tokens of an answer, why it ended, and timings."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

Finish = Literal["stop", "stop_string", "length"]


@dataclass(frozen=True)
class ExpertCounts:
    """Counts of expert offloading, summed over mixtures and runs.

    - asked: experts used
    - found: those of `asked` that were on the device already
    - guessed: those of `found` that a prefetch had loaded
    - bytes: bytes copied to the device
    """

    asked: int = 0
    found: int = 0
    guessed: int = 0
    bytes: int = 0

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass
class Timings:
    """Time and memory of a generation, summed over its batch. Prefill includes sampling the first tokens."""

    prompt_tokens: int = 0  # without `cached_tokens`
    cached_tokens: int = 0  # of prompts, from the caches of earlier answers
    prefill_seconds: float = 0.0
    decoded_tokens: int = 0  # without the first of each row
    decode_seconds: float = 0.0
    drafted_tokens: int = 0  # of speculative decoding
    accepted_tokens: int = 0  # correct drafts
    cache_bytes: int = 0  # allocated for caches and states
    experts: ExpertCounts = ExpertCounts()  # during decoding, if not all experts are on the device

    @property
    def prefill_rate(self) -> float:
        """Return the prompt tokens per second; 0 if no time was measured."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Return the decoded tokens per second; 0 if no time was measured."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, before temperature, penalties and constraints. `logprob` is that of
    the chosen `token`; `top` has (token, log-probability) of the likeliest tokens, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Result:
    """The result of one prompt; while it is streamed, `tokens`, `text` and `logprobs` grow."""

    prompt: Any  # the prompt: a list of token ids, or the array of a sound
    tokens: list[int] = field(default_factory=list)  # all generated tokens, the stop token included
    text: str = ""  # without special tokens, cut before a stop string; empty without a tokenizer
    finish: Finish | None = None  # ended by a stop token, a stop string or the length limit; None: not ended
    score: float | None = None  # of a beam search: log-probability / length^length_penalty
    timings: Timings = field(default_factory=Timings, compare=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each of `tokens`, if requested

    def __str__(self) -> str:
        return self.text
