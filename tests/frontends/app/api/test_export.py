"""The command `weft export`: formats by name, refusals in one line, full disks."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from safetensors.numpy import load_file

from weft.frontends.app.api.export import export
from weft.frontends.app.cli import cli

from ...conftest import Save


def run_export(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["export", *map(str, args)])
    return result.exit_code, result.stderr


def test_suffix_selects_the_format(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    assert run_export(folder, "-o", tmp_path / "a.gguf")[0] == 0
    assert (tmp_path / "a.gguf").read_bytes()[:4] == b"GGUF"
    assert run_export(folder, "-o", tmp_path / "A.SafeTensors") == (0, "")
    assert "embed.weight" in load_file(tmp_path / "A.SafeTensors")
    for name in ("Llama-2.5", "b.gguf/"):  # no such suffix; the name of a folder
        assert run_export(folder, "-o", f"{tmp_path}/{name}")[0] == 0
        assert (tmp_path / name / "config.json").is_file()
    assert export(folder, tmp_path / "b.gguf") == "llama"  # a folder that is there is replaced by one
    assert (tmp_path / "b.gguf" / "config.json").is_file()


def test_refusals_are_one_line(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    (tmp_path / "file").write_text("mine")
    for args, words in (
        (("--format", "onnx", "-o", tmp_path / "out"), "unknown format 'onnx'; weft exports hf, safetensors, gguf"),
        (
            ("-o", tmp_path / "a.gguf", "--format", "hf"),
            "has the suffix of a gguf file, but --format hf writes a folder",
        ),
        (("-o", tmp_path / "a.safetensors", "--format", "gguf"), "but --format gguf writes a .gguf file"),
        (
            ("-o", tmp_path / "a.onnx"),
            "`weft compile` writes ONNX; name a folder, or a .gguf",
        ),
        (("-o", tmp_path / "file"), "a file with that name is in the way"),
        (("-o", folder), f"{folder}: it holds the source"),
        (("-o", "/proc/out"), "cannot write to /proc/out"),
        (("-o", tmp_path / "out", "-p", "kv-cache"), "export before the pass kv-cache"),
        (("-o", tmp_path / "out", "-p", "kv-cache, last-token-logits"), "export before the pass kv-cache"),
        (("-o", tmp_path / "out", "-p", "@gone"), "the pipeline file gone cannot be read: no such file or directory"),
        (("-o", tmp_path / "out", "--dtype", "q8_0"), "a checkpoint cannot be written in q8_0"),
        (
            ("-o", tmp_path / "out", "-p", "sliding-window{size=3, keep_first=1}"),
            "it has keep_first=0, the graph keep_first=1",
        ),
    ):
        status, told = run_export(folder, *args)
        assert status == 2 and told.startswith("weft: error: ") and told.count("\n") == 1
        assert words in told
    assert {p.name for p in tmp_path.iterdir()} == {"model", "file"}
    assert run_export("nowhere", "-o", tmp_path / "out")[0] == 2
