"""Many streams at once, clients that leave, and clients that do not read: each answer stays its own."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from weft.backends.runtime.core.generation import Generator
from weft.frontends.app.serve.server import Server, listen

from .serving import NAME, held, prompt, served, until
from .serving import client as official

TOKENS = 20


def head(length: int) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {length}")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def raw_stream(server: Server, buffer: int | None = None, **options: Any) -> socket.socket:
    """A connection that has asked for a stream and read nothing of it."""
    body = {"model": NAME, "prompt": "go", "max_tokens": 600, "stream": True, "logit_bias": {"257": -100}, **options}
    content = json.dumps(body).encode()
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head(len(content)) + content)
    return connection


@pytest.mark.parametrize("how", ["closed", "reset", "waiting"])
def test_disconnected_client_frees_its_row(folder: Path, model: Generator, how: str) -> None:
    with served(folder, max_batch=1) as server:
        worker = server.service.worker
        with held(server):
            first = raw_stream(server)
            until(lambda: worker.n_waiting == 1)
            second = raw_stream(server)
            until(lambda: worker.n_waiting == 2)
            for connection in (second, first) if how == "waiting" else (first, second):
                if how == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            cancelled: Any = worker
            until(lambda: len(cancelled._cancelled) == 2)
        until(lambda: worker.n_running + worker.n_waiting == 0)
        with official(server) as client:
            answer = client.completions.create(model=NAME, prompt=prompt(1), temperature=0, max_tokens=TOKENS)
        assert answer.choices[0].text == model.generate(prompt(1), max_tokens=TOKENS)[0].text
        text = server.service.metrics.format_text()
    assert 'weft_answers_total{finish="cancelled"} 2' in text
    assert 'weft_answers_total{finish="stop"}' not in text


def test_client_that_does_not_read_is_disconnected(folder: Path, model: Generator) -> None:
    listening = listen("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of accepted connections too
    with served(folder, listening, client_timeout=0.5) as server:
        slow = [raw_stream(server, 4096, logprobs=20) for _ in range(3)]  # some MB each
        with official(server) as client:
            for number in range(5):
                answer = client.completions.create(model=NAME, prompt=prompt(number), temperature=0, max_tokens=TOKENS)
                assert answer.choices[0].text == model.generate(prompt(number), max_tokens=TOKENS)[0].text
        connections = server._uvicorn.server_state.connections
        until(lambda: not connections)
        for connection in slow:
            received, ended = b"", b""
            try:
                while ended := connection.recv(1 << 16):
                    received += ended
            except ConnectionResetError:
                pass
            assert received.startswith(b"HTTP/1.1 200 OK") and b"[DONE]" not in received
            connection.close()


def test_late_body_is_a_timeout(folder: Path) -> None:
    with (
        served(folder, client_timeout=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.sendall(head(99) + b"{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
