"""Compare weft with transformers on SmolLM2-135M in PyTorch on a CPU: prefill of 512 tokens and decode of 128.

The contenders take turns (`turns`). `weft` is the folder of `weft compile --target torch`, in f32 and in bf16: its
module for prefill and its decode step; `weft_module` also decodes with the module.
`weft_int4` and `weft_int8` are folders of `--weights` in bf16, `weft_int4_f32` and `weft_int8_f32` the same in f32.
transformers runs eagerly with its growing cache, and with a static cache and compiled steps.

    python benchmarks/bench_torch.py [--sets 4] [--rounds 2] [--threads 2] [--only weft,weft_int4]
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import facts, save
from smollm2 import GGUF, hugging_face_folder
from turns import DECODE, PROMPT, ReadBandwidth, build_parser, compare, run_sets, serve

FOLDERS: dict[str, dict[str, Any]] = {  # options of `weft.compile`
    "weft": {},
    "weft_bf16": {"dtype": "bf16"},
    "weft_int4": {"dtype": "bf16", "weights": "int4{method=rtn}"},  # fitted codes are as fast
    "weft_int8": {"dtype": "bf16", "weights": "int8{method=rtn}"},
    "weft_int4_f32": {"weights": "int4{method=rtn}"},
    "weft_int8_f32": {"weights": "int8{method=rtn}"},
}
OURS = [*FOLDERS, "weft_module"]
PEERS = ["hf_eager", "hf_compile"]


class WeftRun:
    """Run a compiled folder: prefill by its module, decode by its step or, if `plain`, also by the module."""

    def __init__(self, folder: Path, threads: int, plain: bool = False) -> None:
        torch.set_num_threads(threads)
        sys.path.insert(0, str(folder))
        spec = importlib.util.find_spec("load")
        assert spec is not None
        load = importlib.import_module("load")
        self.model = load.load_model(folder)
        self.step_of = None if plain else importlib.import_module("decode").DecodeStep(self.model)
        self.cache: Any = None

    def prefill(self, ids: np.ndarray) -> int:
        with torch.inference_mode():
            self.cache = self.model.new_cache(1, PROMPT + DECODE + 1)
            logits = self.model(torch.from_numpy(ids), cache=self.cache, last=torch.tensor([PROMPT - 1]))
            return int(logits[0, -1].argmax())

    def step(self, token: int, done: int) -> int:
        with torch.inference_mode():
            ids = torch.tensor([[token]])
            if self.step_of is None:
                return int(self.model(ids, cache=self.cache)[0, -1].argmax())
            return int(self.step_of(ids, torch.tensor([[PROMPT + done]]), self.cache)[0, -1].argmax())


class EagerRun:
    """Run transformers in eager mode with its SDPA and growing cache; logits of the last token only."""

    def __init__(self, folder: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.cache: Any = None

    def _run(self, ids: Any) -> int:
        with torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return int(out.logits[0, -1].argmax())

    def prefill(self, ids: np.ndarray) -> int:
        self.cache = None
        return self._run(torch.from_numpy(ids))

    def step(self, token: int, done: int) -> int:
        return self._run(torch.tensor([[token]]))


class CompiledRun(EagerRun):
    """Run transformers with a static cache; steps are compiled by `torch.compile`, prefill is eager."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder, threads)
        from transformers import StaticCache

        self.make = lambda: StaticCache(self.model.config, max_cache_len=PROMPT + DECODE + 1)
        self.compiled = torch.compile(self.model, fullgraph=False, dynamic=False)

    def prefill(self, ids: np.ndarray) -> int:
        self.cache = self.make()
        with torch.inference_mode():
            at = torch.arange(PROMPT)
            out = self.model(
                torch.from_numpy(ids), past_key_values=self.cache, cache_position=at, use_cache=True, logits_to_keep=1
            )
        return int(out.logits[0, -1].argmax())

    def step(self, token: int, done: int) -> int:
        with torch.inference_mode():
            at = torch.tensor([PROMPT + done])
            out = self.compiled(torch.tensor([[token]]), past_key_values=self.cache, cache_position=at, use_cache=True)
        return int(out.logits[0, -1].argmax())


def child(name: str, folder: Path, prompt_folder: Path, threads: int) -> None:
    """Run a contender's process."""
    kinds: dict[str, Any] = {"hf_eager": EagerRun, "hf_compile": CompiledRun, "bandwidth": ReadBandwidth}
    kinds["weft_module"] = lambda folder, threads: WeftRun(folder, threads, plain=True)
    serve(kinds.get(name, WeftRun)(folder, threads), prompt_folder)


def main() -> None:
    parser = build_parser(__doc__, sets=4)
    parser.add_argument("--only", default=",".join([*OURS, *PEERS]), help="contenders, including weft; not saved")
    args = parser.parse_args()
    if args.child:
        name, folder, prompt_folder = args.child
        child(name, Path(folder), Path(prompt_folder), args.threads)
        return
    import weft

    only = args.only.split(",")
    ours = [name for name in OURS if name in only]
    with tempfile.TemporaryDirectory() as work:
        paths = {name: Path(work) / name for name in ("hf", *FOLDERS)}
        if set(PEERS) & {*only}:
            hugging_face_folder(GGUF, paths["hf"])
        for name, settings in FOLDERS.items():
            if name in only:
                weft.compile(GGUF, paths[name], target="torch", **settings)
        folders = {name: str(paths.get(name, paths["weft"])) for name in ours}
        folders |= {name: str(paths["hf"]) for name in PEERS if name in only}
        results = run_sets(__file__, folders, args, prompts="weft")
    comparison = compare(results, ours)
    if {*only} != {*OURS, *PEERS}:
        print(json.dumps(comparison, indent=2))
        return
    what = f"SmolLM2-135M with PyTorch, prompt {PROMPT}, decode {DECODE}, {args.threads} threads"
    save("torch_cpu", {"what": what, "machine": facts("torch", "transformers", "numpy"), **comparison})


if __name__ == "__main__":
    main()
