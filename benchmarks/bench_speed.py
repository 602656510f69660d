"""SmolLM2-135M fp32 on a CPU: prefill of 512 tokens and decode of 128, weft's graph beside its peers.

Every contender has a process of its own, as its user would run it, and they take turns: prefills one by one, decode in
blocks of 16 steps, in random order; whoever waits, sleeps. (In one process the weights of one land in memory another
has used and given back, and the first to load is slower than the rest by several per cent.) Memory bandwidth changes
from process to process, so several sets of processes are pooled; ratios are formed inside a set. ONNX graphs go through
the same loop: I/O binding, shared cache buffers, argmax on the host. Read bandwidth is measured in the same turns.

weft runs four times: its graph as it is; with --prepack, where ONNX Runtime maps the packed weights from the file, by
huge pages where the system can; the same with --keep-blocks head, where the head reads the GGUF's own 8-bit blocks; and
with --keep-blocks all, where every product reads its 4- or 8-bit blocks. The weights are the same numbers everywhere,
and all arithmetic is in f32.

    python benchmarks/bench_speed.py [--sets 8] [--rounds 2] [--threads 2]
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


class ReadBandwidth:
    """Not a contender: GB/s of reading a tensor much larger than the caches, by torch on the same threads."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.data = torch.ones(67 << 20, dtype=torch.int64)

    def measure(self) -> float:
        start = time.perf_counter()
        self.data.sum()
        return float(self.data.nbytes / (time.perf_counter() - start) / 1e9)


KINDS = {"hf_eager": HuggingFaceRun, "bandwidth": ReadBandwidth}


def child(name: str, folder: Path, prompt_folder: Path, threads: int) -> None:
    """One contender's process: answers each line of its input with one line, the times and tokens of that turn."""
    if name not in KINDS:
        import onnxruntime as ort

        ort.set_global_thread_pool_sizes(threads, 1)
    run: Any = KINDS.get(name, OnnxRun)(folder, threads)
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

    if name != "bandwidth":
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
    """The parent's end of a child."""

    def __init__(self, name: str, folder: str, prompt_folder: str, threads: int) -> None:
        command = [sys.executable, __file__, "--child", name, folder, prompt_folder, "--threads", str(threads)]
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


def one_set(folders: dict[str, str], rounds: int, threads: int, seed: int) -> dict[str, Any]:
    """Start every contender, in an order of its own, let them take turns, return all times."""
    rng = random.Random(seed)
    started = {
        name: Contender(name, folders.get(name, ""), folders["weft"], threads)
        for name in rng.sample([*folders, "bandwidth"], len(folders) + 1)
    }
    reader = started.pop("bandwidth")
    times: dict[str, dict[str, list[float]]] = {n: {"prefill": [], "decode": []} for n in folders}
    tokens: dict[str, list[int]] = {n: [] for n in folders}
    bandwidth = []
    for phase, turns in {"prefill": rounds, "decode": DECODE // BLOCK}.items():
        for turn in range(turns):
            for name in rng.sample(list(folders), len(folders)):
                answer = started[name].ask(phase)
                first = phase == "decode" and turn == 0  # the first step allocates
                times[name][phase] += answer["seconds"][first:]
                tokens[name] += answer["tokens"]
            bandwidth.append(reader.ask("read"))
    for contender in [*started.values(), reader]:
        contender.stop()
    return {"times": times, "tokens": tokens, "bandwidth": bandwidth}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, folder, prompt_folder = args.child
        child(name, Path(folder), Path(prompt_folder), args.threads)
        return
    with tempfile.TemporaryDirectory() as work:
        folders = prepare(Path(work))
        results = []
        for seed in range(args.sets):
            results.append(one_set(folders, args.rounds, args.threads, seed))
            print(f"set {seed + 1} of {args.sets}", flush=True)
    save("speed", summary(results, args.threads))


def prepare(work: Path) -> dict[str, str]:
    """Make every contender's folder."""
    import weft

    source = hugging_face_folder(GGUF, work / "hf")
    weft.compile(GGUF, work / "weft", max_length=2048)
    weft.compile(GGUF, work / "weft_prepack", max_length=2048, prepack=True)
    weft.compile(GGUF, work / "weft_keep_head", max_length=2048, keep_blocks="head", prepack=True)
    weft.compile(GGUF, work / "weft_keep_all", max_length=2048, keep_blocks="all")
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "env": os.environ | {"HF_HUB_OFFLINE": "1"}}
    subprocess.run(builder_command(source, work / "builder"), **quiet)
    subprocess.run(builder_command(source, work / "builder_prune", "prune_lm_head=true"), **quiet)
    names = {
        "weft": "weft",
        "weft_prepack": "weft_prepack",
        "weft_keep_head": "weft_keep_head",
        "weft_keep_all": "weft_keep_all",
        "builder": "builder",
        "builder_prune_lm_head": "builder_prune",
        "hf_eager": "hf",
    }
    return {name: str(work / folder) for name, folder in names.items()}


def summary(results: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Pooled medians, and ratios formed inside each set of processes (above 1: weft is faster than the peer)."""
    names = list(results[0]["times"])
    ours = [n for n in names if n.startswith("weft")]
    count = {"prefill": PROMPT, "decode": 1}
    rates: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for phase, tokens in count.items():
        pooled = {n: [t for r in results for t in r["times"][n][phase]] for n in names}
        rates[phase] = {n: round(tokens / statistics.median(v), 1) for n, v in pooled.items()}
        medians = [{n: statistics.median(r["times"][n][phase]) for n in names} for r in results]
        ratios[phase] = {o: {n: spread([m[n] / m[o] for m in medians]) for n in names if n not in ours} for o in ours}
    same = {n: all(r["tokens"][n] == results[0]["tokens"]["weft"] for r in results) for n in names}
    bandwidth = [b for r in results for b in r["bandwidth"]]
    return {
        "what": f"SmolLM2-135M fp32, prompt {PROMPT}, decode {DECODE}, {threads} threads",
        "machine": facts("onnxruntime", "onnxruntime-genai", "torch", "transformers", "numpy"),
        "sets_of_processes": len(results),
        "tokens_per_second": rates,
        "speedup_over": ratios,
        "same_greedy_tokens_as_weft": same,
        "read_bandwidth_gb_s": spread(bandwidth, 1),
        "fp32_decode_ceiling_tokens_per_second": round(statistics.median(bandwidth) * 1e9 / 538e6, 1),
    }


if __name__ == "__main__":
    main()
