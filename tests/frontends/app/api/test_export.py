"""The command `weft export`: formats by name, refusals in one line, full disks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import weft
from weft.frontends import load_source
from weft.frontends.app.api.export import export, write_parameters
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.cli import cli
from weft.ir import WeftError
from weft.ir.recipes import Scale

from ...conftest import Save
from ...export.folders import LAYER, write_llama


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


def test_dropout_of_a_trained_architecture_is_left_out(tmp_path: Path) -> None:
    block = weft.Block(weft.Attention(2, rope=weft.RoPE()), weft.GatedMLP(16), weft.RMSNorm(), dropout=0.1)
    assert export(weft.Decoder(32, 8, 1, block), tmp_path / "out") == "llama"


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


def test_parameters_have_their_names_values_and_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model", np.float16)
    model = rewrite(load_source(tmp_path / "model"), "pack-qkv")
    steps = list[tuple[str, int, int]]()
    write_parameters(model, tmp_path / "out", progress=lambda *step: steps.append(step))
    written = load_file(tmp_path / "out")
    packed = np.concatenate([tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv"])
    np.testing.assert_array_equal(written["layers.0.attn.qkv.weight"], packed)
    assert {array.dtype for array in written.values()} == {np.dtype(np.float16)}
    assert "rope.frequencies" not in written and len(written) == len(tensors) - 2
    assert steps[-1][1] == steps[-1][2] == sum(array.nbytes for array in written.values())


def test_requested_dtype_rounds_the_values(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    write_parameters(load_source(tmp_path / "model"), tmp_path / "out", dtype="f16")
    written = load_file(tmp_path / "out")
    np.testing.assert_array_equal(written["lm_head.weight"], tensors["lm_head.weight"].astype(np.float16))


def test_value_beyond_the_dtype_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    model = load_source(tmp_path / "model")
    head = model.graph.params["lm_head.weight"]
    head.recipe = Scale(head.recipe, 1e6)
    with pytest.raises(WeftError, match=r"lm_head\.weight"):
        write_parameters(model, tmp_path / "out", dtype="f16")
    assert not (tmp_path / "out").exists()
