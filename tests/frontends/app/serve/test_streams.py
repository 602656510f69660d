"""Many streams at once, clients that leave, and clients that do not read: each answer stays its own."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

import weft
from weft import (
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedMLP,
    RMSNorm,
    RoPE,
)
from weft.backends.runtime.core.generation import Generator
from weft.frontends import load_source
from weft.frontends.app.serve.engine.jobs import Channel
from weft.frontends.app.serve.server import Server, listen, serve_in_thread
from weft.frontends.app.serve.server_settings import ServerSettings

from ....sampling import each
from .serving import NAME, VOCAB, byte_level, held, prompt, served, until, url
from .serving import client as official

STREAMS, TOKENS = 100, 20


async def _stream(client: openai.AsyncOpenAI, text: str, **options: Any) -> str:
    given: dict[str, Any] = {"model": NAME, "prompt": text, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    found, ended = "", 0
    async for chunk in await client.completions.create(**{**given, **options}):
        found += chunk.choices[0].text
        ended += chunk.choices[0].finish_reason is not None
    assert ended == 1
    return found


def together(server: Server, requests: list[dict[str, Any]]) -> list[str]:
    """The texts of streams that are open at the same time."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url(server), api_key="none", max_retries=0, timeout=120) as client:
            return list(await asyncio.gather(*(_stream(client, **request) for request in requests)))

    return asyncio.run(run())


@pytest.mark.parametrize("rows", each(2, [5, 1, 16]))
def test_a_hundred_streams_are_each_the_answer_alone(folder: Path, model: Generator, rows: int) -> None:
    """As many as fit decode together, in rows that they leave and join at different times."""
    lengths = [3 + (7 * number) % TOKENS for number in range(STREAMS)]
    requests = [{"text": prompt(i), "max_tokens": n} for i, n in enumerate(lengths)]
    with served(folder, max_batch=rows) as server:
        found = together(server, requests)
    expected = [model.generate(prompt(i), max_tokens=n)[0].text for i, n in enumerate(lengths)]
    assert found == expected
    assert len(set(found)) > STREAMS // 2  # a mixed-up one would show


def test_sampled_streams_with_seeds_are_the_same_however_they_are_batched(server: Server, model: Generator) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 1.3},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    ]
    requests = [{"text": prompt(i), "seed": i, **ways[i % 3]} for i in range(30)]
    expected = [model.generate(prompt(i), max_tokens=TOKENS, seed=i, **ways[i % 3])[0].text for i in range(30)]
    assert together(server, requests) == expected
    assert together(server, requests[::-1]) == expected[::-1]


@pytest.mark.parametrize("kind", ["torch", "encoder-decoder"])
def test_other_models_stream_as_they_answer_alone(tmp_path: Path, kind: str) -> None:
    """With PyTorch, and in static batches behind an encoder."""

    def block(**more: Any) -> Block:
        return Block(Attention(heads=4, rope=RoPE()), GatedMLP(48), RMSNorm(), **more)

    decoder = Decoder(
        vocab=VOCAB,
        dim=32,
        layers=2,
        block=block() if kind == "torch" else block(cross=CrossAttention(heads=4)),
        context=64,
        logit_scale=40.0,
    )
    source = (
        decoder if kind == "torch" else EncoderDecoder(Encoder(vocab=VOCAB, dim=32, layers=1, block=block()), decoder)
    )
    weft.compile(load_source(source), tmp_path / "out", target="torch" if kind == "torch" else "ort-cpu", max_length=64)
    byte_level().save(str(tmp_path / "out" / "tokenizer.json"))
    model = weft.load(tmp_path / "out", trust=True)
    assert isinstance(model, Generator)
    expected = [model.generate(prompt(i), max_tokens=5 + i)[0].text for i in range(8)]
    requests = [{"text": prompt(i), "max_tokens": 5 + i} for i in range(8)]
    with serve_in_thread(model, ServerSettings(name=NAME, drain=0.5, max_batch=3)) as server:
        assert together(server, requests) == expected


def test_constrained_and_free_streams_do_not_touch_each_other(server: Server, model: Generator) -> None:
    body = {"structured_outputs": {"regex": "(ab){5}"}}
    requests = [{"text": prompt(i), **({"extra_body": body} if i % 2 else {})} for i in range(20)]
    expected = [("ab" * 5) if i % 2 else model.generate(prompt(i), max_tokens=TOKENS)[0].text for i in range(20)]
    assert together(server, requests) == expected


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
def test_a_client_that_leaves_frees_its_row(folder: Path, model: Generator, how: str) -> None:
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


def test_a_client_that_does_not_read_holds_nobody_up_and_is_dropped(folder: Path, model: Generator) -> None:
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


def test_a_body_that_does_not_come_is_waited_for_no_longer(folder: Path) -> None:
    with (
        served(folder, client_timeout=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.sendall(head(99) + b"{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_pieces_that_nobody_takes_are_joined() -> None:
    """However long a reader stays away, a channel holds one piece for each answer."""
    from weft.frontends.app.serve.engine.jobs import AnswerPiece

    async def run() -> None:
        channel = Channel()
        for count in range(1, 1001):
            channel.put(AnswerPiece(count % 2, "x", tokens=count))
        channel.put(AnswerPiece(0, "end", tokens=1001, finish="stop"))
        one, other = sorted(await channel.receive(), key=lambda piece: piece.index)
        assert one.text == "x" * 500 + "end" and one.finish == "stop" and one.tokens == 1001
        assert other.text == "x" * 500 and not other.last

    asyncio.run(run())
