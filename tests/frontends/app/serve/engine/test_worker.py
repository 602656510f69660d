"""Many streams at once: each answer is that of the model alone."""

from __future__ import annotations

import asyncio
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
from weft.frontends.app.serve.server import Server
from weft.frontends.app.serve.server_settings import ServerSettings

from .....sampling import each
from ..serving import NAME, VOCAB, byte_level, prompt, serve_in_thread, served, url

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
def test_concurrent_streams_equal_single_answers(folder: Path, model: Generator, rows: int) -> None:
    """Check that waiting jobs fill all rows of the batch, and join and leave them at different times."""
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


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
def test_stored_prefixes_do_not_change_answers(folder: Path, options: dict[str, Any]) -> None:
    """Compare streams with one system prompt, and their next turns, with those of a server that stores nothing."""
    requests = [{"text": "s" * 200 + prompt(i), **options} for i in range(8)]
    found = []
    for size in (0, 64):
        with served(folder, max_batch=3, prefix_cache=size) as server:
            first = together(server, requests)
            turns = [{**r, "text": f"{r['text']}{text} and?"} for r, text in zip(requests, first, strict=True)]
            found.append([first, together(server, turns)])
            assert isinstance(server.service.model, Generator)
            assert server.service.model.prefixes.hits in (range(8, 16) if size else [0])  # at least the next turns
    assert found[0] == found[1]


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


def test_constrained_and_free_streams_are_independent(server: Server, model: Generator) -> None:
    body = {"structured_outputs": {"regex": "(ab){5}"}}
    requests = [{"text": prompt(i), **({"extra_body": body} if i % 2 else {})} for i in range(20)]
    expected = [("ab" * 5) if i % 2 else model.generate(prompt(i), max_tokens=TOKENS)[0].text for i in range(20)]
    assert together(server, requests) == expected
