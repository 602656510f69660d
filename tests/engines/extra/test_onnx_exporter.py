"""`OnnxExporter` of transformers compiles a folder, as a second compiler beside weft's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
def test_onnx_exporter_gives_the_same_logits(name: str, tmp_path: Path) -> None:
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
    ours = weft.load(tmp_path / "ours").hidden_states([ids[0].tolist(), ids[1, :5].tolist()])
    assert error(found[0], ours[0]) <= 1e-5 and error(found[1, :5], ours[1, :5]) <= 1e-5


def test_steps_with_a_cache(tmp_path: Path) -> None:
    """`export_for_generation`: a model for the prompt, and one that reads a token and the caches of the first."""
    folder, ids = compiled("preset/smollm2-135m", tmp_path / "folder"), texts(2, 8, 37)
    sample = {"input_ids": ids[:, :5], "attention_mask": torch.ones_like(ids[:, :5])}
    made = OnnxExporter().export_for_generation(loaded(folder), sample, config=OnnxConfig(dynamic=True))
    made.save_pretrained(tmp_path / "theirs")
    prefill, decode = (ort.InferenceSession(tmp_path / f"theirs/{name}.onnx") for name in ("prefill", "decode"))
    names = [value.name for value in prefill.get_outputs()]
    found = prefill.run(None, given(prefill, ids[:, :7], 0))
    caches = {f"input.{name}": array for name, array in zip(names[1:], found[1:], strict=True)}
    logits = decode.run(["logits"], given(decode, ids[:, 7:], 7) | caches)[0]
    weft.compile(folder, tmp_path / "ours", passes="default,-last-token-logits")
    ours = np.stack([weft.load(tmp_path / "ours").logits(row.tolist()) for row in ids])
    assert error(found[0][:, -1], ours[:, 6]) <= 1e-5 and error(logits[:, -1], ours[:, 7]) <= 1e-5


def given(session: ort.InferenceSession, ids: torch.Tensor, past: int) -> dict[str, Any]:
    """Return the inputs of `session` that are no caches, for `ids` after `past` tokens."""
    positions = np.broadcast_to(past + np.arange(ids.shape[1]), ids.shape)
    mask = np.ones((ids.shape[0], past + ids.shape[1]), np.int64)
    feeds = {"input_ids": ids.numpy(), "position_ids": positions, "attention_mask": mask}
    return {value.name: feeds[value.name] for value in session.get_inputs() if value.name in feeds}


def exported(folder: Path, out: Path, auto: str = "AutoModelForCausalLM") -> ort.InferenceSession:
    """Return the model of `folder` as transformers exports it, in ONNX Runtime."""
    model = loaded(folder, auto)
    model.config.use_cache = False
    ids = texts(2, 7, 37)
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    OnnxExporter().export(model, sample, config=OnnxConfig(dynamic=True)).save_pretrained(out)
    return ort.InferenceSession(out / "model.onnx")
