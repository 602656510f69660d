"""Rewritten models as folders of their own: what they hold, who reads them, how they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from weft.backends import safetensors as writing
from weft.frontends import load_source
from weft.frontends.app.api.rewrite import resolve_pipeline, rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.frontends.model import Model
from weft.ir import Graph, MemoryReader, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Scale, Source
from weft.ir.recipes.readers import SpilledTensors
from weft.ir.types import dtypes, sizes
from weft.passes import parse_pipeline

from ...command import done, refused
from ...conftest import Save

IDS = np.arange(12).reshape(2, 6) % 11
FEEDS = {"input_ids": IDS, "position_ids": np.tile(np.arange(6), (2, 1))}


def logits(source: Any) -> np.ndarray:
    return interpret(load_source(source).graph, FEEDS)["logits"]


@pytest.fixture
def llama(save: Save) -> Path:
    """A tiny bf16 folder with a tokenizer."""
    _, folder = save("llama", num_key_value_heads=2)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_is_complete_in_itself(llama: Path, tmp_path: Path) -> None:
    expected = logits(llama)
    done("opt", llama, "-p", "pack-qkv, fuse-residual-norm", "-o", tmp_path / "new")
    shutil.rmtree(llama)
    moved = (tmp_path / "new").rename(tmp_path / "moved")
    assert sorted(p.name for p in moved.iterdir()) == [
        "model.safetensors",
        "model.weft",
        "provenance.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = load_source(moved)
    assert np.array_equal(logits(moved), expected)
    assert (model.unread, model.random_init, model.graph.meta["eos_token_ids"]) == ([], False, [2])
    stored = load_file(moved / "model.safetensors")
    assert {p.name for p in model.graph.params.values() if p.recipe == Source(p.name)} == set(stored)
    assert "layers.0.attn.qkv.weight" in stored
    assert "rope_frequencies" in (moved / "model.weft").read_text()  # still a formula
    assert str(tmp_path) not in (moved / "model.weft").read_text()


def test_weights_are_stored_without_rounding(llama: Path, tmp_path: Path) -> None:
    bf16, f32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    done("opt", llama, "-p", "pack-gate-up", "-o", tmp_path / "moved")
    assert {t.dtype for t in load_file(tmp_path / "moved/model.safetensors").values()} == {bf16}
    graph = load_source(llama).graph
    head = graph.params["lm_head.weight"]
    head.recipe = Scale(head.recipe, 1 / 3)
    write_model(load_source(graph), tmp_path / "scaled")
    found = {k: t.dtype for k, t in load_file(tmp_path / "scaled/model.safetensors").items()}
    assert found.pop("lm_head.weight") == f32 and set(found.values()) == {bf16}
    assert np.array_equal(logits(tmp_path / "scaled"), logits(graph))
    write_model(load_source(graph), tmp_path / "half", dtype="bf16")
    assert {t.dtype for t in load_file(tmp_path / "half/model.safetensors").values()} == {bf16}
    error = np.abs(logits(tmp_path / "half") - logits(graph)).max() / np.abs(logits(graph)).max()
    assert 0 < error < 2**-8


def test_shards(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing.write_shards, "__defaults__", (30_000, lambda done: None))
    done("opt", llama, "-o", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert np.array_equal(logits(tmp_path / "out"), logits(llama))


def test_every_command_takes_a_folder(llama: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    done("opt", llama, "-p", "pack-qkv", "-o", f"{new}/")
    (new / "tokenizer.json").unlink()  # it was no tokenizer
    assert "model folder new" in done("inspect", new).stdout
    text = done("opt", new).stdout
    assert done("opt", "-", input=text).stdout == text
    (tmp_path / "again.weft").write_text(text)  # refers to the folder's weights
    assert np.array_equal(logits(tmp_path / "again.weft"), logits(llama))
    done("opt", new, "-p", "unpack", "-o", tmp_path / "third")
    assert np.array_equal(logits(tmp_path / "third"), logits(llama))
    done("compile", tmp_path / "third", "-o", tmp_path / "out", "--max-length", "32")
    done("verify", tmp_path / "out", "--tokens", "2")
    manifest = json.loads((tmp_path / "out/weft.json").read_text())["source"]
    assert {"model.weft", "model.safetensors"} <= manifest["hashes"].keys()
    before = manifest["provenance"]
    assert (before["pipeline"], before["source"]["provenance"]["pipeline"]) == ("unpack", "pack-qkv")
    assert before["source"]["provenance"]["source"]["spec"] == str(llama)
    (llama / "tokenizer.json").unlink()
    ran = done("run", new, "--ids", "1,2,3", "--max-tokens", "4").stdout
    assert ran == done("run", llama, "--ids", "1,2,3", "--max-tokens", "4").stdout


def test_random_weights_become_numbers(tmp_path: Path) -> None:
    block = weft.Block(weft.Attention(2, rope=weft.RoPE()), weft.GatedMLP(8))
    model = weft.Decoder(vocab=11, dim=8, layers=2, block=block)
    write_model(load_source(model, seed=3), tmp_path / "out")
    again = load_source(tmp_path / "out")
    assert not again.random_init
    assert np.array_equal(logits(again), logits(load_source(model, seed=3)))


def computed(tmp_path: Path) -> Model:
    """A model one of whose parameters a pass has computed."""
    first = SpilledTensors(MemoryReader({}))
    first.put("svd", np.eye(3))
    graph = Graph("small", SpilledTensors(first))  # another pass came after it
    x = graph.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), 3)))
    weight = graph.add_param("w", TensorType(dtypes.f32, (3, 3)), Source("svd"))
    graph.add_output("y", ops.linear(x, weight))
    return load_source(graph)


def test_text_cannot_hold_computed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    made = computed(tmp_path)
    monkeypatch.setattr("weft.frontends.load_source", lambda source, **options: made)
    for out in ("-", tmp_path / "a.weft"):
        assert "a pass computed w, which IR text cannot store; use a folder" in refused("opt", llama, "-o", out)
    done("opt", llama, "-o", tmp_path / "out")
    monkeypatch.undo()
    again = load_source(tmp_path / "out").graph
    assert np.array_equal(again.params["w"].recipe.evaluate(again.reader), np.eye(3))


def test_bad_input_is_one_line(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    assert "a file with that name is in the way" in refused("opt", llama, "-o", tmp_path / "file")
    assert "holds files that weft did not write" in refused("opt", llama, "-o", tmp_path / "full")
    impossible = "mha-to-gqa{kv_heads=5}"  # is not tried for a folder that cannot be written
    assert "kv_heads=5 does not divide" in refused("opt", llama, "-p", impossible, "-o", tmp_path / "out")
    assert "in the way" in refused("opt", llama, "-p", impossible, "-o", tmp_path / "file")
    assert "cannot write to /proc/new" in refused("opt", llama, "-o", "/proc/new")
    assert "unknown dtype" in refused("opt", llama, "-o", tmp_path / "out", "--dtype", "f33")
    assert "cannot be written in i8" in refused("opt", llama, "-o", tmp_path / "out", "--dtype", "i8")
    assert "--dtype is the dtype of the weights in a folder" in refused("opt", llama, "--dtype", "f16")
    done("opt", llama, "-o", tmp_path / "out")
    text = (tmp_path / "out/model.weft").read_text()
    for name, broken, told in (
        ("model.weft", "graph", "model.weft"),
        ("model.weft", text.replace("norm.weight: f32[32]", "norm.weight: f32[31]"), "f32[batch, seq, 32]"),
        ("model.weft", text.replace("embed.weight: f32[", "embed.weight: f32[1"), "its recipe gives"),
        ("model.weft", text.replace('kind = "decoder"', "kind = 3"), "meta kind = 3 is not a kind of model: decoder"),
        ("model.weft", text.replace("context = ", "context = -"), "is not a positive integer"),
        ("model.weft", text.replace("eos_token_ids = [2]", "eos_token_ids = 3"), "eos_token_ids = 3 is not a list of"),
        ("model.weft", text.replace("bos_token_id = 1", 'bos_token_id = "x"'), 'bos_token_id = "x" is not a token'),
        ("model.weft", text.replace("vocab = ", "residual_scale = 0 meta vocab = "), "= 0 is not a positive number"),
        ("model.weft", text.replace("vocab = ", "source = [] meta vocab = "), "source = [] is not a source, which has"),
        ("model.weft", text.replace('("embed.weight")', '("gone")'), "has no tensor 'gone'"),
        ("model.safetensors", "x", "is not a safetensors file"),
    ):
        good = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_text(broken)
        assert told in refused("inspect", tmp_path / "out")
        (tmp_path / "out" / name).write_bytes(good)
    assert {p.name for p in tmp_path.iterdir()} == {"model", "file", "full", "out"}


def test_numbers_out_of_range_leave_the_older_folder(llama: Path, tmp_path: Path) -> None:
    done("opt", llama, "-o", tmp_path / "out")
    tensors = load_file(llama / "model.safetensors")
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 1e5)
    save_file(tensors, llama / "model.safetensors")
    line = refused("opt", llama, "-o", tmp_path / "out", "--dtype", "f16")
    assert "'lm_head.weight' holds 99840, beyond the range of f16" in line
    assert load_source(tmp_path / "out").graph.params


# -- pipelines in files


def test_a_published_pipeline_is_exact_but_for_its_last_pass(llama: Path) -> None:
    text = resolve_pipeline("@best-int4")
    *before, last = parse_pipeline(text).passes
    assert {step.effect for step in before} == {"exact"} and (last.name, last.effect) == ("quantize", "lossy")
    (llama / "tokenizer.json").unlink()  # without a text codes are the nearest
    assert rewrite(load_source(llama), "@best-int4").pipeline == str(parse_pipeline(text))


def test_missing_pipeline_files_are_one_line(llama: Path, tmp_path: Path) -> None:
    assert "cannot be read: no such file" in refused("opt", llama, "-p", "@nothing.txt")
    assert "cannot be read: no such file" in refused("compile", llama, "-p", "no.pipeline", "-o", tmp_path / "out")


def test_manifests_name_the_passes(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pipeline").write_text("pack-qkv\nkv-cache\n")
    (llama / "tokenizer.json").unlink()
    done("compile", llama, "-p", tmp_path / "a.pipeline", "-o", tmp_path / "out", "--max-length", "16")
    assert json.loads((tmp_path / "out/weft.json").read_text())["pipeline"] == "pack-qkv, kv-cache"
    done("opt", llama, "-p", f"@{tmp_path / 'a.pipeline'}", "-o", tmp_path / "new")
    record = json.loads((tmp_path / "new/provenance.json").read_text())
    assert (record["weft"], record["pipeline"]) == (weft.__version__, "pack-qkv, kv-cache")
    assert parse_pipeline(record["pipeline"]).passes
    twice = rewrite(rewrite(load_source(llama), "dce"), "cse")
    assert twice.pipeline == "dce; cse"


def test_a_pipeline_that_does_not_fit_is_named(llama: Path) -> None:
    with pytest.raises(WeftError, match="nothing"):
        rewrite(load_source(llama), "nothing")
