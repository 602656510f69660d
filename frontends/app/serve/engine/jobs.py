"""Jobs of the model (one answer, embedding or score each), and the channel that sends their pieces to a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.backends.runtime.core.answers import Answer
from weft.backends.runtime.core.results import Finish, TokenLogprobs
from weft.backends.runtime.text.tokenizer import Encoding


class JobError(Exception):
    """A job was rejected or not finished: the queue is full, the server shuts down, or the model has failed."""


class QueueFull(JobError):
    """Too many jobs wait."""


class ServerClosing(JobError):
    """The server is shutting down."""


class ClientGone(Exception):
    """The client has closed its connection, or does not read the response."""


@dataclass(frozen=True)
class AnswerPiece:
    """The new text and tokens of a job since its previous piece; the last piece has `finish`, `error` or `value`."""

    index: int
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    tokens: int = 0  # of the answer so far
    cached: int = 0  # tokens of the prompt whose caches were stored
    finish: Finish | None = None
    error: Exception | None = None
    value: Any = None  # an embedding, or scores


class Channel:
    """A queue of the pieces of a request's jobs, from the model's thread to the event loop of the request.

    Unread pieces of a job are joined, so that a slow reader needs no more memory than its answer.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, AnswerPiece] = {}
        self._arrived = asyncio.Event()
        self._is_disconnected = False

    def put(self, piece: AnswerPiece) -> None:
        """Add a piece; call it in the request's event loop."""
        previous = self._pieces.get(piece.index)
        if previous is not None:
            text, logprobs = previous.text + piece.text, [*previous.logprobs, *piece.logprobs]
            piece = replace(piece, text=text, logprobs=logprobs)
        self._pieces[piece.index] = piece
        self._arrived.set()

    def disconnect(self) -> None:
        """Record that the client is gone: `receive` then raises ClientGone."""
        self._is_disconnected = True
        self._arrived.set()

    async def receive(self) -> list[AnswerPiece]:
        """Wait for pieces, and return all that have arrived; raise ClientGone if the client is gone."""
        await self._arrived.wait()
        if self._is_disconnected:
            raise ClientGone
        self._arrived.clear()
        pieces, self._pieces = list(self._pieces.values()), {}
        return pieces


@dataclass(eq=False)
class Job:
    """An answer, or token ids to encode or score, whose pieces go to a `channel` under an `index`.

    `streams`: pieces are sent as text arrives; else only one piece at the end.
    """

    channel: Channel
    index: int = 0
    answer: Answer | None = None
    ids: Sequence[int] = ()
    encoded: Encoding | None = None  # an input whose labels are scored
    streams: bool = False
    adapter: str = ""  # that computes the answer
    start_time: float = field(default_factory=time.monotonic)
    n_sent: int = 0  # number of log-probabilities already sent
    n_tokens: int = 0  # number of generated tokens that the metrics have counted

    def next_piece(self) -> AnswerPiece | None:
        """Return the new parts of the job's answer since the last call, or None if there is nothing to send."""
        answer = self.answer
        assert answer is not None
        result = answer.result
        ended = result.finish is not None or answer.error is not None
        if not self.streams and not ended:
            return None
        text, logprobs = answer.pop_text(), result.logprobs[self.n_sent :]
        if not text and not ended:
            return None  # log-probabilities are sent with their text
        self.n_sent += len(logprobs)
        n_tokens, n_cached = len(result.tokens), result.timings.cached_tokens
        return AnswerPiece(self.index, text, logprobs, n_tokens, n_cached, result.finish, answer.error)
