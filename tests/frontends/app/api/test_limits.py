"""Counts and sizes that no file can hold are refused at once, and what is named by mistake with what is meant."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Never

import onnx
import pytest
from onnx import TensorProto, helper

from weft.ir.errors import WeftError
from weft.ir.recipes import Concat, Full
from weft.ir.recipes.readers import EMPTY

from ....fuzz.binary import parse_gguf, write_gguf
from ....fuzz.seeds import ARCHITECTURES
from ...command import done, refused


@pytest.fixture
def exported(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model as a Hugging Face folder."""
    done("export", tiny, "-o", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("layers", [1_000_000, 2**70])
def test_layer_count_beyond_the_tensors_is_refused(layers: int, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    assert f"num_hidden_layers={layers} is too large: its checkpoint has only " in refused("inspect", exported)


def test_block_count_beyond_the_tensors_is_refused(tiny: Path, tmp_path: Path) -> None:
    done("export", tiny, "--format", "gguf", "-o", tmp_path / "x.gguf")
    parts = parse_gguf((tmp_path / "x.gguf").read_bytes())
    parts.keys = [(n, k, 2**32 - 1 if n == b"llama.block_count" else v) for n, k, v in parts.keys]
    (tmp_path / "x.gguf").write_bytes(write_gguf(parts))
    assert "block_count=4294967295 is too large: its checkpoint has only " in refused("inspect", tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seq]", "seq^99999999]", "a size has the power 99999999, above 64"),
        ("seq]", "(seq + batch + a + b + c + d)^60]", "a size has more than 512 terms"),
        ("seq]", f"{'(' * 99}seq{')' * 99}]", "nested more than 64 deep"),
        ("seq]", f"{'-' * 5000}seq]", "more than 512 signs"),
        ("seq]", f"{'9' * 5000}]", "a number of 5000 characters"),
        ("seq]", "2^64^64^64]", "expected end but found '^'"),
        ("seq]", "floordiv(seq, 0)]", "the size seq is divided by 0"),
        ("heads=4", 'heads="\\q"', "Invalid \\escape"),
        ("heads=4", "heads=" + "[" * 5000, "values are nested more than 64 deep"),
        ("heads=4", "heads=" + "9" * 5000, "a number of 5000 characters"),
        ('meta vocab = 12', "meta vocab = " + "[" * 5000, "nested more than 100 deep"),
        ('meta vocab = 12', "meta vocab = " + "9" * 5000, "a number of 5000 characters"),
    ],
)  # fmt: skip
def test_text_beyond_the_limits_is_refused(old: str, new: str, words: str, tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    assert old in text
    (tmp_path / "x.weft").write_text(text.replace(old, new, 1))
    found = refused("inspect", tmp_path / "x.weft")
    assert words in found and len(found) < 1500


def deep_functions(depth: int, calls: int) -> onnx.ModelProto:
    """A model that calls a function, which calls another one `calls` times, and so on."""
    functions = []
    for i in range(depth):
        inner, domain = (f"f{i + 1}", "own") if i < depth - 1 else ("Identity", "")
        nodes = [helper.make_node(inner, [f"v{k}"], [f"v{k + 1}"], domain=domain) for k in range(calls)]
        made = helper.make_function("own", f"f{i}", ["v0"], [f"v{calls}"], nodes, [helper.make_opsetid("", 21)])
        functions.append(made)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="own")], "g", [x], [y])
    return helper.make_model(graph, functions=functions, opset_imports=[helper.make_opsetid("", 21)])


def test_exponential_onnx_functions_are_refused(tmp_path: Path) -> None:
    onnx.save(deep_functions(9, 10), tmp_path / "x.onnx")
    words = "too many operations to draw: calls of functions expand to more than 30,000"
    assert words in refused("viz", tmp_path / "x.onnx", "-o", tmp_path / "x.svg")
    onnx.save(deep_functions(2, 10), tmp_path / "x.onnx")
    done("viz", tmp_path / "x.onnx", "-o", tmp_path / "x.svg")


def test_unknown_onnx_versions_are_refused(tmp_path: Path) -> None:
    model = deep_functions(1, 1)
    model.opset_import[0].version = 2**40
    onnx.save(model, tmp_path / "x.onnx")
    words = "opset version 1099511627776 of ai.onnx is not between"
    assert words in refused("viz", tmp_path / "x.onnx", "-o", tmp_path / "x.svg")


def test_invalid_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for source, words in (
        ("model.safetensors", "name the folder with its config.json"),
        ("model.onnx", "`weft viz` draws it, and `weft run` runs its folder"),
        ("pytorch_model.bin", "pickled PyTorch weights, which run code when they are read"),
        ("someone/model", "not in the local cache: fetch it with `hf download someone/model`"),
        ("pipe", "pipe is a pipe, not a file"),
        ("/dev/zero", "/dev/zero is a device, not a file"),
        ("~nobody_of_that_name", "there is no home folder"),
    ):
        assert words in refused("inspect", source)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "-pack_qkv"), "as in 'default, -pack-qkv', or without - to add it"),
        (("-pack_qkv",), "-pack_qkv means -p ack_qkv: for the pass pack-qkv write -p pack-qkv"),
        (("-p", "pack_qkv"), "did you mean pack-qkv?"),
    ],
)
def test_pipeline_typed_like_an_option_is_explained(args: tuple[str, ...], words: str, tiny: Path) -> None:
    assert words in refused("opt", tiny, *args)


def test_long_messages_are_truncated(tmp_path: Path) -> None:
    found = refused("inspect", "x" * 9000)
    assert len(found) < 1500 and found.endswith("more characters)")


def test_closed_standard_streams_are_tolerated(tiny: Path, tmp_path: Path) -> None:
    weft = f"{sys.executable} -m weft"
    script = f"{weft} opt {tiny} -o {tmp_path / 'out'} <&- >&- 2>&- || exit 1; {weft} opt nothing 2>&-"
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 2
    assert (tmp_path / "out" / "model.weft").is_file()


def test_missing_home_folder_is_tolerated(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(user: int) -> Never:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    done("inspect", tiny)
    assert "there is no home folder" in refused("inspect", "~/x")
    assert "is neither a preset" in refused("inspect", "someone/model")


def test_chat_with_an_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(ARCHITECTURES["bert"])
    done("compile", tmp_path / "x.py", "-o", tmp_path / "out")
    assert "--chat asks for an answer to a message, and " in refused("run", tmp_path / "out", "--prompt", "x", "--chat")


def test_integers_beyond_gguf_are_refused(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**40}))
    found = refused("export", exported, "--format", "gguf", "-o", tmp_path / "x.gguf")
    assert "context_length is 1099511627776, which does not fit the 32-bit values of a GGUF file" in found


def test_recipes_of_different_ranks_are_refused() -> None:
    with pytest.raises(WeftError, match="cannot concatenate"):
        Concat((Full(1.0, (2, 3)), Full(1.0, (2,))), 1).shape(EMPTY)
