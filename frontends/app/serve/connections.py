"""Connections: request bodies within limits, and responses to clients that may be slow or disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from .engine.constraints import ConstraintError
from .engine.jobs import AnswerPiece, Channel, ClientGone, Job, QueueFull, ServerClosing
from .engine.worker import Worker
from .protocol.errors import ApiError, bad_request
from .protocol.responses import encode_json, format_event
from .service import RunningReply


class Connection:
    """A response's connection to its client, which is closed if the client reads nothing for `seconds`."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        # uvicorn passes a method of an object that has the transport; other servers may not.
        self._transport = getattr(getattr(send, "__self__", None), "transport", None)
        self.status = 0  # of the response, once it has started
        self.ended = False

    async def send(self, message: Message) -> None:
        """Send a part of the response; raise ClientGone if the client does not read it in time."""
        self.status = message.get("status", self.status)
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            self.abort()
            raise ClientGone from None
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def flush(self) -> None:
        """Wait until the client has read the buffered data; close the connection if that exceeds the time limit."""
        try:
            async with asyncio.timeout(self._seconds):
                while self._transport is not None and self._transport.get_write_buffer_size():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request; raise ApiError if it exceeds `max_bytes`, or takes more than `seconds`."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise ApiError(413, f"The body of the request is larger than the maximum of {max_bytes} bytes.")
    except TimeoutError:
        raise ApiError(408, f"The body of the request did not arrive completely within {seconds:g} seconds.") from None
    return bytes(body)


@contextlib.asynccontextmanager
async def watch_client(receive: Receive, channel: Channel) -> AsyncIterator[None]:
    """While the block runs, mark `channel` as disconnected if the client closes its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        channel.disconnect()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def to_api_error(error: Exception) -> ApiError:
    """Return an exception as an ApiError, without details of internal failures."""
    match error:
        case ApiError():
            return error
        case ConstraintError():
            return bad_request(f"The answer cannot satisfy its constraint: {error}")
        case QueueFull():
            return ApiError(429, str(error), code="rate_limit_exceeded")
        case ServerClosing():
            return ApiError(503, "The server is shutting down.", code="service_unavailable")
    return ApiError(500, "The server had an error while processing your request.")


class Json(JSONResponse):
    """A JSON response, in UTF-8 and without spaces."""

    def render(self, content: Any) -> bytes:
        return encode_json(content)


async def collect_results(worker: Worker, request: Request, jobs: Sequence[Job], channel: Channel) -> list[Any]:
    """Wait for `jobs` and return their results in order; if one fails, cancel the rest and raise ApiError."""
    results: dict[int, Any] = {}
    try:
        async with watch_client(request.receive, channel):
            while len(results) < len(jobs):
                results |= {piece.index: piece.value for piece in await _receive_pieces(channel)}
    finally:
        if len(results) < len(jobs):
            worker.cancel(jobs)
    return [results[index] for index in range(len(jobs))]


async def _receive_pieces(channel: Channel) -> list[AnswerPiece]:
    """Wait for pieces of `channel` and return them; raise ApiError for a failed job, ClientGone for a closed client."""
    pieces = await channel.receive()
    if error := next((piece.error for piece in pieces if piece.error is not None), None):
        raise to_api_error(error)
    return pieces


async def send_json(answering: RunningReply, scope: Scope, receive: Receive, send: Send) -> None:
    """Wait for all answers to a request, and send them as one JSON object."""
    try:
        async with watch_client(receive, answering.channel):
            while not answering.reply.is_done:
                for piece in await _receive_pieces(answering.channel):
                    answering.reply.add(piece)
    except ClientGone:
        return
    finally:
        answering.close()
    await Json(answering.reply.to_object())(scope, receive, send)


async def send_stream(answering: RunningReply, scope: Scope, receive: Receive, send: Send) -> None:
    """Stream answers as server-sent events; errors during the stream are events as well."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    reply = answering.reply
    try:
        async with watch_client(receive, answering.channel):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            events = reply.begin()
            while not reply.is_done:
                if events:
                    await send(_make_body_message(events))
                events = b"".join(map(reply.stream, await _receive_pieces(answering.channel)))
        await send(_make_body_message(events + reply.end(), more=False))
    except ApiError as error:
        await send(_make_body_message(format_event(error.json()), more=False))
    except ClientGone:
        return
    finally:
        answering.close()


def _make_body_message(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
