"""Results of generation: texts and tokens, reasons of their ends, and costs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

Finish = Literal["stop", "stop_string", "length"]


@dataclass(frozen=True)
class ExpertCounts:
    """Experts of mixtures whose weights are not all on the device: how many were asked, how many of those were found
    there, some of them because they had been guessed, and the bytes that were brought in."""

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
    """Time and memory of a call; of a batch, all rows together. Prefill includes sampling the first tokens."""

    prompt_tokens: int = 0  # those read: a conversation keeps what it has read before
    prefill_seconds: float = 0.0
    decoded_tokens: int = 0  # those after the first of each row
    decode_seconds: float = 0.0
    drafted_tokens: int = 0  # of speculative decoding, and those of them that were right
    accepted_tokens: int = 0
    cache_bytes: int = 0  # allocated for caches and states
    experts: ExpertCounts = ExpertCounts()  # what decoding asked of experts that are not all on the device

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, by the model's own logits, before temperature, penalties
    and constraints: of the token that was taken, and of the most likely ones, these first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Result:
    """Result of one prompt; grows while it is streamed."""

    prompt: Any  # its tokens, a list; or the array of a sound
    tokens: list[int] = field(default_factory=list)  # all that were generated, the stop token included
    text: str = ""  # without special tokens, cut before a stop string; empty where there is no tokenizer
    finish: Finish | None = None  # a stop token, a stop string, or max_tokens or the model's maximum; None: not yet
    score: float | None = None  # of a beam search: log-probability / length^length_penalty
    timings: Timings = field(default_factory=Timings, compare=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each of `tokens`, where they were asked for

    def __str__(self) -> str:
        return self.text
