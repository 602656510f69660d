"""Folders with --layout optimum in optimum: its tokens and vectors are those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft

from ...e2e.families import ROWS, VOCAB
from ...e2e.head_models import BERT, save
from ...e2e.seq2seq import SEQ2SEQ
from ..node import ROOT

NEW = 10
KINDS = {
    "llama-gqa-tied": "ForCausalLM",
    "qwen3-gqa": "ForCausalLM",
    "gemma2": "ForCausalLM",
    "bloom": "ForCausalLM",
    "mixtral": "ForCausalLM",
    "t5": "ForSeq2SeqLM",
    "bart": "ForSeq2SeqLM",
    "bert": "ForFeatureExtraction",
    "mpnet": "ForFeatureExtraction",
}


def in_optimum(job: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of in_optimum.py, which runs with the packages of `make test-engines`."""
    script, packages = Path(__file__).parents[1] / "in_optimum.py", ROOT / "build" / "optimum"
    env = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, input=json.dumps([job]), capture_output=True, text=True, env=env, cwd=packages)
    assert done.returncode == 0, done.stderr[-3000:]
    replies: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return replies[0]


@pytest.mark.parametrize("name", KINDS)
def test_folders_give_what_transformers_gives(name: str, tmp_path: Path) -> None:
    model: Any = (ROWS | SEQ2SEQ)[name].save(tmp_path / "hf").eval()
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx", layout="optimum", max_length=40)
    ids = torch.tensor(np.random.default_rng(0).integers(3, VOCAB, (2, 9)))
    new = 0 if KINDS[name] == "ForFeatureExtraction" else NEW
    job = {"folder": str(tmp_path / "out"), "class": f"ORTModel{KINDS[name]}", "ids": ids.tolist(), "new": new}
    made = in_optimum(job)
    with torch.inference_mode():
        if new:
            settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "eos_token_id": None}
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            assert made["tokens"] == wanted.tolist()
        else:
            wanted = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            assert np.abs(np.array(made["outputs"]["last_hidden_state"]) - wanted.numpy()).max() < 1e-4


def test_classifiers_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model: Any = save(tmp_path / "hf", "BertForSequenceClassification", BERT).eval()
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx", layout="optimum")
    ids = [[2, 5, 9, 12, 3]]
    job = {"folder": str(tmp_path / "out"), "class": "ORTModelForSequenceClassification", "ids": ids, "new": 0}
    with torch.inference_mode():
        wanted = model(torch.tensor(ids)).logits.numpy()
    assert np.abs(np.array(in_optimum(job)["outputs"]["logits"]) - wanted).max() < 1e-4


def test_smollm2_generates_the_tokens_of_weft(smollm2_gguf: Path, tmp_path: Path) -> None:
    weft.compile(smollm2_gguf, tmp_path / "out", target="onnx", layout="optimum")
    model = weft.load(tmp_path / "out")
    prompt = model.tokenizer.encode("The capital of France is")
    wanted = model.generate(prompt, max_tokens=16, temperature=0)[0].tokens
    job = {"folder": str(tmp_path / "out"), "class": "ORTModelForCausalLM", "ids": [prompt], "new": 16}
    assert in_optimum(job)["tokens"][0][len(prompt) :][: len(wanted)] == wanted
