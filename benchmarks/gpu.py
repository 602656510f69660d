"""Decoding on a GPU with ONNX Runtime, with and without CUDA graphs, beside what the card can do in the same run.

Three steps: the tokens with CUDA graphs must be those without (and, with --reference, the logits those of f32 on the
CPU); then the limits of the card by torch: reading, copying, a matrix product; then prefill and decode. A decoding
step is timed twice: as the runtime does it, logits on the host and a token chosen there, and on the device alone, run
after run without waiting. Weights are random; speed does not depend on them.

    python benchmarks/gpu.py [--model llama3.2-1b] [--dtypes f16 bf16] [--batches 1 8] [--out FOLDER] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from machine import RESULTS, facts, spread

import weft
from weft.backends.runtime.decoder import OrtDecoder
from weft.backends.runtime.folder import read_facts
from weft.backends.runtime.session import onnxruntime, open_session
from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, RMSNorm
from weft.frontends.dsl import RoPE as Rope
from weft.ir import dtypes

WARM = 8  # steps before the clock starts; ONNX Runtime captures during the first two


def _llama(vocab: int, dim: int, layers: int, heads: int, kv_heads: int, hidden: int) -> Decoder:
    rope = Rope(500_000, scaling="llama3", factor=32, original=8192, low_freq=1, high_freq=4)
    block = Block(Attention(heads, kv_heads, rope=rope), GatedMLP(hidden), RMSNorm(1e-5))
    return Decoder(vocab, dim, layers, block, tie_embeddings=True, context=131_072)


MODELS = {
    "tiny": lambda: _llama(1000, 256, 4, 4, 2, 512),
    "llama3.2-1b": lambda: _llama(128_256, 2048, 16, 32, 8, 8192),
    "llama3.2-3b": lambda: _llama(128_256, 3072, 28, 24, 8, 8192),
}


class Clock:
    """Times work on a device by the wall clock, from an idle device to an idle device."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def __call__(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of each of `repeats` calls, after two unmeasured ones."""
        times = []
        for i in range(repeats + 2):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            if i >= 2:
                times.append(time.perf_counter() - start)
        return times


def limits(device: str) -> dict[str, Any]:
    """What reading, copying (read + written) and a bf16 matrix product of random numbers reach."""
    import torch

    clock = Clock(device)
    generator = torch.Generator(device).manual_seed(0)
    count, side = (4 << 30, 8192) if device == "cuda" else (1 << 24, 512)
    x = torch.rand(count, device=device, generator=generator)
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    read = [size / t / 1e9 for t in clock(x.sum, 20)]
    copy = [2 * size / t / 1e9 for t in clock(partial(y.copy_, x), 20)]
    del x, y
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    product = [2 * side**3 / t / 1e12 for t in clock(partial(torch.matmul, a, b), 20)]
    return {
        "bytes": size,
        "read_gb_per_s": spread(read, 1),
        "copy_gb_per_s": spread(copy, 1),
        f"matmul_bf16_{side}_tflop_per_s": spread(product, 1),
    }


def opened(folder: Path, device: str, graphs: bool) -> OrtDecoder:
    """The compiled decoder on the device.

    Raises:
        RuntimeError: if CUDA graphs were asked for and refused.
    """
    known = read_facts(folder)
    session = open_session(known.model, device=device, target=known.target if device == "cuda" else "", graphs=graphs)
    if session.graphs != graphs:
        raise RuntimeError(f"ONNX Runtime refuses CUDA graphs for {folder}")
    return OrtDecoder(
        session, vocab=known.vocab, max_length=known.max_length, head_dim=known.head_dim, rolling=known.rolling
    )


