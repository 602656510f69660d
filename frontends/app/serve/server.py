"""The server: a socket, uvicorn, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.ir.errors import WeftError

from .application import build_application
from .server_settings import ServerSettings
from .service import Service
from .transport import RateLimit, choose_max_connections, log_loop_error, make_protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOGGERS = ("asyncio", "uvicorn.error", "weft.serve")
QUEUE = 2048  # connections that the kernel holds until they are accepted
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port` (0: any free port); raise WeftError if it is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise WeftError(f"--host {host} is not an address of this machine: {error.strerror}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(QUEUE)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise WeftError(f"port {port} of {host} is in use: choose another with --port") from error
        reason = (error.strerror or str(error)).lower()
        raise WeftError(f"port {port} of {host} cannot be used: {reason}; choose another with --port") from error
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """Return whether a socket accepts connections from this machine only."""
    address: str = listening.getsockname()[0]
    return address.startswith("127.") or address == "::1"


class Server:
    """A model served on a listening socket, from `run` to `stop` or a signal.

    The first SIGINT or SIGTERM lets running answers continue for `settings.drain` seconds, a second one ends them.
    """

    def __init__(self, model: Generator | EncoderModel, listening: socket.socket, settings: ServerSettings) -> None:
        self.service, self._listening, self._settings = Service(model, settings), listening, settings
        n_connections = choose_max_connections()
        self._protocol = make_protocol(settings.client_timeout, n_connections)
        config = uvicorn.Config(
            build_application(self.service),
            http=self._protocol,
            backlog=n_connections // 8,  # asyncio accepts this many at once, before the first counts as a connection
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.drain) + 5,
        )
        self._uvicorn = _Uvicorn(config, self._on_signal)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """Return the port that the server listens on."""
        number: int = self._listening.getsockname()[1]
        return number

    @property
    def started(self) -> bool:
        """Return whether the server accepts requests."""
        return self._uvicorn.started

    def run(self) -> None:
        """Serve until `stop` is called or a signal arrives, then shut down."""
        record_filter = RateLimit()
        for name in LOGGERS:
            logging.getLogger(name).addFilter(record_filter)
        try:
            asyncio.run(self._serve())
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(record_filter)
            self.service.close()
            self._listening.close()

    def stop(self) -> None:
        """Start the same shutdown as the first signal, from any thread. Without effect before `run` has started its
        loop."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._drain)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(log_loop_error)
        self.service.start(self._loop)
        await self._uvicorn.serve(sockets=[self._listening])
        if self._end is not None:
            self._end.cancel()

    def _on_signal(self, again: bool) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end_answers if again else self._drain)

    def _drain(self) -> None:
        assert self._loop is not None
        self._uvicorn.should_exit = True
        self.service.drain()
        if self._end is None:
            self._end = self._loop.call_later(self._settings.drain, self._end_answers)

    def _end_answers(self) -> None:
        assert self._loop is not None
        # Clients get an error, which closes their connections. In a thread, since it waits for the model.
        threading.Thread(target=self.service.worker.stop, daemon=True).start()
        for connection in list(self._protocol.waiting):
            connection.abort_late()
        self._loop.call_later(1, self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()  # its client does not read


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that calls `on_signal` for signals and does not raise them again at its end."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[bool], None]) -> None:
        super().__init__(config)
        self._on_signal, self._count = on_signal, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)  # asyncio has shortened the kernel's queue to its own

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._count += 1
        self._on_signal(self._count > 1)
