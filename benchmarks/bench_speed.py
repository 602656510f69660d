"""SmolLM2-135M fp32 on a CPU: prefill of 512 tokens and decode of 128, weft's graph beside its peers.

The contenders run in one process on one thread pool, taking turns: prefills one by one, decode in blocks of 16 steps,
in random order. Memory bandwidth changes from process to process, so several processes are pooled, each loading the
contenders in another order; ratios are formed inside a process. ONNX graphs go through the same loop: I/O binding,
shared cache buffers, argmax on the host. Read bandwidth is measured beside them, in the same turns.

weft's folder is compiled with --prepack: ONNX Runtime then maps the packed weights from the file, by huge pages where
the system can. The same graph without it runs beside it.

    python benchmarks/bench_speed.py [--processes 5] [--rounds 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts, save, spread
from smollm2 import GGUF, ROOT, builder_command, hugging_face_folder

PROMPT, DECODE, BLOCK, LAYERS = 512, 128, 16, 30
VOCAB = 49152


class OnnxRun:
    """One ONNX graph in the common loop."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.use_per_session_threads = False
        self.session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        shapes = {i.name: i.shape for i in self.session.get_inputs()}
        self.inputs = set(shapes)
        self.all_logits = self.session.get_outputs()[0].shape[1] != 1
        make = ort.OrtValue.ortvalue_from_numpy
        capacity = PROMPT + DECODE
        # An OrtValue shares the memory of its array: every cache needs its own.
        self.cache = {
            f"{i}.{k}": make(np.zeros((1, 3, capacity, 64), np.float32))
            for i in range(LAYERS)
            for k in ("key", "value")
        }
        self.masks = [make(np.ones((1, n), np.int64)) for n in range(capacity + 1)]
        self.token, self.position = make(np.zeros((1, 1), np.int64)), make(np.zeros((1, 1), np.int64))
        self.logits = make(np.zeros((1, 1, VOCAB), np.float32))
        self.prompt_logits = make(np.zeros((1, PROMPT if self.all_logits else 1, VOCAB), np.float32))
        self.make = make
        self.decode_binding = self._bind(self.token, self.position, self.logits)

    def _bind(self, ids: Any, positions: Any, logits: Any) -> Any:
        binding = self.session.io_binding()
        binding.bind_ortvalue_input("input_ids", ids)
        if "position_ids" in self.inputs:
            binding.bind_ortvalue_input("position_ids", positions)
        for name, buffer in self.cache.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", buffer)
            binding.bind_ortvalue_output(f"present.{name}", buffer)
        binding.bind_ortvalue_output("logits", logits)
        return binding

    def prefill(self, ids: np.ndarray) -> int:
        at = np.arange(PROMPT, dtype=np.int64)[None]
        binding = self._bind(self.make(ids), self.make(at), self.prompt_logits)
        binding.bind_ortvalue_input("attention_mask", self.masks[PROMPT])
        self.session.run_with_iobinding(binding)
        return int(self.prompt_logits.numpy()[0, -1].argmax())

    def step(self, token: int, done: int) -> int:
        self.token.update_inplace(np.array([[token]]))
        self.position.update_inplace(np.array([[PROMPT + done]]))
        self.decode_binding.bind_ortvalue_input("attention_mask", self.masks[PROMPT + done + 1])
        self.session.run_with_iobinding(self.decode_binding)
        return int(self.logits.numpy()[0, 0].argmax())


