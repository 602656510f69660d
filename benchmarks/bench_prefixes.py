"""Measure what stored prefixes save `weft serve` with SmolLM2-135M, int4, on a CPU: the time to the first token.

Two servers, one of which stores nothing, take turns. `chat`: a chat of about 2,000 tokens, whose second turn adds a
question of a few. `shared`: eight streams at a time with one system prompt of about 1,000 tokens, after a first one.
All answers are greedy; those of both servers must be equal. Ratios are computed within a round.

    python benchmarks/bench_prefixes.py [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_serve import serve_folder
from machine import facts, save, spread
from openai import AsyncOpenAI
from smollm2 import GGUF, ROOT

import weft

STREAMS, TOKENS = 8, 32
LICENCE = (ROOT / "LICENSE").read_text(encoding="utf-8")


async def ask(client: AsyncOpenAI, messages: list[Any]) -> tuple[float, str, Any]:
    """Return the seconds to the first text of a streamed answer, the answer, and its usage."""
    began, first, text, usage = time.perf_counter(), 0.0, "", None
    options: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(model="out", messages=messages, stream=True, **options):
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
        usage = chunk.usage
    return first, text, usage


async def measure(client: AsyncOpenAI, number: int) -> dict[str, Any]:
    """Return times, answers and token counts of a round; its prompts begin differently from those of other rounds."""
    messages: list[Any] = [
        {"role": "system", "content": f"Licence {number}: {LICENCE[:9800]}"},
        {"role": "user", "content": "Who may use the work?"},
    ]
    first, answer, usage = await ask(client, messages)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And who may change it?"}]
    second, further, usage_2 = await ask(client, messages)
    system = {"role": "system", "content": f"Terms {number}: {LICENCE[:4900]}"}
    questions = [[system, {"role": "user", "content": f"Explain section {i}."}] for i in range(STREAMS + 1)]
    texts = [(await ask(client, questions[0]))[1]]
    began = time.perf_counter()
    streams = await asyncio.gather(*(ask(client, question) for question in questions[1:]))
    together = time.perf_counter() - began
    return {
        "chat": {
            "tokens": [usage.prompt_tokens, usage_2.prompt_tokens],
            "cached": usage_2.prompt_tokens_details.cached_tokens,
            "first": first,
            "second": second,
        },
        "shared": {
            "tokens": streams[0][2].prompt_tokens,
            "cached": streams[0][2].prompt_tokens_details.cached_tokens,
            "first_text": sum(s[0] for s in streams) / STREAMS,
            "together": together,
        },
        "answers": [answer, further, *texts, *(s[1] for s in streams)],
    }


async def run(addresses: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    clients = {name: AsyncOpenAI(base_url=url, api_key="none", timeout=600) for name, url in addresses.items()}
    results = []
    for number in range(rounds + 1):  # the first is a warm-up
        order = list(clients) if number % 2 else list(clients)[::-1]
        results.append({name: await measure(clients[name], number) for name in order})
        print(number, {n: (r["chat"], r["shared"]) for n, r in results[-1].items()}, flush=True)
    return results[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "out"
        weft.compile(GGUF, folder, weights="int4", max_length=4096)
        with (
            serve_folder(folder, args.threads, "--prefix-cache", "0") as plain,
            serve_folder(folder, args.threads) as storing,
        ):
            rounds = asyncio.run(run({"without": plain, "with": storing}, args.rounds))
    same = [a == b for r in rounds for a, b in zip(r["with"]["answers"], r["without"]["answers"], strict=True)]

    def compare(part: str, over: str, under: str = "") -> dict[str, float]:
        """Return the times `over` of the storing server over those of the other, or over its own times `under`."""
        base = [r["with" if under else "without"][part][under or over] for r in rounds]
        return spread([r["with"][part][over] / b for r, b in zip(rounds, base, strict=True)])

    result = {
        "chat": {
            "prompt_tokens": rounds[0]["with"]["chat"]["tokens"],
            "cached_tokens": rounds[0]["with"]["chat"]["cached"],
            "first_turn_seconds": spread([r["with"]["chat"]["first"] for r in rounds]),
            "second_turn_seconds": spread([r["with"]["chat"]["second"] for r in rounds]),
            "second_over_first": compare("chat", "second", "first"),
            "first_over_without": compare("chat", "first"),
            "second_over_without": compare("chat", "second"),
        },
        "shared": {
            "prompt_tokens": rounds[0]["with"]["shared"]["tokens"],
            "cached_tokens": rounds[0]["with"]["shared"]["cached"],
            "first_text_over_without": compare("shared", "first_text"),
            "all_streams_over_without": compare("shared", "together"),
        },
        "same_answers": [sum(same), len(same)],
    }
    save("prefixes", {**facts("onnxruntime"), "threads": args.threads, **result})


if __name__ == "__main__":
    main()
