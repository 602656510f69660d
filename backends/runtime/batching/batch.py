"""The interface of batches, and what their kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from weft.ir.errors import WeftError

from ..arrays import Floats
from ..core.answers import Answer
from ..core.decoder import Decoder
from ..core.sampling import check_count


class Batch(ABC):
    """Answers of one decoder that are decoded together, at most `most` at a time; the others wait in the order in which
    they joined.

    An answer leaves when its result has a `finish`, or with an `error` of its own, such as logits that are no numbers.
    Errors of the model itself are raised: then `clear` empties the batch, and it may be used again.
    """

    def __init__(self, decoder: Decoder[Any], most: int) -> None:
        check_count("most", most)
        self.decoder, self.most = decoder, most
        self.waiting: deque[Answer] = deque()
        self.read_tokens = 0  # tokens of prompts read so far, those of resumed answers again

    @property
    @abstractmethod
    def active(self) -> list[Answer]:
        """The answers that have rows."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.active)

    def join(self, answer: Answer) -> None:
        """Add an answer, which gets a row as soon as one is free."""
        self.waiting.append(answer)

    @abstractmethod
    def leave(self, answer: Answer) -> None:
        """Take an answer out before it has ended; nothing happens where it is not in the batch."""

    @abstractmethod
    def advance(self) -> list[Answer]:
        """Go on by one step at most: the answers that have got a token or an error; the ended ones have left."""

    @abstractmethod
    def close(self) -> None:
        """Release the caches; the batch is empty afterwards, and may be used again."""


def push(answer: Answer, logits: Floats) -> bool:
    """Let `answer` draw its next token; whether it goes on. What it cannot draw becomes its error."""
    try:
        answer.push(logits)
    except WeftError as error:
        answer.error = error
    return answer.error is None and answer.result.finish is None