def prompts(model: OrtDecoder, batch: int, length: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(0).integers(0, model.vocab, (batch, length)).tolist()
    return found


def decode(model: OrtDecoder, batch: int, length: int, steps: int) -> tuple[np.ndarray, list[float]]:
    """Greedy tokens [steps, batch] after random prompts, and the seconds of every step but the first."""
    tokens, times = [], []
    with model.context(batch, length + steps) as context:
        token = context.prefill(prompts(model, batch, length), chunk=2048).argmax(-1)
        for _ in range(steps):
            start = time.perf_counter()
            token = context.step(token).argmax(-1)
            times.append(time.perf_counter() - start)
            tokens.append(token)
    return np.stack(tokens), times[WARM:]


def prefill(model: OrtDecoder, length: int, repeats: int) -> list[float]:
    """Tokens per second of one prompt, read in one run."""
    rates = []
    with model.context(1, length) as context:
        for i in range(repeats + 2):
            start = time.perf_counter()
            context.prefill(prompts(model, 1, length), chunk=length)
            if i >= 2:
                rates.append(length / (time.perf_counter() - start))
    return rates


def device_steps(model: OrtDecoder, batch: int, length: int, steps: int, rounds: int) -> list[float]:
    """Seconds of a step with nothing between the steps: the mean over `steps` of them, `rounds` times."""
    session, device = model.session.ort, model.session.device
    ort = onnxruntime()
    capacity = min(model.max_length, -(-(length + 1) // 1024) * 1024)
    make = ort.OrtValue.ortvalue_from_shape_and_type
    binding, kept = session.io_binding(), []
    for cache in model.caches:
        buffer = make((batch, cache.heads, capacity, cache.width), cache.onnx_type, device, 0)
        kept.append(buffer)
        binding.bind_ortvalue_input(cache.past, buffer)
        binding.bind_ortvalue_output(cache.present, buffer)
    values = {
        "input_ids": np.ones((batch, 1)),
        "attention_mask": np.tile(np.arange(capacity) <= length, (batch, 1)),
        "position_ids": np.full((batch, 1), length),
    }
    for name, (_, dtype) in model.types.items():
        kept.append(ort.OrtValue.ortvalue_from_numpy(values[name].astype(dtype), device, 0))
        binding.bind_ortvalue_input(name, kept[-1])
    kept.append(make((batch, 1, model.vocab), model.logits_type[0], device, 0))
    binding.bind_ortvalue_output("logits", kept[-1])
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    graph = next(model.graph_ids)
    if model.session.graphs:
        options.add_run_config_entry("gpu_graph_id", str(graph))

    def run() -> None:
        for _ in range(steps):
            session.run_with_iobinding(binding, options)

    found = [t / steps for t in Clock(device)(run, rounds)]
    if model.session.graphs:
        session.release_captured_graph(graph)
    return found


def step_bytes(folder: Path, batch: int, length: int) -> int:
    """Bytes that a step must read: every weight used by a product or norm, and the keys and values so far."""
    manifest = json.loads((folder / "weft.json").read_text(encoding="utf-8"))
    item = dtypes.parse(manifest["dtype"]).bits // 8
    total = batch * length * item * sum(2 * layer["kv_heads"] * layer["head_dim"] for layer in manifest["cache"])
    for name, value in onnx_ir.load(folder / "model.onnx").graph.initializers.items():
        gathered = all(use.node.op_type == "Gather" for use in value.uses())
        if not gathered and not name.startswith("rope.") and value.const_value is not None:
            total += value.const_value.nbytes
    return int(total)


def measure(folder: Path, args: argparse.Namespace, read_rate: float) -> dict[str, Any]:
    """One dtype: agreement, prefill and decode with and without CUDA graphs."""
    result: dict[str, Any] = {}
    tokens: dict[tuple[bool, int], np.ndarray] = {}
    for graphs in (False, True) if args.device == "cuda" else (False,):
        model = opened(folder, args.device, graphs)
        found: dict[str, Any] = {}
        if not graphs:
            for length in args.prompts:
                found[f"prefill_{length}_tokens_per_s"] = spread(prefill(model, length, args.rounds), 1)
        for batch in args.batches:
            length = args.prompts[0]
            rounds = [decode(model, batch, length, args.steps) for _ in range(args.rounds)]
            tokens[graphs, batch] = rounds[0][0]
            runtime = [t for _, times in rounds for t in times]
            alone = device_steps(model, batch, length, 32 if args.device == "cuda" else 4, args.rounds)
            size = step_bytes(folder, batch, length)
            middle = statistics.median(alone)
            found[f"decode_batch_{batch}"] = {
                "tokens_per_s": round(batch / statistics.median(runtime), 1),
                "step_us": spread([t * 1e6 for t in runtime], 1),
                "device_step_us": spread([t * 1e6 for t in alone], 1),
                "device_tokens_per_s": round(batch / middle, 1),
                "step_bytes": size,
                "device_gb_per_s": round(size / middle / 1e9, 1),
                "fraction_of_read_rate": round(size / middle / 1e9 / read_rate, 3),
            }
        result["cuda_graphs" if graphs else "no_graphs"] = found
        del model
    if args.device == "cuda":
        same = {str(b): bool((tokens[True, b] == tokens[False, b]).all()) for b in args.batches}
        result["tokens_with_graphs_equal_without"] = same
    return result


def reference_error(folder: Path, reference: Path, device: str) -> float:
    """‖logits − reference‖ / ‖reference‖ after a prompt of 64 tokens and after each of 8 steps."""
    runs = []
    for place, where in ((folder, device), (reference, "cpu")):
        model = opened(place, where, graphs=where == "cuda")
        prompt, steps = prompts(model, 1, 64), np.random.default_rng(1).integers(0, model.vocab, (8, 1))
        with model.context(1, 80) as context:
            runs.append([context.prefill(prompt).copy(), *(context.step(token).copy() for token in steps)])
    got, want = (np.stack(run) for run in runs)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b", help=f"{', '.join(MODELS)}, or a source that weft compiles")
    parser.add_argument("--dtypes", nargs="+", default=["f16", "bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 2048], help="decoding follows the first")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reference", action="store_true", help="also compile for the CPU in f32, and compare")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to check this script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    source = MODELS[args.model]() if args.model in MODELS else args.model
    length = max(args.prompts) + args.steps
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu-{Path(args.model).stem}.json"
    result: dict[str, Any] = facts("numpy", "torch", "onnx-ir") | {"onnxruntime": onnxruntime().__version__}
    result |= {"model": args.model, "device": args.device, "gpu": _gpu() if args.device == "cuda" else None}
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as temporary:
        folders = {}
        for dtype in args.dtypes:
            folders[dtype] = Path(temporary) / dtype
            weft.compile(source, folders[dtype], target="ort-cuda", dtype=dtype, max_length=length)
        if args.reference:
            reference = Path(temporary) / "f32"
            weft.compile(source, reference, target="ort-cpu", max_length=length)
            errors = {d: reference_error(folder, reference, args.device) for d, folder in folders.items()}
            result["relative_error_of_logits"] = errors
            print(errors, flush=True)
        result["limits"] = limits(args.device)
        read_rate = result["limits"]["read_gb_per_s"]["median"]
        for dtype, folder in folders.items():
            result[dtype] = measure(folder, args, read_rate)
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")  # what is known so far
    print(json.dumps(result, indent=2))


def _gpu() -> str:
    """Name, driver and memory as nvidia-smi says them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
