"""Interface between generation and a backend: a decoder, and the caches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Ints
from .sampling import Sampler

Bools = NDArray[np.bool_]


class Context(Protocol):
    """The caches of one batch in use. Logits are float32 and valid until the next call."""

    capacity: int
    lengths: Ints

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for caches and states."""
        ...

    def reset(self) -> None:
        """Empty every row."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Floats:
        """Start all rows anew: the logits after each prompt, [batch, vocab].

        Fewer prompts than rows are spread over neighbouring rows; a single row keeps `keep` tokens of its prompt.
        """
        ...

    def held(self, prompt: Sequence[int]) -> int:
        """Return the number of first tokens of `prompt` that the single row has cached and may keep."""
        ...

    def step(self, tokens: Ints, active: Bools | None = None) -> Floats:
        """Append a token to the active rows: the logits after it, [batch, vocab]."""
        ...

    def drawing(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function that appends a token to the active rows, as `step` does, and samples the next ones as
        `samplers` would; None if they must do it themselves."""
        ...

    def extend(self, tokens: Sequence[int]) -> Floats:
        """Append tokens to the one row: their logits, [seq or 1, vocab]."""
        ...

    def gather(self, rows: Ints) -> None:
        """Row r continues what row `rows[r]` holds."""
        ...

    def take(self, other: Any) -> None:
        """Hold what `other`, a context of the same decoder and of no larger capacity, holds."""
        ...


class Decoder(Protocol):
    """A language model that keeps caches: all that generating needs to know of a backend."""

    vocab: int
    max_length: int
    every_position: bool  # it gives the logits of all tokens of a call, rather than of the last

    @property
    def max_prompt(self) -> int:
        """The most tokens of a prompt."""
        ...

    @property
    def start(self) -> tuple[int, ...] | None:
        """Tokens that every row begins with if prompts are sources; None if a row begins with its prompt."""
        ...

    def context(self, batch: int, tokens: int) -> AbstractContextManager[Context]:
        """Caches for `batch` rows of at most `tokens` tokens each."""
        ...
