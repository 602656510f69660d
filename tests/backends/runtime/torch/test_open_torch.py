"""Folders of PyTorch: their modules are imported apart from others, and what is wrong with them is an error."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.folder_facts import FolderFacts
from weft.backends.runtime.torch.open_torch import TorchEncoder, import_from, open_decoder, open_encoder
from weft.backends.target import import_torch
from weft.ir import WeftError


@pytest.fixture
def facts(tmp_path: Path) -> FolderFacts:
    (tmp_path / "model.py").write_text("raise ZeroDivisionError('of the folder')\n")
    return FolderFacts(tmp_path, (tmp_path / "model.py",), "decoder", "torch", vocab=9, max_length=8)


def test_modules_are_imported_from_the_folder_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = type(sys)("kernels")
    monkeypatch.setitem(sys.modules, "kernels", other)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("VALUE = 7\n")
    path = list(sys.path)
    with import_from(tmp_path):
        import kernels

        assert kernels.VALUE == 7
    assert sys.modules["kernels"] is other and sys.path == path


def test_missing_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_torch() is torch
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WeftError, match=r"PyTorch cannot be imported .*install weft\[torch\]"):
        import_torch()


def test_arguments_are_checked_before_code_runs(facts: FolderFacts) -> None:
    with pytest.raises(WeftError, match="device is 'gpu', but it must be one of auto, cpu, cuda"):
        open_decoder(facts, "gpu", None)
    with pytest.raises(WeftError, match="threads is 0"):
        open_encoder(facts, "cpu", 0)
    with pytest.raises(WeftError, match="is an encoder, whose experts cannot be offloaded: leave out experts_on"):
        open_decoder(replace(facts, kind="encoder"), "cpu", None, experts=2)


def test_error_of_the_code_in_a_folder_is_named(facts: FolderFacts) -> None:
    with pytest.raises(WeftError, match=r"model\.py: cannot be run: ZeroDivisionError: of the folder"):
        open_decoder(facts, "cpu", None)


class Doubling(torch.nn.Module):
    """Imitate a generated encoder with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0, dtype=torch.bfloat16))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if input_ids.shape[1] > 3:
            raise ValueError("too\nlong")
        return attention_mask.sum(1), (input_ids[..., None] * self.weight).expand(-1, -1, 2)


def test_encoder_returns_outputs_by_name_as_float32(facts: FolderFacts) -> None:
    encoder = TorchEncoder(Doubling(), replace(facts, kind="encoder", outputs=("count", "last_hidden_state")))
    (hidden,) = encoder.hidden_states([[3, 4]])
    assert hidden.dtype == np.float32 and hidden.tolist() == [[6, 6], [8, 8]]
    with pytest.raises(WeftError, match="PyTorch failed: too long"):
        encoder.hidden_states([[1, 2, 3, 4]])


def test_model_without_hidden_states_is_not_an_encoder(facts: FolderFacts) -> None:
    with pytest.raises(WeftError, match="its outputs are logits, so it is not an encoder"):
        TorchEncoder(Doubling(), replace(facts, outputs=("logits",)))
