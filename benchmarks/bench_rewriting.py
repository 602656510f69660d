"""Time the rewriting and writing of a 1.2 B-parameter checkpoint: wall time and peak memory of whole processes.

Every pipeline reads the random bf16 llama checkpoint of bench_streaming.py and writes a model folder, a Hugging Face
folder or a GGUF file; a copy by `cp` shows the speed of the disk.

    python benchmarks/bench_rewriting.py [--rounds 2] [--work DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench_streaming import time_process, write_checkpoint
from machine import facts, save, spread

FOLDED = "fold-norm-scale{untie=true}, pack-qkv, pack-gate-up, fuse-residual-norm"
GROUPED = "fold-norm-scale{untie=true}, mha-to-gqa{kv_heads=2}"
CASES = {
    "opt, nothing rewritten": ["opt"],
    f"opt -p '{FOLDED}' --dtype bf16": ["opt", "-p", FOLDED, "--dtype", "bf16"],
    f"opt -p '{GROUPED}' --dtype bf16": ["opt", "-p", GROUPED, "--dtype", "bf16"],
    f"export hf -p '{GROUPED}' --dtype bf16": ["export", "-p", GROUPED, "--dtype", "bf16"],
    f"export gguf -p '{GROUPED}' --dtype bf16": ["export", "--format", "gguf", "-p", GROUPED, "--dtype", "bf16"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=None, help="folder with 8 GB of room (default: a temporary one)")
    args, load = parser.parse_args(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        source, out, log = Path(work) / "checkpoint", Path(work) / "out", Path(work) / "log"
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            parameters = pool.submit(write_checkpoint, source).result()
        for file in source.glob("tokenizer*"):
            file.unlink()  # a tokenizer of words, which GGUF cannot describe
        weft = [sys.executable, "-m", "weft"]
        commands = {"cp": ["cp", "-r", str(source), str(out)]}
        commands |= {name: [*weft, verb, str(source), *rest, "-o", str(out)] for name, (verb, *rest) in CASES.items()}
        runs: dict[str, list[tuple[float, float]]] = {}
        for r in range(args.rounds):
            order = list(commands.items())
            for name, command in order if r % 2 == 0 else reversed(order):
                os.sync()  # else dirty pages of the previous run would cost time
                runs.setdefault(name, []).append(time_process(command, log))
                print(f"round {r + 1} {name}: {runs[name][-1][0]:.1f} s, {runs[name][-1][1]:.3f} GiB", flush=True)
                shutil.rmtree(out) if out.is_dir() else out.unlink()
    result = {
        "what": "rewrite a bf16 checkpoint and write it out",
        "parameters": parameters,
        "machine": facts("numpy", "gguf") | {"load_before": round(load, 1)},  # above 0: other load
        "wall_seconds": {n: spread([w for w, _ in v]) for n, v in runs.items()},
        "peak_rss_gib": {n: spread([m for _, m in v]) for n, v in runs.items()},
    }
    save("rewriting", result)


if __name__ == "__main__":
    main()
