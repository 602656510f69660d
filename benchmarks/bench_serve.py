"""Measure `weft serve` with SmolLM2-135M on a CPU: tokens per second of one and eight streams, and a thousand streams.

The server is a separate process; clients share its cores. Streams of a round are all greedy and 128 tokens long; ratios
are computed within a round. Of a thousand streams, a hundred at a time, each counts up from another number: every text
is compared with the answer to its prompt alone. Where they differ, the two tokens must be equally likely up to
rounding, because a product of several rows sums in another order than that of one.

    python benchmarks/bench_serve.py [--rounds 5] [--streams 1000] [--threads 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from machine import facts, save, spread
from openai import AsyncOpenAI
from smollm2 import GGUF

KINDS = {"f32": None, "int4": "int4"}
TOKENS, EIGHT, AT_ONCE, COUNTED = 128, 8, 100, 12
PROMPT = "Once upon a time, in a village by the sea, number {number} of the tales was told: "
NEAR = {"f32": 1e-3, "int4": 0.1}  # logits; with int4 activations are rounded to 8 bits


@contextmanager
def serve_folder(folder: Path, threads: int, *options: str) -> Iterator[str]:
    """Serve a folder; yield the address."""
    command = [sys.executable, "-m", "weft", "serve", str(folder), "--port", "0", "--threads", str(threads), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"http://\S+", line):
            break
    try:
        yield match[0].rstrip(";") if match else ""
    finally:
        process.terminate()
        process.communicate()


async def stream(http: httpx2.AsyncClient, number: int) -> tuple[float, int]:
    """Read one stream; return the seconds to its first token, and the tokens. A bias prevents the stop token."""
    body = {"model": "out", "prompt": PROMPT.format(number=number), "max_tokens": TOKENS, "temperature": 0}
    more = {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"2": -100, "0": -100}}
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with http.stream("POST", "/completions", json=body | more) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                if '"usage":{' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    assert tokens == TOKENS
    return first, tokens


async def run_together(http: httpx2.AsyncClient, count: int, number: int) -> tuple[float, list[float]]:
    """Return tokens per second of `count` streams at once, and the seconds to the first token of each."""
    began = time.perf_counter()
    done = await asyncio.gather(*(stream(http, number + i) for i in range(count)))
    return sum(tokens for _, tokens in done) / (time.perf_counter() - began), [first for first, _ in done]


async def measure_throughput(address: str, rounds: int) -> dict[str, Any]:
    """Compare one stream with eight, in turn."""
    one: list[float] = []
    eight: list[float] = []
    first: dict[int, list[float]] = {1: [], EIGHT: []}
    async with httpx2.AsyncClient(base_url=address, timeout=600) as http:
        await run_together(http, EIGHT, 0)
        for turn in range(rounds):
            for count, rates in ((1, one), (EIGHT, eight)):
                rate, waits = await run_together(http, count, 100 * (turn + 1))
                rates.append(rate)
                first[count] += waits
    return {
        "one_stream_tokens_per_second": spread(one, 1),
        "eight_streams_tokens_per_second": spread(eight, 1),
        "eight_over_one": spread([b / a for a, b in zip(one, eight, strict=True)]),
        "seconds_to_first_token": {"one_stream": spread(first[1]), "eight_streams": spread(first[EIGHT])},
    }


def write_prompt(number: int) -> str:
    start = 100 + 3 * number
    return f"Numbers in order: {start - 3}, {start - 2}, {start - 1}, {start},"


async def run_streams(address: str, count: int) -> tuple[list[str | None], float, list[float]]:
    """Return the texts of `count` streams by the official client, AT_ONCE at a time; None for a lost one."""
    client, gate = AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=600), asyncio.Semaphore(AT_ONCE)
    firsts: list[float] = []

    async def one(number: int) -> str | None:
        async with gate:
            began, text, ended = time.perf_counter(), "", False
            try:
                chunks = await client.completions.create(
                    model="out", prompt=write_prompt(number), max_tokens=COUNTED, temperature=0, stream=True
                )
                async for chunk in chunks:
                    if not text:
                        firsts.append(time.perf_counter() - began)
                    text += chunk.choices[0].text
                    ended = ended or chunk.choices[0].finish_reason is not None
            except Exception as error:
                print(f"stream {number}: {type(error).__name__}: {error}")
            return text if ended else None

    began = time.perf_counter()
    texts = await asyncio.gather(*(one(number) for number in range(count)))
    seconds = time.perf_counter() - began
    await client.close()
    return list(texts), seconds, firsts


def compare(folder: Path, texts: list[str | None], near: float, threads: int) -> dict[str, Any]:
    """Compare streams with the answers to their prompts alone: count those that are equal, differ at near ties,
    are mixed up or lost. The `folder` returns the logits of all tokens."""
    import weft

    model = weft.load(folder, threads=threads)
    counts: dict[str, Any] = dict.fromkeys(("equal", "parted_at_near_ties", "mixed", "lost"), 0)
    for number, text in enumerate(texts):
        if text is None:
            counts["lost"] += 1
            continue
        prompt = write_prompt(number)
        gaps = [] if is_greedy(model, prompt, text) else find_gaps(model, prompt, text, near)
        counts["mixed" if gaps is None else "parted_at_near_ties" if gaps else "equal"] += 1
        counts["widest_gap"] = max(counts.get("widest_gap", 0.0), *(gaps or [0.0]))
    return counts | {"different_texts": len(set(texts))}


def is_greedy(model: Any, prompt: str, text: str) -> bool:
    """Check by one call that every token of `text` is the likeliest, and that none is missing."""
    ids, both = model.tokenizer.encode(prompt), model.tokenizer.encode(prompt + text)
    answer = both[len(ids) :]
    if both[: len(ids)] != ids or len(answer) != COUNTED:
        return False
    likeliest = model.logits(both)[len(ids) - 1 : -1].argmax(axis=-1)
    return bool((likeliest == answer).all())


def find_gaps(model: Any, prompt: str, text: str, near: float) -> list[float] | None:
    """Follow `text` greedily; return the gap in logits at every token that differs from the model's choice, or None if
    a gap exceeds `near`, which makes it another text."""
    ids, answer, gaps = model.tokenizer.encode(prompt), list[int](), list[float]()
    while True:
        (rest,) = model.generate([[*ids, *answer]], max_tokens=COUNTED - len(answer))
        for token in rest.tokens:
            if not text.startswith(model.tokenizer.decode([*answer, token])):
                break
            answer.append(token)
        else:
            return gaps if model.tokenizer.decode(answer) == text else None
        logits = model.logits([*ids, *answer])[-1]
        most, logits[token] = float(logits[token]), -math.inf
        likely = np.argsort(-logits)[:5].tolist()
        other = next((t for t in likely if text.startswith(model.tokenizer.decode([*answer, t]))), None)
        if other is None or (gap := most - float(logits[other])) > near:
            return None
        answer.append(other)
        gaps.append(round(gap, 6))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    args = parser.parse_args()
    import weft

    busy = [round(load, 1) for load in os.getloadavg()]  # before the run
    results: dict[str, Any] = {}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            folder, judge = Path(scratch) / "out", Path(scratch) / "judge"
            weft.compile(GGUF, folder, weights=KINDS[kind], max_length=2048)
            weft.compile(GGUF, judge, weights=KINDS[kind], passes="default,-last-token-logits", max_length=2048)
            with serve_folder(folder, args.threads) as address:
                results[kind] = asyncio.run(measure_throughput(address, args.rounds))
                print(kind, results[kind], flush=True)
                texts, seconds, firsts = asyncio.run(run_streams(address, args.streams))
            streams: dict[str, Any] = {"streams": len(texts), "at_once": AT_ONCE, "seconds": round(seconds, 1)}
            streams |= {"seconds_to_first_token": spread(firsts), **compare(judge, texts, NEAR[kind], args.threads)}
            results[kind]["many"] = streams
            print(kind, streams, flush=True)
    packages = ("onnxruntime", "starlette", "uvicorn", "openai", "httpx2")
    about = {**facts(*packages), "load_average": busy, "threads": args.threads, "tokens": TOKENS}
    save("serve", {**about, "results": results})


if __name__ == "__main__":
    main()
