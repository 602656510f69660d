"""`weft export`: its messages, and full disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.frontends import load_source

from ...command import largest_file, refused
from ...conftest import Save
from ..api.test_export import run_export


def test_export_names_the_family(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    (tmp_path / "steps.pipeline").write_text("pack-qkv  # undone\nsliding-window{size=8}\n")
    status, told = run_export(folder, "-p", tmp_path / "steps.pipeline", "-o", tmp_path / "out")
    assert (status, told) == (0, f"weft: {tmp_path / 'out'} is a mistral model\n")
    assert load_source(tmp_path / "out").graph.meta["model_type"] == "mistral"
    status, told = run_export(folder, "--format", "gguf", "--trace", "-p", "pack-qkv", "-o", tmp_path / "out.gguf")
    assert status == 0 and "pack-qkv" in told and told.endswith("out.gguf is a llama model\n")
    assert run_export(folder, "--format", "safetensors", "-o", tmp_path / "out.safetensors") == (0, "")


@pytest.mark.parametrize("kind", ["folder", "hf", "gguf", "safetensors"])
def test_full_disk_is_one_line(kind: str, save: Save, tmp_path: Path) -> None:
    """Of files that may not grow as large as the weights, nothing is left."""
    _, folder = save("llama", num_key_value_heads=2)
    verb = ["opt"] if kind == "folder" else ["export", "--format", kind]
    with largest_file(20_000):
        line = refused(*verb, folder, "-o", tmp_path / "out")
    assert line.startswith(f"weft: error: cannot write to {tmp_path / 'out'}: ")
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_pass_without_effect_is_reported(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    status, told = run_export(folder, "-p", "pack-qkv, pack-qkv", "-o", tmp_path / "out")
    assert status == 0 and "pack-qkv" in told.splitlines()[0]
