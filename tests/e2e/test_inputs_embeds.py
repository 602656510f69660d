"""Decoders that take embeddings of tokens, as behind an encoder of images, against transformers' `inputs_embeds`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import weft
from weft.frontends import load_source
from weft.ir import WeftError

from ..caches import empty_caches
from ..sampling import by_turns
from .families import LENGTH, ROWS, VOCAB, error
from .test_families import CHUNKS

TOLERANCE = 1e-4
SCALED = ("gemma2", "gemma3")  # whose embedding in transformers multiplies its rows itself
NAMES = ("llama-gqa-tied", "qwen3-gqa", "gpt2-tied", "granite", "mixtral", "mamba", *SCALED)


def embedded(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [1, seq, dim] that are those of no tokens, and the logits that transformers makes of them; the model
    is saved in `folder`."""
    model: Any = ROWS[name].save(folder)
    with torch.inference_mode():
        rows = model.get_input_embeddings()(torch.from_numpy(np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))))
        rows = rows + rows.roll(1, 1) / 2
        return rows.numpy(), model(inputs_embeds=rows, use_cache=False).logits.numpy()


def in_onnx(folder: Path, rows: np.ndarray, chunk: int) -> np.ndarray:
    """Logits of the compiled model, `chunk` rows at a time."""
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {i.name: i for i in session.get_inputs()}
    assert "input_ids" not in inputs
    state = empty_caches(session, 1, LENGTH)
    found = []
    for start in range(0, LENGTH, chunk):
        part = rows[:, start : start + chunk]
        end = start + part.shape[1]
        call = {
            "inputs_embeds": part,
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end)[None],
        }
        names = [o.name for o in session.get_outputs()]
        fed = {name: array for name, array in {**call, **state}.items() if name in inputs}
        made = dict(zip(names, session.run(None, fed), strict=True))
        found.append(made.pop("logits"))
        state = {k.replace("present_", "past_").replace("present.", "past_key_values."): v for k, v in made.items()}
    return np.concatenate(found, 1)


@pytest.mark.parametrize(("name", "target"), by_turns(NAMES, ["onnx", "ort-cpu", "torch"]))
def test_embeddings_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    rows, want = embedded(name, tmp_path / "hf")
    taken = f"take-embeddings{{scaled={str(name in SCALED).lower()}}}"
    if target == "torch":
        net: Any = weft.torch(tmp_path / "hf", passes=f"default, {taken}")
        given = torch.from_numpy(rows)
        with torch.inference_mode():
            assert error(net(given).numpy(), want) <= TOLERANCE
            for chunk in CHUNKS.values():
                cache = net.new_cache(1, LENGTH)
                parts = [net(part, cache=cache).numpy() for part in given.split(chunk, 1)]
                assert error(np.concatenate(parts, 1), want) <= TOLERANCE
        return
    passes = f"default,-last-token-logits, {taken}"
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes=passes, max_length=LENGTH)
    for chunk in CHUNKS.values():
        assert error(in_onnx(tmp_path / "out", rows, chunk), want) <= TOLERANCE


def test_take_embeddings_runs_before_caches(tmp_path: Path) -> None:
    """Caches are given to models without ids, too."""
    rows, want = embedded("llama-gqa-tied", tmp_path / "hf")
    passes = "take-embeddings, default,-last-token-logits"
    report = weft.compile(tmp_path / "hf", tmp_path / "out", passes=passes, max_length=LENGTH)
    assert "onnxruntime-genai cannot run this model: it takes embeddings of tokens, not their ids" in report.notes
    assert error(in_onnx(tmp_path / "out", rows, 5), want) <= TOLERANCE


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
def test_text_prompts_are_refused(target: str, tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes="default, take-embeddings")
    with pytest.raises(WeftError, match=r"the model takes embeddings \(inputs_embeds\), not prompts: run it with ONNX"):
        weft.load(tmp_path / "out", trust=True)


def test_token_ids_with_other_readers_remain_inputs(tmp_path: Path) -> None:
    ROWS["gemma3n"].save(tmp_path / "hf")
    graph = weft.run_passes(load_source(tmp_path / "hf").graph, "take-embeddings")
    assert "inputs_embeds" not in graph.inputs
