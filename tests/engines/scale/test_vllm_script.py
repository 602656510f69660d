"""benchmarks/vllm_folder.py without vLLM: its reference beside the emulated engine, and differences that it finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from .contract import VLLM, serve
from .models import VOCAB, folder_named

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "vllm_folder.py"
TOKENS, NEAR = 4, 1e-3


def script() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_folder", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(folder: Path, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy tokens of the emulated engine for texts in one row, each with its log-probability."""
    found: list[dict[str, Any]] = [{"tokens": [], "likely": []} for _ in texts]
    for _ in range(TOKENS):
        rows = [torch.tensor([*text, *made["tokens"]]) for text, made in zip(texts, found, strict=True)]
        for made, logits in zip(found, serve(folder, VLLM, rows)[0], strict=True):
            likely = logits[-1].log_softmax(-1)
            made["tokens"].append(int(likely.argmax()))
            made["likely"].append(float(likely.max()))
    return found


def test_script_distinguishes_agreeing_and_wrong_engines(tmp_path: Path) -> None:
    module, (folder, _) = script(), folder_named("mixtral", tmp_path)
    texts = module.draw_prompts(VOCAB, [6, 5, 4])
    want, got = module.reference(str(folder), texts, TOKENS, "cpu"), answers(folder, texts)
    assert module.find_differences(want, got, NEAR) == []
    assert [made["tokens"] for made in got] == [made["tokens"] for made in want]
    got[1]["likely"][2] -= 0.5
    got[2]["tokens"][0] = worst = int(want[2]["likely"][0].argmin())
    got[2]["likely"][0] = float(want[2]["likely"][0][worst])
    told = module.find_differences(want, got, NEAR)
    assert len(told) == 2
    assert told[0].startswith("text 1, token 2: log-probability")
    assert told[1] == f"text 2, token 0: {worst}, and {want[2]['tokens'][0]} is more likely"
