"""Block-sparse attention beside full attention with the same result, on a CPU: a text, and training on it.

One attention of 12 heads of 64 with BigBird's blocks (64 tokens, one on each side, the first and the last, three more
times the first), fp32, one thread. `dense` is the op `attention` with a bias of the logarithms of how often a query
counts a key. Times are CPU seconds; rounds interleave the contenders, and ratios are formed inside a round. Of ONNX
Runtime the largest memory of the process is told too, measured in a process of its own.

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
from weft.backends.onnx.export import build, in_memory
from weft.backends.runtime.ort.session import onnxruntime
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, dtypes, sizes
from weft.ir.schema.visible_blocks import VisibleBlocks
from weft.passes import legalize

HEADS, WIDTH = 12, 768
BLOCKS = VisibleBlocks(block=64, first_weight=4)
LENGTHS = (1024, 2048, 4096)


def graph(kind: str) -> Graph:
    """One attention; a `dense` one is given its bias."""
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    with weft.building(Graph(kind)) as made:
        q, k, v = (made.add_input(n, TensorType(dtypes.f32, (batch, seq, WIDTH))) for n in "qkv")
        if kind == "dense":
            bias = made.add_input("bias", TensorType(dtypes.f32, (1, 1, seq, seq)))
            y = ops.attention(q, k, v, bias, heads=HEADS, kv_heads=HEADS)
        else:
            y = ops.block_sparse_attention(
                q, k, v, heads=HEADS, kv_heads=HEADS, block=BLOCKS.block, first_weight=BLOCKS.first_weight
            )
        made.add_output("y", y)
    return made


def feeds(kind: str, length: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    found = {n: rng.standard_normal((1, length, WIDTH), np.float32) for n in "qkv"}
    if kind == "dense":
        with np.errstate(divide="ignore"):
            found["bias"] = np.log(BLOCKS.counts(length)).astype(np.float32)[None, None]
    return found


def session(kind: str) -> Any:
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    target, made = TARGETS.lookup("ort-cpu"), graph(kind)
    legalize(made, target.refusals)
    model = in_memory(build(made, target, max(LENGTHS)))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def peak(kind: str, length: int) -> float:
    """MiB that a run adds to the process, in one of its own."""
    printed = subprocess.run(
        [sys.executable, __file__, "--peak", kind, str(length)], stdout=subprocess.PIPE, check=True
    )
    return float(printed.stdout)


def told_peak(kind: str, length: int) -> None:
    run, given = session(kind), feeds(kind, length)
    Path("/proc/self/clear_refs").write_text("5")  # a process begins with the peak of the one that started it
    before = _most()
    run.run(None, given)
    print((_most() - before) / 1024)


def _most() -> int:
    """The largest memory of this process so far, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measured(length: int, rounds: int) -> dict[str, Any]:
    kinds = ("dense", "sparse")
    given = {kind: feeds(kind, length) for kind in kinds}
    tensors = {kind: {n: torch.from_numpy(x) for n, x in given[kind].items()} for kind in kinds}
    learned = {kind: {n: x.clone().requires_grad_(n != "bias") for n, x in tensors[kind].items()} for kind in kinds}
    nets = {kind: weft.torch(graph(kind)) for kind in kinds}
    sessions = {kind: session(kind) for kind in kinds}

    def prompt(kind: str) -> Any:
        with torch.inference_mode():
            return nets[kind](**tensors[kind])

    works: dict[str, Callable[[str], Any]] = {
        "onnxruntime": lambda kind: sessions[kind].run(None, given[kind])[0],
        "torch": prompt,
        "torch, training": lambda kind: nets[kind](**learned[kind]).sum().backward(),
    }
    wanted = prompt("dense").numpy()
    error = {
        "torch": float(np.abs(prompt("sparse").numpy() - wanted).max()),
        "onnxruntime": float(np.abs(works["onnxruntime"]("sparse") - wanted).max()),
    }
    times: dict[str, dict[str, list[float]]] = {what: {kind: [] for kind in kinds} for what in works}
    for r in range(rounds + 1):  # the first warms up
        for what, work in works.items():
            for kind in kinds[:: 1 if r % 2 else -1]:
                taken = seconds(lambda work=work, kind=kind: work(kind))
                if r:
                    times[what][kind].append(taken)
                    print(f"{length} tokens, round {r}, {what}, {kind}: {taken:.3f} s", flush=True)
    result: dict[str, Any] = {"largest_difference": error}
    for what, found in times.items():
        ratios = [a / b for a, b in zip(found["sparse"], found["dense"], strict=True)]
        result[what] = {f"{kind}_seconds": spread(found[kind], 4) for kind in kinds}
        result[what]["sparse_over_dense"] = spread(ratios)
    result["onnxruntime"] |= {f"{kind}_mib": round(peak(kind, length), 1) for kind in kinds}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        told_peak(args.peak[0], int(args.peak[1]))
        return
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "what": "one attention of 12 heads of 64 with BigBird's blocks, fp32, CPU time of one thread",
        "machine": facts("torch", "onnxruntime"),
    }
    save("long_texts", result | {f"{length} tokens": measured(length, args.rounds) for length in LENGTHS})


if __name__ == "__main__":
    main()