class HuggingFaceRun:
    """transformers, eager mode, its own SDPA and growing cache; logits of the last token only."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.cache: Any = None

    def _run(self, ids: Any) -> int:
        with self.torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return int(out.logits[0, -1].argmax())

    def prefill(self, ids: np.ndarray) -> int:
        self.cache = None
        return self._run(self.torch.from_numpy(ids))

    def step(self, token: int, done: int) -> int:
        return self._run(self.torch.tensor([[token]]))


def prompt(folder: Path) -> np.ndarray:
    """The first tokens of the licence: text, so that greedy tokens do not hang on the last bit of flat logits."""
    from tokenizers import Tokenizer

    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return np.array([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:PROMPT]])


def child(folders: dict[str, str], rounds: int, threads: int, seed: int) -> dict[str, Any]:
    """One process: load in the given order, take turns, return all times."""
    import onnxruntime as ort
    import torch

    ort.set_global_thread_pool_sizes(threads, 1)
    torch.set_num_threads(threads)
    rng = random.Random(seed)
    runs = {
        n: HuggingFaceRun(Path(f), threads) if n == "hf_eager" else OnnxRun(Path(f), threads)
        for n, f in folders.items()
    }
    big, bandwidth = torch.ones(67 << 20, dtype=torch.int64), []
    ids = prompt(Path(folders["weft"]))
    times: dict[str, dict[str, list[float]]] = {n: {"prefill": [], "decode": []} for n in runs}
    tokens: dict[str, list[int]] = {n: [run.prefill(ids)] for n, run in runs.items()}  # the first is a warm-up
    for _ in range(rounds):
        for name in rng.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name].prefill(ids)
            times[name]["prefill"].append(time.perf_counter() - start)
    for first in range(0, DECODE, BLOCK):
        for name in rng.sample(list(runs), len(runs)):
            for done in range(first, first + BLOCK):
                start = time.perf_counter()
                tokens[name].append(runs[name].step(tokens[name][-1], done))
                times[name]["decode"].append(time.perf_counter() - start)
        bandwidth.append(max(read_rate(big) for _ in range(3)))
    for t in times.values():
        t["decode"] = t["decode"][1:]  # the first step allocates
    return {"times": times, "tokens": tokens, "bandwidth": bandwidth}


def read_rate(big: Any) -> float:
    """GB/s of one pass over a tensor much larger than the caches."""
    start = time.perf_counter()
    big.sum()
    return float(big.nbytes / (time.perf_counter() - start) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        print("RESULT" + json.dumps(child(task["folders"], args.rounds, args.threads, task["seed"])))
        return
    with tempfile.TemporaryDirectory() as work:
        folders = prepare(Path(work))
        results = []
        for p in range(args.processes):
            names = list(folders)
            names = names[p % len(names) :] + names[: p % len(names)]
            task = json.dumps({"folders": {n: folders[n] for n in names}, "seed": p})
            command = [sys.executable, __file__, "--child", task, "--rounds", str(args.rounds)]
            environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                [*command, "--threads", str(args.threads)], capture_output=True, text=True, check=False, env=environment
            )
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            results.append(json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))[6:]))
            print(f"process {p + 1} of {args.processes}", flush=True)
    save("speed", summary(results, args.threads))


def prepare(work: Path) -> dict[str, str]:
    """Make every contender's folder."""
    import weft

    source = hugging_face_folder(GGUF, work / "hf")
    weft.compile(GGUF, work / "weft", max_length=2048, prepack=True)
    weft.compile(GGUF, work / "weft_plain", max_length=2048)
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "env": os.environ | {"HF_HUB_OFFLINE": "1"}}
    subprocess.run(builder_command(source, work / "builder"), **quiet)
    subprocess.run(builder_command(source, work / "builder_prune", "prune_lm_head=true"), **quiet)
    names = {
        "weft": "weft",
        "weft_without_prepack": "weft_plain",
        "builder": "builder",
        "builder_prune_lm_head": "builder_prune",
        "hf_eager": "hf",
    }
    return {name: str(work / folder) for name, folder in names.items()}


def summary(results: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Pooled medians, and ratios formed inside each process (above 1: weft is faster)."""
    names = list(results[0]["times"])
    count = {"prefill": PROMPT, "decode": 1}
    rates: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for phase, tokens in count.items():
        pooled = {n: [t for r in results for t in r["times"][n][phase]] for n in names}
        rates[phase] = {n: round(tokens / statistics.median(v), 1) for n, v in pooled.items()}
        per_process = {
            n: [statistics.median(r["times"][n][phase]) / statistics.median(r["times"]["weft"][phase]) for r in results]
            for n in names
            if n != "weft"
        }
        ratios[phase] = {n: spread(v) for n, v in per_process.items()}
    same = {n: all(r["tokens"][n] == results[0]["tokens"]["weft"] for r in results) for n in names}
    bandwidth = [b for r in results for b in r["bandwidth"]]
    return {
        "what": f"SmolLM2-135M fp32, prompt {PROMPT}, decode {DECODE}, {threads} threads",
        "machine": facts("onnxruntime", "onnxruntime-genai", "torch", "transformers", "numpy"),
        "processes": len(results),
        "tokens_per_second": rates,
        "weft_speedup_over": ratios,
        "same_greedy_tokens_as_weft": same,
        "read_bandwidth_gb_s": spread(bandwidth, 1),
        "decode_ceiling_tokens_per_second": round(statistics.median(bandwidth) * 1e9 / 538e6, 1),
    }


if __name__ == "__main__":
    main()
