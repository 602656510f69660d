"""A Mamba over the length of its context: a prefill, and one more token after it, in fp32 on one thread of a CPU.

The layers are those of mamba-130m (dim 768, 1536 channels of 16 states, convolutions over 4 tokens), fewer of them,
with a small vocabulary. Measured are weft's two CPU targets, a prompt read as the runtime reads it (512 tokens a run)
or in one run, and the MambaForCausalLM of transformers, whose CPU path is a reference implementation in PyTorch: on
short prompts only. Times are CPU seconds, so that what else the machine does counts little. Rounds interleave
contenders and lengths. results/mamba.json holds the numbers; the two charts beside it draw the medians.

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
Run = Callable[[list[int]], tuple[float, float]]  # a prompt → CPU seconds of its prefill, of a token after it


def ours(folder: Path, target: str, layers: int, longest: int, chunk: int) -> Run:
    """The model compiled for `target`, prompts read `chunk` tokens a run."""
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


def transformers_eager(layers: int) -> Run:
    """MambaForCausalLM of the same geometry with random weights."""
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
            "weft ort-cpu": ours(Path(work) / "ort-cpu", "ort-cpu", *shape, chunk=512),
            "weft ort-cpu, one run": ours(Path(work) / "ort-cpu", "ort-cpu", *shape, chunk=longest),
            "weft onnx": ours(Path(work) / "onnx", "onnx", *shape, chunk=512),
        }
        if args.peer:
            runs["transformers"] = transformers_eager(args.layers)
        found: dict[str, dict[int, list[tuple[float, float]]]] = {n: {} for n in runs}
        for r in range(args.rounds + 1):  # the first warms up
            for length in args.lengths if r else args.lengths[:1]:
                prompt = rng.integers(0, VOCAB, length).tolist()
                for name, run in list(runs.items())[:: 1 if r % 2 else -1]:
                    if name == "transformers" and length > args.peer:
                        continue
                    prefill, step = run(prompt)
                    if r:
                        found[name].setdefault(length, []).append((prefill, step))
                        print(f"round {r} {name} {length}: {prefill:.3f} s, {step * 1e3:.2f} ms a token", flush=True)
    save("mamba", _result(args.layers, found))


def _result(layers: int, found: dict[str, dict[int, list[tuple[float, float]]]]) -> dict[str, Any]:
    """The record, and the two charts as a side effect."""
    result: dict[str, Any] = {
        "what": f"{layers} layers of mamba-130m, fp32, CPU time of one thread",
        "machine": facts("onnxruntime", "torch", "transformers"),
    }
    charts = (
        ("prefill_seconds", "Prefill", "CPU seconds", 1),
        ("milliseconds_a_token", "One more token", "CPU milliseconds", 1e3),
    )
    for place, (key, title, unit, scale) in enumerate(charts):
        times = {n: {t: [pair[place] * scale for pair in v] for t, v in by.items()} for n, by in found.items()}
        result[key] = {n: {str(t): spread(v, 4) for t, v in by.items()} for n, by in times.items()}
        lines: dict[str, Points] = {n: [(t, statistics.median(v)) for t, v in by.items()] for n, by in times.items()}
        save_chart(
            RESULTS / f"mamba_{key}.svg",
            f"{title}, {layers} layers of mamba-130m",
            "tokens before it" if place else "tokens",
            unit,
            lines,
        )
    return result


if __name__ == "__main__":
    main()
