"""Hugging Face folders by transformers: classes, dtype, and folders that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.frontends.app.api.verify.transformers_reference import load_transformers
from weft.ir import WeftError


def test_a_folder_opens_as_the_given_class_or_its_own(llamas: tuple[Path, Path]) -> None:
    net = load_transformers(llamas[0], "AutoModel", "--against")
    assert type(net).__name__ == "LlamaModel" and not net.training and next(net.parameters()).dtype == torch.float32
    own = load_transformers(llamas[0], "AutoModel", "--against", own_kind=True)
    assert type(own).__name__ == "LlamaForCausalLM"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"no config\.json"):
        load_transformers(tmp_path, "AutoModel", "--against")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(WeftError, match="transformers cannot load"):
        load_transformers(tmp_path, "AutoModel", "--against")
