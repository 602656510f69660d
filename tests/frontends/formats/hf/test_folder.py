"""Safetensors reading and everything that can be wrong with a Hugging Face folder."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from weft.frontends import load_source
from weft.frontends.formats.hf import SafetensorsReader
from weft.frontends.formats.weft.model_folder import write_model
from weft.ir import WeftError
from weft.ir.types import dtypes

QWEN2 = {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 8}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(save: Any) -> Path:
    """A tiny llama in one file."""
    return Path(save("llama")[1])


@pytest.fixture
def sharded(save: Any) -> Path:
    """A tiny llama in several files with an index."""
    return Path(save("llama", shard="20KB")[1])


def fails(folder: Path, message: str) -> None:
    with pytest.raises(WeftError, match=message) as caught:
        load_source(folder)
    assert "\n" not in str(caught.value)


# -- reading


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "U8", "BOOL"])
def test_rows_of_every_dtype(dtype: str, tmp_path: Path, rng: np.random.Generator) -> None:
    numpy = {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "I64": np.int64,
        "I32": np.int32,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }[dtype]
    x = (rng.standard_normal((7, 3, 5)) * 9).astype(np.int64 if dtype[0] in "IUB" and dtype != "BF16" else np.float64)
    stored = np.abs(x).astype(numpy)
    scalar = np.array(stored[0, 0, 0])
    save_file({"odd": np.ones(3, np.uint8), "x": stored, "scalar": scalar}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert (reader.shape("x"), reader.dtype("x")) == ((7, 3, 5), dtypes.from_numpy(stored))
    wanted = stored.astype(np.float32) if dtypes.from_numpy(stored).is_float else stored
    for start, stop in ((0, 7), (2, 5), (6, 7), (3, 3)):
        rows = reader.read("x", start, stop)
        assert rows.dtype == wanted.dtype
        np.testing.assert_array_equal(rows, wanted[start:stop])
    assert reader.read("scalar", 0, 1).reshape(()) == scalar.astype(wanted.dtype)
    with pytest.raises(WeftError, match="has no tensor 'y'"):
        reader.shape("y")


def test_bf16_keeps_every_pattern(tmp_path: Path) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    save_file({"x": every}, tmp_path / "model.safetensors")
    rows = SafetensorsReader(tmp_path).read("x", 0, 1 << 16)
    np.testing.assert_array_equal(rows.view(np.uint32) >> 16, every.view(np.uint16))


def test_shards_without_an_index(sharded: Path) -> None:
    with_index = SafetensorsReader(sharded)
    (sharded / INDEX).unlink()
    without = SafetensorsReader(sharded)
    assert set(without.keys()) == set(with_index.keys())


def test_a_file_that_shrinks_is_noticed(folder: Path) -> None:
    reader = load_source(folder).graph.reader
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(WeftError, match="was shortened while"):
        [reader.read(key, 0, reader.shape(key)[0]) for key in list(reader.keys())]


# -- folders


def test_missing_folder_and_config(folder: Path, tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "neither a preset nor an existing file or folder")
    (folder / "config.json").unlink()
    fails(folder, "has no config.json, so it is not a Hugging Face model folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not valid JSON"),
        ("[1]", "config.json: a JSON object was expected, not array"),
        ('{"model_type": "yolo"}', "model_type 'yolo' is not known, and fits none of the "),
        ("{}", "model_type None is not known"),
        ('{"model_type": "llama"}', "config.json: key 'vocab_size' is missing .for vocab of llama models"),
    ],
)
def test_unsound_configs(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    fails(folder, message)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "llama",
            {"num_key_value_heads": 3},
            "config.json: num_attention_heads=4: num_key_value_heads=3: Attention: kv_heads=3 does not divide heads=4",
        ),
        (
            "llama",
            {"hidden_act": "mystery"},
            "config.json: hidden_act='mystery': activation 'mystery' is unknown; known are gelu",
        ),
        ("llama", {"hidden_size": "big"}, "config.json: hidden_size='big': the value 'big' must be of type int"),
        ("llama", {"num_hidden_layers": 0}, "config.json: num_hidden_layers=0: layers=0 must be positive"),
        ("llama", {"rope_parameters": {"rope_type": "odd"}}, "rope_type='odd' is unknown; known are default, linear"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs the config key 'factor'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "needs the config key 'low_freq"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "differ by layer type are not supported"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"cannot read weights quantized by gptq"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id is '</s>', but it must hold token ids"),
        ("qwen2", {**QWEN2, "layer_types": ["full_attention"]}, "window has 1 values, but needs one for"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported for gpt2 models"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supp"),
    ],
)
def test_configs_that_cannot_be_built(model_type: str, changes: dict[str, Any], message: str, save: Any) -> None:
    _, folder = save(model_type, "AutoModel" if model_type == "bert" else "AutoModelForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "generation_config.json").unlink(missing_ok=True)
    fails(folder, message)


def test_pickled_weights_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "has no safetensors weights, only pickled PyTorch weights: load the model and save_pretrained it")
    (folder / "pytorch_model.bin").unlink()
    fails(folder, "has no safetensors weights$")


def test_missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    fails(folder, r"has no tensor 'model.layers.1.mlp.up_proj.weight', which parameter layers.1.ffn.up.weight reads")


def test_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((48, 31), np.float32)
    save_file(tensors, folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    fails(folder, rf"{name} \[48, 31\] does not fit layers.1.ffn.up.weight \[48, 32\] of the config")


def test_wrong_shape_behind_a_recipe(save: Any) -> None:
    _, folder = save("gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.c_attn.weight"] = np.ones((32, 90), np.float32)
    save_file(tensors, folder / "model.safetensors")
    fails(
        folder, r"h.0.attn.c_attn.weight \[32, 90\] does not fit layers.0.attn.v.weight \[32, 32\]: cannot take 64:96"
    )


def test_shard_missing_on_disk(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    fails(sharded, f"lacks the shard {shard.name} that {INDEX} names")
    (sharded / INDEX).unlink()
    fails(sharded, f"lacks the shard {shard.name}; fetch it too$")


def test_shard_missing_from_the_index(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    lost = sorted(sharded.glob("*.safetensors"))[1].name
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != lost}
    (sharded / INDEX).write_text(json.dumps(index))
    fails(sharded, f"{INDEX} does not name the shard {sharded / lost}")


def test_index_that_lies(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["ghost"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX).write_text(json.dumps(index))
    fails(sharded, "places tensor 'ghost' in model-.*, which lacks it")
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}'):
        (sharded / INDEX).write_text(text)
        fails(sharded, "is not a safetensors index")


def header(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


SOUND = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header length"),
        (b"\x00" * 64, "no header length"),
        (b"not a checkpoint at all" * 9, "no header length"),
        (struct.pack("<Q", 5000) + b"{}", "truncated or not safetensors: header of 5000 bytes, file of 10"),
        (header(b"{]"), "header of .*: not valid JSON"),
        (header([1, 2]), "header of .*: a JSON object was expected, not array"),
        (header(b"\xff\xfe{}"), "header of .*: not valid JSON: byte 0 is not UTF-8"),
        (header({"x": 5}), "entry of tensor 'x' is damaged"),
        (header({"x": {"dtype": "F32"}}), "entry of tensor 'x' is damaged"),
        (header({"x": {**SOUND, "shape": [-2]}}, b"\0" * 8), "entry of tensor 'x' is damaged"),
        (header({"x": {**SOUND, "dtype": "Q9"}}, b"\0" * 8), "tensor 'x' has dtype Q9, which is not supported"),
        (header({"x": {**SOUND, "shape": [3]}}, b"\0" * 8), r"tensor 'x' of F32 \[3\] has 8 bytes instead of 12"),
        (header({"x": SOUND}, b"\0" * 7), "is truncated: its tensors end at byte"),
        (header({"x": SOUND}, b"\0" * 9), "is damaged: tensors end at byte"),
        (header({"x": SOUND, "y": SOUND}, b"\0" * 8), "tensor 'y' at byte .* overlaps tensor 'x'"),
        (header({"x": {**SOUND, "data_offsets": [4, 12]}}, b"\0" * 12), "leaves 4 unused bytes after the header"),
        (header(b'{"x": %s, "x": %s}' % ((json.dumps(SOUND).encode(),) * 2), b"\0" * 8), "the key 'x' is given twice"),
        (header(b"[" * 100_000), "nested more than 100 deep"),
    ],
)
def test_garbage_and_cut_files(content: bytes, message: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    fails(folder, message)


def test_a_truncated_checkpoint(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for length in (4, 300, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        fails(folder, "truncated|no header length")


def test_a_local_hub_snapshot_is_found_by_its_id(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny-llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / "abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    found = load_source("someone/tiny-llama")
    assert found.graph.meta["model_type"] == "llama"
    assert found.spec == "someone/tiny-llama"
    with pytest.raises(WeftError, match="'someone/else' is neither a preset nor an existing file or folder"):
        load_source("someone/else")


def test_integer_weights_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"], np.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fails(folder, "'model.norm.weight' has dtype i32, but weights must be floats")


def write_model_folder(source: Path, out: Path, progress: Any) -> None:
    write_model(load_source(source), out, progress=progress)


@pytest.mark.parametrize(
    "write",
    [
        lambda source, out, progress: weft.compile(source, out, progress=progress),
        write_model_folder,
        lambda source, out, progress: weft.export(source, out, progress=progress),
        lambda source, out, progress: weft.export(source, out, format="gguf", progress=progress),
        lambda source, out, progress: weft.export(source, out, format="safetensors", progress=progress),
    ],
    ids=["compile", "opt", "hf", "gguf", "safetensors"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_source_that_changes_while_it_is_read(write: Any, name: str, folder: Path, tmp_path: Path) -> None:
    """Another process writes into the checkpoint: the same bytes here, so that only the time tells."""

    def touch(stage: str, done: int, total: int) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, done))

    with pytest.raises(WeftError, match=f"{name} has changed while it was read"):
        write(folder, tmp_path / "result", touch)
    assert {p.name for p in tmp_path.iterdir()} == {folder.name}


def test_links_that_lead_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    """A tokenizer file is copied into the result, so it must not be any file of this machine."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for name in ("tokenizer_config.json", "vocab.txt", "chat_template.jinja"):
        (folder / name).symlink_to(secret)
        fails(folder, f"{name} is a link to {secret}, outside the model's folder")
        (folder / name).unlink()
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in (("Transformer", ""), ("Pooling", "../x"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    fails(folder, "outside the model's folder")
    (folder / "modules.json").unlink()
    (folder / "own").write_text("{}")
    (folder / "tokenizer_config.json").symlink_to(folder / "own")
    assert folder / "tokenizer_config.json" in load_source(folder).files


@pytest.mark.parametrize("architectures", [3, True, {"a": 1}, "x", [3, None]])
def test_architectures_of_another_type_choose_nothing(architectures: Any, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": architectures}))
    assert "logits" in load_source(str(folder)).graph.outputs
