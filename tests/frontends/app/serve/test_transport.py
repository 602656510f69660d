"""Clients that send half a request, or too many connections: they lose theirs, and nobody else does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.frontends.app.serve import server as serve
from weft.frontends.app.serve.server import Server
from weft.frontends.app.serve.transport import MAX_RECORDS, RateLimit

from ...command import WATCHDOG
from .serving import client, held, http, served

WAIT = 0.4


@contextlib.contextmanager
def connected(server: Server, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(sent)
        yield connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b" HTTP/1.1\r\nHost: %s\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{"


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/comp", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: ", b""),
        (WHOLE + b"GET /hea", b"200"),  # of a second request
        (b"POST /nothing" + BODY % b"localhost", b"404"),
        (b"POST /v1/completions" + BODY % b"localhost", b"408"),
        (b"POST /v1/completions" + BODY % b"example.com", b"403"),
    ],
)
def test_incomplete_requests_end_at_the_timeout(folder: Path, sent: bytes, answer: bytes) -> None:
    with served(folder, client_timeout=WAIT, hosts=frozenset({"localhost"})) as server, connected(server, sent) as open:
        begun = time.monotonic()
        found = rest(open)
        assert found[9:12] == answer
        assert time.monotonic() - begun > WAIT / 2


def test_a_request_that_comes_slowly_but_in_time_is_answered(folder: Path) -> None:
    with served(folder, client_timeout=20) as server, connected(server, b"") as open:
        for at in range(0, len(WHOLE), 8):
            open.sendall(WHOLE[at : at + 8])
            time.sleep(0.01)
        assert open.recv(12) == b"HTTP/1.1 200"


def test_half_open_connections_do_not_block_other_clients(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "choose_max_connections", lambda: 8)
    with served(folder) as server, client(server) as api, held(server) as hold, contextlib.ExitStack() as opened:
        options: dict[str, Any] = {"temperature": 0, "logit_bias": {"257": -100}}  # never the end of text
        stream = api.completions.create(model="tiny", prompt="go", max_tokens=40, stream=True, **options)
        for _ in range(9):
            hold.step()
        assert next(stream).choices[0].finish_reason is None
        for _ in range(60):
            opened.enter_context(connected(server, b"POST /v1/completions HTTP/1.1\r\n"))
        with http(server) as other:
            assert other.get("/health").status_code == 200
        hold.go()
        reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
        assert reasons[-1] == "length"
    records = [r for r in caplog.records if "more than 8 connections" in r.getMessage()]
    assert len(records) == MAX_RECORDS and "not logged" in records[-1].getMessage()


def test_more_connections_than_descriptors_neither_stop_it_nor_fill_its_log(folder: Path, tmp_path: Path) -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))"
    code = f"{limits}; from weft.frontends.app.cli import main; main()"
    log = tmp_path / "log"
    with log.open("w") as written:
        command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0", "--client-timeout", "30"]
        process = subprocess.Popen(command, stderr=written, env=dict(os.environ))
    try:
        end = time.monotonic() + WATCHDOG
        while "http://" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        port = int(log.read_text().partition("http://127.0.0.1:")[2].partition("/")[0])
        with contextlib.ExitStack() as opened:
            for _ in range(300):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)).sendall(b"GET /")
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(WHOLE)
                assert connection.recv(12) == b"HTTP/1.1 200"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WATCHDOG) == 0
    assert len(log.read_text().splitlines()) < 30


def test_repeated_log_records_are_limited() -> None:
    spare, records = RateLimit(), []
    for i in range(1000):
        for line in (1, 2):
            record = logging.LogRecord("weft", logging.ERROR, "file.py", line, "no %d", (i,), None)
            if spare.filter(record):
                records.append(record.getMessage())
    assert len(records) == 2 * MAX_RECORDS
    assert records[:2] == ["no 0", "no 0"] and "not logged" in records[-1]
