"""Jobs of the model: one answer or one embedding each, and the channel by which a request hears of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.backends.runtime.core.answers import Answer
from weft.backends.runtime.core.results import Finish, TokenLogprobs
from weft.backends.runtime.text.tokenizer import Encoded


class Refused(Exception):
    """A job that the model does not take or finish: its queue is full, the server ends, or the model has failed."""


class Full(Refused):
    """Too many jobs wait."""


class Closing(Refused):
    """The server is shutting down."""


class Gone(Exception):
    """The client has closed its connection, or does not read."""


@dataclass(frozen=True)
class Piece:
    """The text and tokens of a job since its last piece; `finish` or `error` say that it was the last."""

    index: int
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    tokens: int = 0  # of the answer so far
    finish: Finish | None = None
    error: Exception | None = None
    value: Any = None  # of an embedding

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None or self.value is not None


class Channel:
    """Pieces of a request's jobs, from the model's thread to the loop of the request.

    Pieces that nobody has taken are joined, so a slow reader holds no more than its answer.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}
        self._came = asyncio.Event()
        self._gone = False

    def put(self, piece: Piece) -> None:
        """Add a piece; in the loop of the request."""
        held = self._pieces.get(piece.index)
        if held is not None:
            piece = Piece(
                piece.index,
                held.text + piece.text,
                [*held.logprobs, *piece.logprobs],
                piece.tokens,
                piece.finish,
                piece.error,
                piece.value,
            )
        self._pieces[piece.index] = piece
        self._came.set()

    def leave(self) -> None:
        """Note that the client is gone: whoever waits for pieces hears of it."""
        self._gone = True
        self._came.set()

    async def take(self) -> list[Piece]:
        """Wait for pieces, and return all that have come. Raises Gone where the client is."""
        await self._came.wait()
        if self._gone:
            raise Gone
        self._came.clear()
        pieces, self._pieces = list(self._pieces.values()), {}
        return pieces


@dataclass(eq=False)
class Job:
    """An answer, or token ids to encode or score, whose pieces go to a `channel` under an `index`.

    `streams`: text is wanted as it comes; otherwise there is one piece at the end.
    """

    channel: Channel
    index: int = 0
    answer: Answer | None = None
    ids: Sequence[int] = ()
    encoded: Encoded | None = None  # a text whose labels are scored
    streams: bool = False
    began: float = field(default_factory=time.monotonic)
    sent: int = 0  # log-probabilities that went out
    started: bool = False  # it has got a token

    def piece(self) -> Piece | None:
        """Return what the answer has given since the last call; None where there is nothing to say."""
        answer = self.answer
        assert answer is not None
        result = answer.result
        if not self.streams and result.finish is None and answer.error is None:
            return None
        text, logprobs = answer.take(), result.logprobs[self.sent :]
        ended = result.finish is not None or answer.error is not None
        if not text and not ended:
            return None  # log-probabilities wait for their text
        self.sent += len(logprobs)
        return Piece(self.index, text, logprobs, len(result.tokens), result.finish, answer.error)
