"""`OnnxExporter` of transformers compiles a folder, as a second compiler beside weft's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from transformers.exporters import OnnxConfig, OnnxExporter

import weft

from ..compiled import compiled, error, loaded, texts

NAMES = (
    *("preset/smollm2-135m", "preset/gpt2", "preset/mistral-7b", "preset/mixtral-8x7b", "preset/deepseek-v3"),
    *("family/gemma2", "family/gpt-oss", "family/bloom"),
)


@pytest.mark.parametrize("name", NAMES)
def test_both_compilers_compute_the_same(name: str, tmp_path: Path) -> None:
    """Traced at one size, run at others: batch and length stay free."""
    folder = compiled(name, tmp_path / "folder")
    session = exported(folder, tmp_path / "theirs")
    weft.compile(folder, tmp_path / "ours", passes="default,-last-token-logits")
    ours = weft.load(tmp_path / "ours")
    for rows, seq in ((1, 6), (3, 11)):
        ids = texts(rows, seq, 37, seed=rows)
        logits = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids)})[0]
        assert error(logits, np.stack([ours.logits(row.tolist()) for row in ids])) <= 1e-5


def test_encoders(tmp_path: Path) -> None:
    """With padding, which both leave out."""
    folder = compiled("preset/bert-base", tmp_path / "folder")
    session = exported(folder, tmp_path / "theirs", "AutoModel")
    ids, mask = texts(2, 9, 37), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    found = session.run(["last_hidden_state"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    weft.compile(folder, tmp_path / "ours")
    ours = weft.load(tmp_path / "ours").hidden([ids[0].tolist(), ids[1, :5].tolist()])
    assert error(found[0], ours[0]) <= 1e-5 and error(found[1, :5], ours[1, :5]) <= 1e-5


def exported(folder: Path, out: Path, auto: str = "AutoModelForCausalLM") -> ort.InferenceSession:
    """Return the model of `folder` as transformers exports it, in ONNX Runtime."""
    model = loaded(folder, auto)
    model.config.use_cache = False
    ids = texts(2, 7, 37)
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    OnnxExporter().export(model, sample, config=OnnxConfig(dynamic=True)).save_pretrained(out)
    return ort.InferenceSession(out / "model.onnx")
