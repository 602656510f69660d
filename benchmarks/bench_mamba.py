"""Measure a Mamba by length of context: a prefill, and one more token after it, in fp32 on one thread of a CPU.

The layers are those of mamba-130m (dim 768, 1536 channels of 16 states, convolutions over 4 tokens), fewer of them,
with a small vocabulary. Contenders are weft's two CPU targets, with prompts read in chunks of 512 tokens, like the
runtime, or in one run, and transformers' MambaForCausalLM, whose CPU path is a reference implementation in PyTorch: for
short prompts only. Times are CPU seconds, so that other load matters little. Rounds interleave contenders and lengths.
Writes results/mamba.json, and two charts of the medians next to it.

    python benchmarks/bench_mamba.py [--rounds 5] [--layers 4] [--lengths 256 512 1024 2048 4096 8192] [--peer 1024]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from chart import Points, save_chart
from machine import RESULTS, facts, save, spread

import weft
from weft import Block, Decoder, Mamba, RMSNorm

DIM, VOCAB, STEPS = 768, 1000, 16
Run = Callable[[list[int]], tuple[float, float]]  # prompt → CPU seconds of prefill and of a token after it


def run_weft(folder: Path, target: str, layers: int, longest: int, chunk: int) -> Run:
    """Compile the model for `target`; return its runner, which reads prompts by `chunk` tokens."""
    model = Decoder(VOCAB, DIM, layers, Block(Mamba(2 * DIM), norm=RMSNorm(1e-5)), tie_embeddings=True)
    if not folder.exists():
        weft.compile(model, folder, target=target, max_length=longest + STEPS)
    decoder = weft.load(folder, threads=1).decoder

    def run(prompt: list[int]) -> tuple[float, float]:
        with decoder.context(1, len(prompt) + STEPS) as context:
            start = time.process_time()
            context.prefill([prompt], chunk)
            prefill = time.process_time() - start
            steps = []
            for token in range(STEPS):
                start = time.process_time()
                context.step(np.array([token]))
                steps.append(time.process_time() - start)
        return prefill, statistics.median(steps)

    return run


def run_transformers(layers: int) -> Run:
    """Return a runner of MambaForCausalLM with the same sizes and random weights."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    torch.set_num_threads(1)
    config = MambaConfig(hidden_size=DIM, num_hidden_layers=layers, vocab_size=VOCAB, state_size=16)
    model = MambaForCausalLM(config).train(False)

    @torch.inference_mode()
    def run(prompt: list[int]) -> tuple[float, float]:
        start = time.process_time()
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        prefill = time.process_time() - start
        steps = []
        for token in range(STEPS):
            start = time.process_time()
            out = model(torch.tensor([[token]]), cache_params=out.cache_params, use_cache=True)
            steps.append(time.process_time() - start)
        return prefill, statistics.median(steps)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256 << i for i in range(6)])
    parser.add_argument("--peer", type=int, default=1024, help="the longest prompt for transformers; 0 leaves it out")
    args = parser.parse_args()
    rng, longest = np.random.default_rng(0), max(args.lengths)
    with tempfile.TemporaryDirectory() as work:
        shape = args.layers, longest
        runs: dict[str, Run] = {
            "weft ort-cpu": run_weft(Path(work) / "ort-cpu", "ort-cpu", *shape, chunk=512),
            "weft ort-cpu, one run": run_weft(Path(work) / "ort-cpu", "ort-cpu", *shape, chunk=longest),
            "weft onnx": run_weft(Path(work) / "onnx", "onnx", *shape, chunk=512),
        }
        if args.peer:
            runs["transformers"] = run_transformers(args.layers)
        samples: dict[str, dict[int, list[tuple[float, float]]]] = {n: {} for n in runs}
        for r in range(args.rounds + 1):  # the first warms up
            for length in args.lengths if r else args.lengths[:1]:
                prompt = rng.integers(0, VOCAB, length).tolist()
                for name, run in list(runs.items())[:: 1 if r % 2 else -1]:
                    if name == "transformers" and length > args.peer:
                        continue
                    prefill, step = run(prompt)
                    if r:
                        samples[name].setdefault(length, []).append((prefill, step))
                        print(f"round {r} {name} {length}: {prefill:.3f} s, {step * 1e3:.2f} ms a token", flush=True)
    save("mamba", build_result(args.layers, samples))


def build_result(layers: int, samples: dict[str, dict[int, list[tuple[float, float]]]]) -> dict[str, Any]:
    """Return the results, and write the two charts."""
    result: dict[str, Any] = {
        "what": f"{layers} layers of mamba-130m, fp32, CPU time of one thread",
        "machine": facts("onnxruntime", "torch", "transformers"),
    }
    charts = (
        ("prefill_seconds", "Prefill", "CPU seconds", 1),
        ("milliseconds_a_token", "One more token", "CPU milliseconds", 1e3),
    )
    for column, (key, title, unit, scale) in enumerate(charts):
        times = {n: {t: [pair[column] * scale for pair in v] for t, v in by.items()} for n, by in samples.items()}
        result[key] = {n: {str(t): spread(v, 4) for t, v in by.items()} for n, by in times.items()}
        lines: dict[str, Points] = {n: [(t, statistics.median(v)) for t, v in by.items()] for n, by in times.items()}
        save_chart(
            RESULTS / f"mamba_{key}.svg",
            f"{title}, {layers} layers of mamba-130m",
            "tokens before it" if column else "tokens",
            unit,
            lines,
        )
    return result


if __name__ == "__main__":
    main()
