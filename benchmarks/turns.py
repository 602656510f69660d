"""Let contenders take turns, each in its own process: prefills one by one, decode in blocks of steps.

Every contender runs as its users run it, in random order; all others sleep. (In one process, weights would land in
memory that others have freed, and the first to load would be several per cent slower.) Memory bandwidth differs between
processes, so several sets of processes are pooled; ratios are computed within a set. Read bandwidth is measured in the
same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import spread
from smollm2 import ROOT

PROMPT, DECODE, BLOCK = 512, 128, 16


def prompt(folder: Path) -> np.ndarray:
    """Return the first tokens of the licence: real text, because flat logits make greedy tokens depend on rounding."""
    from tokenizers import Tokenizer

    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return np.array([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:PROMPT]])


class ReadBandwidth:
    """Measure GB/s of reading a tensor much larger than the caches, by torch on the same threads; not a contender."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.data = torch.ones(67 << 20, dtype=torch.int64)

    def measure(self) -> float:
        start = time.perf_counter()
        self.data.sum()
        return float(self.data.nbytes / (time.perf_counter() - start) / 1e9)


def serve(run: Any, prompt_folder: Path) -> None:
    """Run a contender's process: answer each line of its input with one line, the times and tokens of that turn.

    `run` has ``prefill(ids) -> token`` and ``step(token, steps done) -> token``, or is a ReadBandwidth.
    """
    ids = prompt(prompt_folder)
    done, token = 0, 0

    def prefill() -> None:
        nonlocal token
        token = run.prefill(ids)

    def step() -> None:
        nonlocal token, done
        token = run.step(token, done)
        done += 1

    def turn(work: Any, times: int) -> dict[str, list[float]]:
        seconds, tokens = [], []
        for _ in range(times):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
            tokens.append(token)
        return {"seconds": seconds, "tokens": tokens}

    if not isinstance(run, ReadBandwidth):
        prefill()  # the first is a warm-up
    print("READY", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "prefill":
                answer: Any = turn(prefill, 1)
            case "decode":
                answer = turn(step, BLOCK)
            case "read":
                answer = max(run.measure() for _ in range(3))
        print(json.dumps(answer), flush=True)


class Contender:
    """The parent's end of a contender's process."""

    def __init__(self, script: str, name: str, folder: str, prompt_folder: str, threads: int) -> None:
        command = [sys.executable, script, "--child", name, folder, prompt_folder, "--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        while (line := self._line()) != "READY":
            print(f"{name}: {line}", file=sys.stderr)

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a contender stopped with status {self.process.wait()}")
        return line.strip()

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self._line())

    def stop(self) -> None:
        self.process.communicate()


def build_parser(description: str | None, sets: int) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark whose contenders take turns; the first line describes it."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--sets", type=int, default=sets)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    return parser


def run_sets(script: str, folders: dict[str, str], args: argparse.Namespace, prompts: str) -> list[dict[str, Any]]:
    """Run the sets that `args` asks for one by one; print a line after each."""
    results = []
    for seed in range(args.sets):
        results.append(run_set(script, folders, args.rounds, args.threads, seed, prompts))
        print(f"set {seed + 1} of {args.sets}", flush=True)
    return results


def run_set(script: str, folders: dict[str, str], rounds: int, threads: int, seed: int, prompts: str) -> dict[str, Any]:
    """Start every contender of `script` in random order, let them take turns, and return all times.

    The tokenizer of the prompt is in the folder of the contender `prompts`.
    """
    rng = random.Random(seed)
    contenders = {
        name: Contender(script, name, folders.get(name, ""), folders[prompts], threads)
        for name in rng.sample([*folders, "bandwidth"], len(folders) + 1)
    }
    reader = contenders.pop("bandwidth")
    times: dict[str, dict[str, list[float]]] = {n: {"prefill": [], "decode": []} for n in folders}
    tokens: dict[str, list[int]] = {n: [] for n in folders}
    bandwidth = []
    for phase, turns in {"prefill": rounds, "decode": DECODE // BLOCK}.items():
        for turn in range(turns):
            for name in rng.sample(list(folders), len(folders)):
                answer = contenders[name].ask(phase)
                first = phase == "decode" and turn == 0  # the first step allocates
                times[name][phase] += answer["seconds"][first:]
                tokens[name] += answer["tokens"]
            bandwidth.append(reader.ask("read"))
    for contender in [*contenders.values(), reader]:
        contender.stop()
    return {"times": times, "tokens": tokens, "bandwidth": bandwidth}


def compare(results: list[dict[str, Any]], ours: list[str]) -> dict[str, Any]:
    """Return pooled medians, and ratios within each set of processes (above 1: `ours` is faster than the peer)."""
    names = list(results[0]["times"])
    rates: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for phase, tokens in {"prefill": PROMPT, "decode": 1}.items():
        pooled = {n: [t for r in results for t in r["times"][n][phase]] for n in names}
        rates[phase] = {n: round(tokens / statistics.median(v), 1) for n, v in pooled.items()}
        medians = [{n: statistics.median(r["times"][n][phase]) for n in names} for r in results]
        ratios[phase] = {o: {n: spread([m[n] / m[o] for m in medians]) for n in names if n != o} for o in ours}
    bandwidth = [b for r in results for b in r["bandwidth"]]
    return {
        "sets_of_processes": len(results),
        "tokens_per_second": rates,
        "speedup_over": ratios,
        "same_greedy_tokens": {n: all(r["tokens"][n] == results[0]["tokens"][ours[0]] for r in results) for n in names},
        "read_bandwidth_gb_s": spread(bandwidth, 1),
        "fp32_decode_ceiling_tokens_per_second": round(statistics.median(bandwidth) * 1e9 / 538e6, 1),
    }
