"""Fitted codes of compiled folders: taken from the folder, and returned to the matrices of the source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

from .....sampling import by_turns
from ....formats.weft.sealing import seal_again
from ..test_weights import ExactOptions
from .test_stored import TARGETS, compiled, verified, verified_without_text

FITTED = ["int4{TEXT}", "int3{TEXT}", "int2{TEXT, zeros=false, group=32}", "int8{TEXT}"]


@pytest.mark.parametrize(("weights", "name", "target"), by_turns(FITTED, ["tied", "untied", "mixture"], TARGETS))
def test_fitted_codes_are_taken_from_the_folder(
    weights: str, name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the text is read nor GPTQ run; the reference is within the tolerance of f32 all the same."""
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    found = verified_without_text(compiled(tmp_path, name, weights, target), monkeypatch)
    assert found.passed and found.max_relative < 1e-4
    assert target == "onnx" or found.tolerance < 1e-4
    assert found.weights is not None and found.weights.wrong is None
    # Of a layer 4 matrices of attention and 3 of what follows, and the head; a table that is only looked up is rounded
    # to the nearest, and compared. Where both are one weight, the gain of the last norm, rotated, is a matrix, too.
    assert found.weights.fitted == {"tied": 2 * 7 + 1 + 1, "untied": 2 * 7 + 1, "mixture": 7 + 1}[name]
    assert found.weights.farthest is not None
    bits = int(weights[3])
    assert 2.0 ** -(bits + 2) < found.weights.farthest < 2.0 ** -(bits - 2)


def test_fitted_codes_of_another_matrix_are_found(tmp_path: Path) -> None:
    """Rows in another order are farther from the original than zeros."""
    folder = compiled(tmp_path, "untied", "int4{TEXT}", "torch")
    tensors = load_file(folder / "model.safetensors")
    for part in ("codes", "scales", "offsets"):
        name = f"layers.0.ffn.up.{part}"
        tensors[name] = np.ascontiguousarray(tensors[name][::-1] if part == "codes" else tensors[name][:, ::-1])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    seal_again(folder)
    found = verified(folder)
    assert not found.passed and found.weights is not None and found.weights.wrong is not None
    assert "layers.0.ffn.up" in found.weights.wrong and "than zeros" in found.weights.wrong
