"""Folders with a live page: the files, and what has no such page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm
from weft.frontends.app.api.draw.drawing import PictureOptions
from weft.frontends.app.api.observe.live import write_live_page
from weft.ir import WeftError

from .....e2e.families import ROWS
from .....e2e.head_models import tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ROWS["mixtral"].save(tmp_path / "hf")
    tokenizer().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def data_of(page: Path) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_folder_has_the_page_and_its_model(checkpoint: Path, tmp_path: Path) -> None:
    report = write_live_page(checkpoint, tmp_path / "page", PictureOptions(0), text="the cat")
    data = data_of(tmp_path / "page/index.html")
    assert data["live"] == {"text": "the cat"}
    assert data["opened"] == [""]
    kinds = {name.partition(".")[0] for name in report.graph.outputs}
    assert kinds >= {"logits", "attention", "residual", "routes", "heads", "sublayers", "parts"}
    assert {name.split(".")[1] for name in report.graph.inputs if "." in name} == {"heads", "experts", "sublayers"}
    assert (tmp_path / "page/live.json").is_file() and (tmp_path / "page/model.onnx_data").is_file()
    write_live_page(checkpoint, tmp_path / "page")  # replaces the folder


def test_models_without_weights_or_a_text_are_refused(tmp_path: Path) -> None:
    model = Decoder(11, 16, 1, Block(Attention(2), GatedMLP(24), RMSNorm()))
    with pytest.raises(WeftError, match="has no trained weights, so its answers are random; use a checkpoint"):
        write_live_page(model, tmp_path / "page")
    with pytest.raises(WeftError, match="has no trained weights"):
        write_live_page("t5-base", tmp_path / "page")
    assert not (tmp_path / "page").exists()
