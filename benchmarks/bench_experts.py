"""Measure a mixture of experts on a CPU, some of them offloaded to files: tokens per second, memory, bytes per token.

The model has random weights: 8 layers with 32 experts each, 4 per token, 0.8 GB in f32. For every number of experts in
memory, several processes take turns, so that each pays for its memory. All weights are in the page cache of the
operating system; files on a disk would take longer. Tokens must be equal.

    python benchmarks/bench_experts.py [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import facts, save, spread

COUNTS = (None, 16, 8, 4)  # experts of each layer in memory; None: all
PROMPT, ANSWER = 64, 64


def compile_model(folder: Path) -> Path:
    import weft
    from weft import Attention, Block, Decoder, MoE, RMSNorm, RoPE

    block = Block(Attention(8, 2, 64, RoPE()), MoE(32, 512, 4), RMSNorm())
    decoder = Decoder(4096, 512, 8, block, context=1024)
    model = weft.torch(decoder, seed=1)
    model.embed.weight.data *= 50  # so that experts differ from token to token
    weft.compile(weft.with_weights(decoder.graph(), model.state_dict()), folder, target="torch")
    return folder


def read_memory(field: str) -> float:
    """Return memory of this process in MiB: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024


def measure(folder: Path, count: int | None, threads: int) -> dict[str, Any]:
    import weft

    model = weft.load(folder, device="cpu", threads=threads, trust=True, experts_on_device=count)
    before = read_memory("VmRSS")
    prompt = [(7 * i) % 4096 for i in range(PROMPT)]
    (result,) = model.generate([prompt], max_tokens=ANSWER, temperature=1.0, seed=1)
    counts, steps = result.timings.experts, result.timings.decoded_tokens
    return {
        "tokens": result.tokens,
        "tokens_per_second": result.timings.decode_rate,
        "memory_mib": read_memory("VmHWM") - before,
        "mb_per_token": counts.bytes / 1e6 / steps,
        "found": counts.found / counts.asked if counts.asked else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        folder, count = args.measure
        print(json.dumps(measure(Path(folder), int(count) or None, args.threads)))
        return
    runs: dict[str, list[dict[str, Any]]] = {str(count or "all"): [] for count in COUNTS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = compile_model(Path(scratch) / "mixture")
        for turn in range(args.rounds + 1):  # the first is a warm-up
            for count, samples in zip(COUNTS, runs.values(), strict=True):
                command = [sys.executable, __file__, "--threads", str(args.threads), "--measure", str(folder)]
                output = subprocess.run([*command, str(count or 0)], capture_output=True, text=True, check=True).stdout
                samples += [json.loads(output)] * (turn > 0)
    assert len({tuple(run["tokens"]) for samples in runs.values() for run in samples}) == 1, "tokens differ"
    results = {}
    for count, samples in runs.items():
        ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(samples, runs["all"], strict=True)]
        medians = {k: round(statistics.median(run[k] for run in samples), 3) for k in samples[0] if k != "tokens"}
        results[count] = {**medians, "over_all": spread(ratios, 3)}
        print(count, results[count])
    save("experts", {**facts("torch"), "threads": args.threads, "results": results})


if __name__ == "__main__":
    main()
