"""Compare block-sparse attention with full attention of the same result on a CPU: inference and training.

One attention of 12 heads of 64 with BigBird's blocks (64 tokens, one on each side, the first and the last, the first
counted three more times), fp32, one thread. `dense` is the op `attention` with a bias of log counts of each key per
query. Times are CPU seconds; rounds interleave the contenders, and ratios are computed within a round. For ONNX Runtime
the peak memory is also measured, in a separate process.

    python benchmarks/bench_long_texts.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import facts, save, spread

import weft
from weft import ops
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.runtime.ort.session import import_onnxruntime
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, dtypes, sizes
from weft.ir.schema.visible_keys import VisibleBlocks
from weft.passes import legalize

HEADS, WIDTH = 12, 768
BLOCKS = VisibleBlocks(block=64, first_weight=4)
LENGTHS = (1024, 2048, 4096)


def graph(kind: str) -> Graph:
    """Build one attention; `dense` takes its bias as an input."""
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    with weft.building(Graph(kind)) as attention:
        q, k, v = (attention.add_input(n, TensorType(dtypes.f32, (batch, seq, WIDTH))) for n in "qkv")
        if kind == "dense":
            bias = attention.add_input("bias", TensorType(dtypes.f32, (1, 1, seq, seq)))
            y = ops.attention(q, k, v, bias, heads=HEADS, kv_heads=HEADS)
        else:
            y = ops.block_sparse_attention(
                q, k, v, heads=HEADS, kv_heads=HEADS, block=BLOCKS.block, first_weight=BLOCKS.first_weight
            )
        attention.add_output("y", y)
    return attention


def draw_feeds(kind: str, length: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, length, WIDTH), np.float32) for n in "qkv"}
    if kind == "dense":
        with np.errstate(divide="ignore"):
            arrays["bias"] = np.log(BLOCKS.counts(length)).astype(np.float32)[None, None]
    return arrays


def open_session(kind: str) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    target, lowered = TARGETS.lookup("ort-cpu"), graph(kind)
    legalize(lowered, target.list_refusals)
    model = serialize_model(build_model(lowered, target, max(LENGTHS)))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def measure_peak(kind: str, length: int) -> float:
    """Return the MiB that a run adds to a process, measured in a new one."""
    process = subprocess.run(
        [sys.executable, __file__, "--peak", kind, str(length)], stdout=subprocess.PIPE, check=True
    )
    return float(process.stdout)


def print_peak(kind: str, length: int) -> None:
    run, inputs = open_session(kind), draw_feeds(kind, length)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which a process inherits from its parent
    before = _peak_kib()
    run.run(None, inputs)
    print((_peak_kib() - before) / 1024)


def _peak_kib() -> int:
    """Return the peak memory of this process so far, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def time_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(length: int, rounds: int) -> dict[str, Any]:
    kinds = ("dense", "sparse")
    inputs = {kind: draw_feeds(kind, length) for kind in kinds}
    tensors = {kind: {n: torch.from_numpy(x) for n, x in inputs[kind].items()} for kind in kinds}
    learned = {kind: {n: x.clone().requires_grad_(n != "bias") for n, x in tensors[kind].items()} for kind in kinds}
    nets = {kind: weft.torch(graph(kind)) for kind in kinds}
    sessions = {kind: open_session(kind) for kind in kinds}

    def prompt(kind: str) -> Any:
        with torch.inference_mode():
            return nets[kind](**tensors[kind])

    runs: dict[str, Callable[[str], Any]] = {
        "onnxruntime": lambda kind: sessions[kind].run(None, inputs[kind])[0],
        "torch": prompt,
        "torch, training": lambda kind: nets[kind](**learned[kind]).sum().backward(),
    }
    expected = prompt("dense").numpy()
    error = {
        "torch": float(np.abs(prompt("sparse").numpy() - expected).max()),
        "onnxruntime": float(np.abs(runs["onnxruntime"]("sparse") - expected).max()),
    }
    times: dict[str, dict[str, list[float]]] = {what: {kind: [] for kind in kinds} for what in runs}
    for r in range(rounds + 1):  # the first warms up
        for what, run in runs.items():
            for kind in kinds[:: 1 if r % 2 else -1]:
                elapsed = time_seconds(lambda run=run, kind=kind: run(kind))
                if r:
                    times[what][kind].append(elapsed)
                    print(f"{length} tokens, round {r}, {what}, {kind}: {elapsed:.3f} s", flush=True)
    result: dict[str, Any] = {"largest_difference": error}
    for what, samples in times.items():
        ratios = [a / b for a, b in zip(samples["sparse"], samples["dense"], strict=True)]
        result[what] = {f"{kind}_seconds": spread(samples[kind], 4) for kind in kinds}
        result[what]["sparse_over_dense"] = spread(ratios)
    result["onnxruntime"] |= {f"{kind}_mib": round(measure_peak(kind, length), 1) for kind in kinds}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print_peak(args.peak[0], int(args.peak[1]))
        return
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "what": "one attention of 12 heads of 64 with BigBird's blocks, fp32, CPU time of one thread",
        "machine": facts("torch", "onnxruntime"),
    }
    save("long_texts", result | {f"{length} tokens": measure(length, args.rounds) for length in LENGTHS})


if __name__ == "__main__":
    main()
