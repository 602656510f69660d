"""Compare weft with its peers on SmolLM2-135M in fp32 on a CPU: prefill of 512 tokens and decode of 128.

The contenders take turns (`turns`). A common loop runs the peers' graphs, and weft's as `weft_graph`: I/O binding,
shared cache buffers, argmax on the host.

weft's runtime runs four folders: compiled without options; with --prepack, where ONNX Runtime maps the packed weights
from the file, by huge pages where the system can; the same with --keep-blocks head, where the head reads the GGUF's
8-bit blocks; and with --keep-blocks all, where every product reads its 4- or 8-bit blocks. Weights are equal
everywhere, and all arithmetic is in f32.

    python benchmarks/bench_speed.py [--sets 8] [--rounds 2] [--threads 2]
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts, save
from smollm2 import GGUF, builder_command, hugging_face_folder
from turns import DECODE, PROMPT, ReadBandwidth, build_parser, compare, run_sets, serve

from weft.backends.runtime.ort.session import import_onnxruntime

LAYERS = 30
VOCAB = 49152


class OnnxRun:
    """Run an ONNX graph in the common loop."""

    def __init__(self, folder: Path, threads: int) -> None:
        ort = import_onnxruntime()
        ort.set_global_thread_pool_sizes(threads, 1)
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        self.session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        shapes = {i.name: i.shape for i in self.session.get_inputs()}
        self.inputs = set(shapes)
        self.all_logits = self.session.get_outputs()[0].shape[1] != 1
        make = ort.OrtValue.ortvalue_from_numpy
        capacity = PROMPT + DECODE
        # An OrtValue shares the memory of its array, so every cache needs a separate one.
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


class WeftRun:
    """Run a folder in weft's runtime, like `generate`."""

    def __init__(self, folder: Path, threads: int) -> None:
        import weft

        model: Any = weft.load(folder, device="cpu", threads=threads)
        self.context = model.decoder.new_context(1, PROMPT + DECODE)

    def prefill(self, ids: np.ndarray) -> int:
        return int(self.context.prefill([ids[0].tolist()])[0].argmax())

    def step(self, token: int, done: int) -> int:
        return int(self.context.step([token])[0].argmax())


class HuggingFaceRun:
    """Run transformers in eager mode with its SDPA and growing cache; logits of the last token only."""

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


def child(name: str, folder: Path, prompt_folder: Path, threads: int) -> None:
    """Run a contender's process."""
    match name:
        case "hf_eager":
            run: Any = HuggingFaceRun(folder, threads)
        case "bandwidth":
            run = ReadBandwidth(folder, threads)
        case _ if name.startswith("weft") and not name.endswith("_graph"):
            run = WeftRun(folder, threads)
        case _:
            run = OnnxRun(folder, threads)
    serve(run, prompt_folder)


def main() -> None:
    args = build_parser(__doc__, sets=8).parse_args()
    if args.child:
        name, folder, prompt_folder = args.child
        child(name, Path(folder), Path(prompt_folder), args.threads)
        return
    with tempfile.TemporaryDirectory() as work:
        folders = prepare(Path(work))
        results = run_sets(__file__, folders, args, prompts="weft")
    save("speed", summarize(results, args.threads))


def prepare(work: Path) -> dict[str, str]:
    """Write every contender's folder."""
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
        "weft_graph": "weft",
        "weft_prepack": "weft_prepack",
        "weft_keep_head": "weft_keep_head",
        "weft_keep_all": "weft_keep_all",
        "builder": "builder",
        "builder_prune_lm_head": "builder_prune",
        "hf_eager": "hf",
    }
    return {name: str(work / folder) for name, folder in names.items()}


def summarize(results: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Return the results to save, without ratios between the runs of weft."""
    names = list(results[0]["times"])
    ours = [n for n in names if n.startswith("weft")]
    comparison = compare(results, ours)
    for ratios in comparison["speedup_over"].values():
        for run in ratios.values():
            for name in ours:
                run.pop(name, None)
    comparison["same_greedy_tokens_as_weft"] = comparison.pop("same_greedy_tokens")
    what = f"SmolLM2-135M fp32, prompt {PROMPT}, decode {DECODE}, {threads} threads"
    machine = facts("onnxruntime", "onnxruntime-genai", "torch", "transformers", "numpy")
    return {"what": what, "machine": machine, **comparison}


if __name__ == "__main__":
    main()
