"""A tiny model with a token a byte, as `weft serve` serves it, and what its clients are compared with."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.frontends import load_source
from weft.frontends.app.serve.server import Server, listen
from weft.frontends.app.serve.server_settings import ServerSettings

NAME, CONTEXT, EOS, VOCAB = "tiny", 768, 257, 258
# Tools as Qwen's and Hermes' templates take them.
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>\n{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<s>assistant\n"
)


def byte_level() -> Tokenizer:
    """A token a byte, and the specials <s> </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return fast


def compiled(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Compile the model. Its logits are far apart, so that rounding makes no other token the likeliest."""
    block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(64), RMSNorm())
    source = load_source(Decoder(vocab=VOCAB, dim=48, layers=2, block=block, context=CONTEXT, logit_scale=40.0))
    weft.compile(source, folder)
    byte_level().save(str(folder / "tokenizer.json"))
    manifest = folder / "weft.json"
    text = manifest.read_text(encoding="utf-8")
    assert '"eos_token_ids": []' in text
    manifest.write_text(text.replace('"eos_token_ids": []', f'"eos_token_ids": [{EOS}]'), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def opened(folder: Path) -> Generator:
    model = weft.load(folder)
    assert isinstance(model, Generator)
    return model


@contextmanager
def served(folder: Path, listening: socket.socket | None = None, **settings: Any) -> Iterator[Server]:
    """Serve a folder in a thread."""
    with serve_in_thread(
        weft.load(folder), ServerSettings(**{"name": NAME, "drain": 0.5, **settings}), listening
    ) as server:
        yield server


class Held:
    """A model that stands still before its next step, unless it is told to go on."""

    def __init__(self) -> None:
        self._steps, self._free = threading.Semaphore(0), threading.Event()

    def step(self) -> None:
        """Let it take one step."""
        self._steps.release()

    def go(self) -> None:
        """Let it go on."""
        self._free.set()

    def wait(self) -> None:
        while not self._free.is_set() and not self._steps.acquire(timeout=0.005):
            pass


@contextmanager
def held(server: Server) -> Iterator[Held]:
    """Hold the model of a server while the block runs."""
    batch, hold = cast(Any, server.service.worker)._batches[""], Held()
    advance = batch.advance

    def wait() -> Any:
        hold.wait()
        return advance()

    batch.advance = wait
    try:
        yield hold
    finally:
        hold.go()
        batch.advance = advance


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that must come true."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


@contextmanager
def client(server: Server, key: str = "none") -> Iterator[openai.OpenAI]:
    """The official client of a server, which does not try again."""
    with openai.OpenAI(base_url=url(server), api_key=key, max_retries=0, timeout=60) as found:
        yield found


@contextmanager
def http(server: Server) -> Iterator[httpx2.Client]:
    """A client without the types of the official one, which sends what that would not."""
    with httpx2.Client(base_url=url(server).removesuffix("/v1"), timeout=60) as found:
        yield found


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


def prompt(number: int) -> str:
    """A prompt of its own for each number."""
    return f"{number * 7919 % 1000} {'xyz'[number % 3]} {number}:"


CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "hi", "max_tokens": 4}


def refusal(server: Server, path: str, body: Any, status: int = 400, **options: Any) -> dict[str, Any]:
    """Return the error object of a request that is refused with `status`."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    options.setdefault("headers", {"content-type": "application/json"})
    with http(server) as plain:
        response = plain.post(f"/v1/{path}", **given, **options)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in response.text
    return error


def post_completion(server: Server, **fields: Any) -> Any:
    """Return the response to a request for two tokens after "x", changed by `fields`."""
    with http(server) as plain:
        return plain.post("/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": 2, **fields})


@contextmanager
def serve_in_thread(
    model: Generator | EncoderModel, settings: ServerSettings, listening: socket.socket | None = None
) -> Iterator[Server]:
    """Serve `model` in a thread while the block runs; yield the server. Default socket: a free port of 127.0.0.1."""
    server = Server(model, listen("127.0.0.1", 0) if listening is None else listening, settings)
    with ThreadPoolExecutor(1, "weft-server") as pool:
        running = pool.submit(server.run)
        try:
            while not server.started and not running.done():
                time.sleep(0.01)
            yield server
        finally:
            server.stop()
            running.result()
