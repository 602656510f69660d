"""Folders of unknown types: the families that they resemble, and reading them as one of those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

import weft
from weft.backends.runtime.compiled_folder import read_manifest
from weft.frontends.app.api.source.sources import load_recorded_source
from weft.frontends.app.cli import cli
from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.other_types import REFUSED
from weft.ir import WeftError

from ...e2e.families import COMMON, GQA, ROWS, UNTIED, randomized
from ...sampling import others_long


def renamed(name: str, folder: Path, model_type: str = "mystery") -> Path:
    """The model of the row `name` in `folder`, its config of another type."""
    ROWS[name].save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    ("name", "family"), others_long([("qwen2-gqa-tied", "qwen2"), ("gemma2", "gemma2"), ("deepseek-v3", "deepseek_v3")])
)
def test_the_error_names_the_family_that_reads_all(name: str, family: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="model_type 'mystery' is not known") as e:
        weft.load_source(renamed(name, tmp_path))
    assert f"it reads most like {family} (all parameters fit" in str(e.value)
    assert str(e.value).endswith(f"try --as {family}")
    assert len(str(e.value)) < 500


def test_what_the_nearest_family_does_not_read_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Jais2Config(**(COMMON | GQA | UNTIED))
    randomized(transformers.Jais2ForCausalLM(config)).save_pretrained(tmp_path)
    with pytest.raises(
        WeftError, match=r"nemotron \(all parameters fit; config keys it does not read: layer_norm_eps\)"
    ):
        weft.load_source(tmp_path)
    ours = CliRunner().invoke(cli, ["compile", str(tmp_path), "--as", "nemotron", "-o", str(tmp_path / "out")])
    assert ours.exit_code == 2
    assert "is not a nemotron model" in ours.output  # whose norms multiply by 1 + weight


@pytest.mark.parametrize("kind", REFUSED)
def test_why_a_type_is_not_read(kind: str, tmp_path: Path) -> None:
    assert kind in transformers.CONFIG_MAPPING and kind not in FAMILIES
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(WeftError, match=f"models of type {kind} are not supported: {REFUSED[kind]}"):
        weft.load_source(tmp_path)


def test_a_folder_without_weights_lists_the_families(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    with pytest.raises(WeftError, match="model_type 'mystery' is not known, and fits none of the"):
        weft.load_source(tmp_path)


def test_read_as_a_family(tmp_path: Path) -> None:
    """Compiled, and read again from what the manifest says."""
    renamed("qwen3-gqa", tmp_path / "hf")
    report = weft.compile(tmp_path / "hf", tmp_path / "out", family="qwen3")
    assert report.model.unread == []
    again = load_recorded_source(tmp_path / "out", read_manifest(tmp_path / "out"))
    assert again.family == "qwen3"
    assert again.graph == report.model.graph


def test_an_unknown_family_to_read_as(tmp_path: Path) -> None:
    renamed("qwen3-gqa", tmp_path)
    with pytest.raises(WeftError, match="unknown family 'qwen33'"):
        weft.load_source(tmp_path, family="qwen33")
    with pytest.raises(WeftError, match="--as needs a Hugging Face folder"):
        weft.load_source("gpt2", family="qwen3")


def test_the_command_compares_with_transformers(tmp_path: Path) -> None:
    ROWS["arcee"].save(tmp_path / "hf")
    done = CliRunner().invoke(cli, ["compile", str(tmp_path / "hf"), "--as", "arcee", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert f"equal to transformers on {tmp_path / 'hf'} within " in done.output
