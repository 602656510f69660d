"""Time ONNX Runtime's decode on a GPU, with and without CUDA graphs.

The tokens with CUDA graphs must equal those without; with --reference, logits are compared with f32 on the CPU. A step
is timed three ways: by the runtime, with PyTorch sampling on the device; with logits on the host, which chooses the
token; and on the device alone, run after run without waiting. All of it again with the attention kernel of
ORT_ENABLE_XQA=1. Weights are random; speed does not depend on them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import spread

from .limits import Clock
from .models import SHAPES, architecture
from .pool import Task

WARM = 8  # steps before the clock starts; ONNX Runtime captures its graphs in the first two


def open_decoder(folder: Path, device: str, graphs: bool, draws: bool = False) -> Any:
    """Open a compiled decoder on the device; one that `draws` also chooses tokens there.

    Raises:
        RuntimeError: if ONNX Runtime refuses the requested CUDA graphs.
    """
    from weft.backends.runtime.compiled_folder import read_facts
    from weft.backends.runtime.ort.ort_decoder import OrtDecoder
    from weft.backends.runtime.ort.session import open_session
    from weft.backends.runtime.torch import ort_cuda_decoder as onnx
    from weft.backends.target import TARGETS

    facts = read_facts(folder)
    target = TARGETS[facts.target] if device == "cuda" else None
    stream = onnx.new_stream() if draws and device == "cuda" else None
    session = open_session(facts.model, device=device, target=target, graphs=graphs, stream=stream)
    if session.graphs != graphs:
        raise RuntimeError(f"ONNX Runtime refuses CUDA graphs for {folder}")
    model = OrtDecoder(session, facts)
    if draws:
        model.context_class = onnx.SamplingOrtContext
    return model


def draw_prompts(model: Any, batch: int, length: int) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(0).integers(0, model.vocab, (batch, length)).tolist()
    return ids


def decode(model: Any, batch: int, length: int, steps: int) -> tuple[np.ndarray, list[float]]:
    """Return greedy tokens [steps, batch] after random prompts, and the seconds of every step after WARM."""
    from weft.backends.runtime.core.sampler import Sampler, Sampling

    tokens, times = [], []
    with model.context(batch, length + steps) as context:
        token = context.prefill(draw_prompts(model, batch, length), chunk=2048).argmax(-1)
        samplers = [Sampler(Sampling(), ()) for _ in range(batch)]
        draw, active = context.new_sampling_step(samplers), np.ones(batch, bool)
        for _ in range(steps):
            start = time.perf_counter()
            token = context.step(token).argmax(-1) if draw is None else draw(token, active)
            times.append(time.perf_counter() - start)
            tokens.append(token)
    return np.stack(tokens), times[WARM:]


def prefill(model: Any, length: int, repeats: int) -> list[float]:
    """Return the tokens per second of one prompt, read in one run."""
    rates = []
    with model.context(1, length) as context:
        for i in range(repeats + 2):
            start = time.perf_counter()
            context.prefill(draw_prompts(model, 1, length), chunk=length)
            if i >= 2:
                rates.append(length / (time.perf_counter() - start))
    return rates


def time_device_steps(model: Any, batch: int, length: int, steps: int, rounds: int) -> list[float]:
    """Return seconds per step, the mean of `steps` runs of one step without a pause, for each round."""
    from weft.backends.runtime.ort.session import import_onnxruntime

    with model.context(batch, length + WARM) as context:
        token = context.prefill(draw_prompts(model, batch, length), chunk=2048).argmax(-1)
        for _ in range(WARM // 2):  # captures
            token = context.step(token).argmax(-1)
        binding, options = context._steps_of[None][context._memory.copy_index]
        options = options or import_onnxruntime().RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")

        def run() -> None:
            for _ in range(steps):
                model.session.ort.run_with_iobinding(binding, options)

        clock = Clock(model.session.device)
        times = []
        for _ in range(rounds + 2):  # by the wall clock, because ONNX Runtime has its own stream
            clock.wait()
            start = time.perf_counter()
            run()
            clock.wait()
            times.append((time.perf_counter() - start) / steps)
        return times[2:]


def step_bytes(folder: Path, batch: int, length: int) -> int:
    """Return the bytes that a step must read: all weights of products and norms, and the KV cache so far."""
    import onnx_ir

    from weft.ir.types import dtypes

    manifest = json.loads((folder / "weft.json").read_text(encoding="utf-8"))
    item = dtypes.parse(manifest["dtype"]).bits // 8
    total = batch * length * item * sum(2 * layer["kv_heads"] * layer["head_dim"] for layer in manifest["cache"])
    for name, value in onnx_ir.load(folder / "model.onnx").graph.initializers.items():
        gathered = all(use.node.op_type == "Gather" for use in value.uses())
        if not gathered and not name.startswith("rope.") and value.const_value is not None:
            total += value.const_value.nbytes
    return int(total)


def measure(args: Namespace, folder: Path) -> dict[str, Any]:
    """Measure agreement, prefill and decode with and without CUDA graphs."""
    result: dict[str, Any] = {}
    tokens: dict[tuple[str, int], np.ndarray] = {}
    length, cuda = args.prompts[0], args.device == "cuda"
    for name in ("no_graphs", "cuda_graphs", "drawn") if cuda else ("no_graphs", "drawn"):
        model = open_decoder(folder, args.device, cuda and name != "no_graphs", draws=name == "drawn")
        values: dict[str, Any] = {}
        if name == "no_graphs":
            for seq in args.prompts:
                values[f"prefill_{seq}_tokens_per_s"] = spread(prefill(model, seq, args.rounds), 1)
        for batch in args.batches:
            rounds = [decode(model, batch, length, args.steps) for _ in range(args.rounds)]
            tokens[name, batch] = rounds[0][0]
            runtime = [t for _, times in rounds for t in times]
            decoded = values[f"decode_batch_{batch}"] = {
                "tokens_per_s": round(batch / statistics.median(runtime), 1),
                "step_us": spread([t * 1e6 for t in runtime], 1),
            }
            if name == "drawn":
                continue
            device = time_device_steps(model, batch, length, 32 if cuda else 4, args.rounds)
            size = step_bytes(folder, batch, length)
            middle = statistics.median(device)
            decoded |= {
                "device_step_us": spread([t * 1e6 for t in device], 1),
                "device_tokens_per_s": round(batch / middle, 1),
                "bytes": size,
                "device_gb_per_s": round(size / middle / 1e9, 1),
            }
        result[name] = values
        del model
    others = {"cuda_graphs": "with_graphs", "drawn": "drawn"}
    for name in others.keys() & result.keys():
        same = {str(b): bool((tokens[name, b] == tokens["no_graphs", b]).all()) for b in args.batches}
        result[f"tokens_{others[name]}_equal_without"] = same
    return result


def compute_error(folder: Path, reference: Path, device: str) -> float:
    """Return ‖logits − reference‖ / ‖reference‖ after a prompt of 64 tokens and after each of 8 steps."""
    runs = []
    for path, where in ((folder, device), (reference, "cpu")):
        model = open_decoder(path, where, graphs=where == "cuda")
        prompt, steps = draw_prompts(model, 1, 64), np.random.default_rng(1).integers(0, model.vocab, (8, 1))
        with model.context(1, 80) as context:
            runs.append([context.prefill(prompt).copy(), *(context.step(token).copy() for token in steps)])
    got, want = (np.stack(run) for run in runs)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def prepare_ort(args: Namespace, dtype: str, xqa: bool = False) -> Callable[[], dict[str, Any]]:
    """Compile --model into a folder, and return the function that measures it, with `xqa` or without.

    Raises:
        RuntimeError: if ONNX Runtime has no CUDA provider.
    """
    import weft
    from weft.backends.runtime.ort.session import CUDA, import_onnxruntime

    version = import_onnxruntime().__version__
    if args.device == "cuda" and CUDA not in import_onnxruntime().get_available_providers():
        raise RuntimeError(f"onnxruntime {version} has no CUDA provider")
    source = architecture(SHAPES[args.model]) if args.model in SHAPES else args.model
    length, folder = max(args.prompts) + args.steps, Path(args.scratch) / f"ort{'_xqa' * xqa}"
    weft.compile(source, folder / dtype, target="ort-cuda", dtype=dtype, max_length=length)
    result: dict[str, Any] = {"model": args.model, "onnxruntime": version}
    if args.reference:
        weft.compile(source, folder / f"f32_for_{dtype}", target="ort-cpu", max_length=length)
        reference = folder / f"f32_for_{dtype}"
        result["relative_error_of_logits"] = compute_error(folder / dtype, reference, args.device)

    def run() -> dict[str, Any]:
        os.environ["ORT_ENABLE_XQA"] = str(int(xqa))  # attention kernels read it when a session is opened
        return {**result, **measure(args, folder / dtype)}

    return run


def list_ort(args: Namespace) -> Iterator[Task]:
    """Yield the dtypes that ONNX Runtime supports on the device, and f16 with XQA."""
    for dtype in ("f16", "bf16") if args.device == "cuda" else ("f16",):
        yield Task(dtype, partial(prepare_ort, args, dtype), 60, 60, 16)
    if args.device == "cuda":
        yield Task("f16_xqa", partial(prepare_ort, args, "f16", True), 60, 60, 16)
