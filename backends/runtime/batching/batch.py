"""The interface of batches, and code shared by both kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from weft.ir.errors import WeftError

from ..arrays import Floats
from ..core.answers import Answer
from ..core.decoder import CachedDecoder
from ..core.sampler import check_count


class Batch(ABC):
    """Answers that one decoder decodes together, at most `most` at a time; further answers wait in order of joining. An
    answer leaves the batch when its `result.finish` is set, or its own `error` (by NaN logits, for example). An error
    of a model call concerns all answers: `advance` raises it, and `close` must be called before its next use."""

    def __init__(self, decoder: CachedDecoder[Any], most: int) -> None:
        check_count("most", most)
        self.decoder, self.most = decoder, most
        self.waiting: deque[Answer] = deque()
        self.read_tokens = 0  # prompt tokens read so far; a resumed answer counts again
        self.drafted_tokens = self.accepted_tokens = 0  # of prompt look-up

    @property
    @abstractmethod
    def active(self) -> list[Answer]:
        """Return the answers that have a batch row and have not ended, in row order; waiting answers have none."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.active)

    def join(self, answer: Answer) -> None:
        """Add an answer to the end of the queue; it gets a batch row as soon as the kind of batch allows."""
        self.waiting.append(answer)

    @abstractmethod
    def leave(self, answer: Answer) -> None:
        """Remove an answer before it has ended; do nothing if it is not in the batch."""

    @abstractmethod
    def advance(self) -> list[Answer]:
        """Run prompt tokens of new answers, then at most one decode step; return the answers that got a token or an
        error. Answers that ended leave the batch."""

    @abstractmethod
    def close(self) -> None:
        """Empty the batch and release the caches; the batch may be used again."""


def draw_token(answer: Answer, logits: Floats) -> bool:
    """Draw the next token of `answer` from `logits` [vocab]; return whether the answer continues. A WeftError is not
    raised but stored as the answer's `error`."""
    try:
        answer.draw_token(logits)
    except WeftError as error:
        answer.error = error
    return answer.error is None and answer.result.finish is None
