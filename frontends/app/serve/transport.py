"""The transport: clients whose requests do not come, connections beyond a limit, and a log that they cannot flood."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_RECORDS, PERIOD = 5, 60.0  # of one place in the code, in so many seconds
_log = logging.getLogger("weft.serve")


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 by h11 for at most `most` connections, each of whose requests must come within `seconds`.

    uvicorn itself waits without end for the rest of a request's head. Beyond the limit a new connection replaces the
    one that has waited for its request for longest: half-open connections cannot keep other clients out.
    """

    seconds: float
    most: int
    waiting: dict[BoundedProtocol, None]  # those of a server whose timers run, the oldest first
    _timer: asyncio.TimerHandle | None = None
    _stage: tuple[Any, Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn narrows it
        self._watch()
        if len(self.connections) > self.most:
            _log.warning("more than %d connections: one that has sent no whole request is closed", self.most)
            next(iter(self.waiting)).give_up()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def give_up(self) -> None:
        """Cut the connection: its request has not come whole."""
        self._stop()
        self.connections.discard(self)  # uvicorn hears of it in the next round of the loop only
        self.transport.abort()

    def _watch(self) -> None:
        """Let the timer run while a request, or the rest of one, is to come; each, and each body, starts it anew."""
        stage = (self.conn.their_state, self.cycle)
        if stage == self._stage or self.transport.is_closing():
            return
        self._stop()
        self._stage = stage
        if stage[0] in (h11.IDLE, h11.SEND_BODY):
            # A second more: the endpoint that reads a body answers first, where it takes too long.
            seconds = self.seconds + (stage[0] is h11.SEND_BODY)
            self._timer = self.loop.call_later(seconds, self.give_up)
            self.waiting[self] = None

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.waiting.pop(self, None)


def most_connections() -> int:
    """Return how many connections leave enough file descriptors for all else: half of this process's limit."""
    try:
        import resource
    except ImportError:  # Windows, where a select() takes 512
        return 256
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if limit == resource.RLIM_INFINITY else max(8, min(limit // 2, 4096))


def protocol(seconds: float, most: int) -> type[BoundedProtocol]:
    """Return the protocol of one server."""
    return type("Protocol", (BoundedProtocol,), {"seconds": seconds, "most": most, "waiting": {}})


class Sparing(logging.Filter):
    """Let through `MOST_RECORDS` records of a place in the code in `PERIOD` seconds, and say so with the last."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        begun, count = self._counts.get(place, (now, 0))
        begun, count = (now, 1) if now - begun > PERIOD else (begun, count + 1)
        self._counts[place] = begun, count
        if count == MOST_RECORDS:
            record.msg = f"{record.msg} (the next ones of this kind within {PERIOD:g} s are not logged)"
        return count <= MOST_RECORDS


def log_trouble(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log in one line what the event loop could not do, such as accepting a connection: it tries again in a second."""
    error = context.get("exception")
    _log.error("%s: %s: %s", context["message"], type(error).__name__, error)
