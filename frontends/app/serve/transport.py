"""The transport: time limits for slow requests, a maximum of connections, and a log that clients cannot flood."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_RECORDS, PERIOD = 5, 60.0  # log records per source line, seconds
_log = logging.getLogger("weft.serve")


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 by h11 for at most `max_connections` connections, each of whose requests must arrive within `seconds`.

    uvicorn itself waits forever for the end of a request's header. Beyond the limit a new connection replaces the one
    that has waited longest for its request: half-open connections cannot keep other clients out.
    """

    seconds: float
    max_connections: int
    waiting: dict[BoundedProtocol, None]  # connections of a server whose timers run, the oldest first
    _timer: asyncio.TimerHandle | None = None
    _stage: tuple[Any, Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn narrows it
        self._update_timer()
        if len(self.connections) > self.max_connections:
            _log.warning("more than %d connections: one without a complete request is closed", self.max_connections)
            next(iter(self.waiting)).abort_late()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def abort_late(self) -> None:
        """Close the connection without waiting for the rest of its request."""
        self._stop_timer()
        self.connections.discard(self)  # uvicorn only notices in the next round of the loop
        self.transport.abort()

    def _update_timer(self) -> None:
        """Run the timer while a request or its body is expected; each request and each body restart it."""
        stage = (self.conn.their_state, self.cycle)
        if stage == self._stage or self.transport.is_closing():
            return
        self._stop_timer()
        self._stage = stage
        if stage[0] in (h11.IDLE, h11.SEND_BODY):
            # One more second for bodies: the endpoint that reads a body reports its timeout first.
            seconds = self.seconds + (stage[0] is h11.SEND_BODY)
            self._timer = self.loop.call_later(seconds, self.abort_late)
            self.waiting[self] = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.waiting.pop(self, None)


def choose_max_connections() -> int:
    """Return a number of connections that leaves file descriptors for other uses: half of their limit, 8 to 4096."""
    try:
        import resource
    except ImportError:  # Windows, where select() supports 512
        return 256
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if limit == resource.RLIM_INFINITY else max(8, min(limit // 2, 4096))


def make_protocol(seconds: float, max_connections: int) -> type[BoundedProtocol]:
    """Return a subclass of BoundedProtocol for one server, with its limits and its own table of connections."""
    return type("Protocol", (BoundedProtocol,), {"seconds": seconds, "max_connections": max_connections, "waiting": {}})


class RateLimit(logging.Filter):
    """A logging filter that passes at most `MAX_RECORDS` records from each source line within `PERIOD` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        source, now = (record.pathname, record.lineno), time.monotonic()
        start, count = self._counts.get(source, (now, 0))
        start, count = (now, 1) if now - start > PERIOD else (start, count + 1)
        self._counts[source] = start, count
        if count == MAX_RECORDS:
            record.msg = f"{record.msg} (further records of this kind within {PERIOD:g} s are not logged)"
        return count <= MAX_RECORDS


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop in one line, such as a connection that cannot be accepted yet."""
    error = context.get("exception")
    _log.error("%s: %s: %s", context["message"], type(error).__name__, error)
