"""Commands name the parts of a source that they leave out, and the defaults of sampling that it states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weft.frontends.app.cli import cli
from weft.frontends.app.cli.open_model import find_compiled_folder

from ....e2e.head_models import save

LLAMA = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
SAMPLING = {"temperature": 0.6, "top_k": 20}
DEFAULTS = "--temperature 0.6 --top-k 20"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose config has an unknown key, and its generation_config.json defaults of sampling."""
    home = tmp_path_factory.mktemp("left_out") / "hf"
    save(home, "LlamaForCausalLM", LLAMA, pad_token_id=0, magic=3)
    generation = {**SAMPLING, "do_sample": True, "max_new_tokens": 5, "num_beams": 4}
    (home / "generation_config.json").write_text(json.dumps(generation))
    return home


def command(*args: Any, status: int = 0) -> Any:
    """The result of a command, which exits with `status`."""
    result = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert result.exit_code == status, result.output
    return result


def test_commands_list_parts_that_they_leave_out(folder: Path, tmp_path: Path) -> None:
    ran = command("run", folder, "--prompt", "the cat", "--max-tokens", 2, "--target", "onnx")
    (tmp_path / "text.txt").write_text("the cat sat on the mat . the dog ran far away")
    scored = command("eval", "--against", folder, "--text", tmp_path / "text.txt")
    compiled = command("compile", folder, "-o", tmp_path / "out")
    for result in (ran, scored, compiled):
        assert "left out: key magic (3)" in result.stderr
        assert "left out: key generation_config.json:num_beams (4)" in result.stderr
    assert "left out:\n  key magic (3)" in command("inspect", folder).stdout
    assert "without: magic, generation_config.json:num_beams" in command("verify", tmp_path / "out").stdout


def test_sampling_defaults_are_recorded_and_printed(folder: Path, tmp_path: Path) -> None:
    command("compile", folder, "-o", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "weft.json").read_text())["sampling"] == {**SAMPLING, "max_tokens": 5}
    ask = ("run", tmp_path / "out", "--prompt", "the cat", "--max-tokens", 2)
    assert DEFAULTS in command(*ask).stderr
    assert DEFAULTS not in command(*ask, "--temperature", 0).stderr


def test_a_head_that_is_not_read_is_left_out_of_a_run_if_that_is_accepted(tmp_path: Path) -> None:
    save(tmp_path, "BertForMaskedLM")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("BertForMaskedLM", "BertForQuestionAnswering"))
    ask = ("run", tmp_path, "--prompt", "the cat", "--target", "onnx")
    assert "accept it by --without qa_outputs" in command(*ask, status=2).stderr
    assert len(json.loads(command(*ask, "--without", "qa_outputs").stdout)) == 32
    refusal = command(*ask, "--without", "magic", status=2).stderr
    assert "has no part 'magic' to leave out; parts left out: qa_outputs" in refusal
    command("opt", tmp_path, "-o", tmp_path / "model", "--without", "qa_outputs")
    command("compile", tmp_path / "model", "-o", tmp_path / "out")
    assert "passed, without: qa_outputs" in command("verify", tmp_path / "out").stdout


def test_compiled_folders_are_found_by_their_manifest(compiled_tiny: Path, tiny: Path, tmp_path: Path) -> None:
    assert find_compiled_folder(str(compiled_tiny)) == compiled_tiny
    for source in (tiny, tmp_path, tmp_path / "gone"):
        assert find_compiled_folder(str(source)) is None


def test_options_of_sources_and_of_compiled_folders_are_refused_for_the_other(compiled_tiny: Path, tiny: Path) -> None:
    for args, words in (
        ((compiled_tiny, "--target", "onnx"), "is already compiled: --target applies to uncompiled sources only"),
        ((compiled_tiny, "--without", "x"), "is already compiled: --without applies to uncompiled sources only"),
        ((compiled_tiny, "--trust"), "--trust runs the Python of folders compiled for PyTorch, not of "),
        ((tiny, "--check"), "is not compiled: --check applies to compiled folders only"),
    ):
        assert words in command("run", *args, "--ids", "1", status=2).stderr
    (compiled_tiny / "model.onnx").write_bytes(b"changed")
    assert "model.onnx" in command("run", compiled_tiny, "--check", "--ids", "1", status=2).stderr
