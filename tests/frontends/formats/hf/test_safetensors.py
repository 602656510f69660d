"""Checkpoints whose names or files are unusual are read as transformers reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import weft
from weft.frontends import load_source
from weft.frontends.formats.hf import SafetensorsReader

from ...command import done, refused

INDEX = "model.safetensors.index.json"


def contents(folder: Path) -> dict[str, np.ndarray]:
    reader = SafetensorsReader(folder)
    return {key: reader.read(key, 0, reader.shape(key)[0]) for key in list(reader.keys())}


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
    return got.keys() == want.keys() and all(np.array_equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda key: f"_orig_mod.{key}", "'_orig_mod.'"),
        (lambda key: f"module.{key}", "'module.'"),
        (lambda key: f"module._orig_mod.{key}", "'_orig_mod.' and 'module.'"),
        (lambda key: key.replace("layers.1.", "layers.1._orig_mod."), "'_orig_mod.'"),
    ],
)
def test_wrapper_prefixes_are_removed_and_reported(
    change: Callable[[str], str], told: str, save: Any, tmp_path: Path
) -> None:
    folder = Path(save("llama")[1])
    want = load_file(folder / "model.safetensors")
    save_file({change(key): value for key, value in want.items()}, folder / "model.safetensors")
    assert same(contents(folder), want)
    for result in (done("compile", folder, "-o", tmp_path / "out"), done("export", folder, "-o", tmp_path / "hf")):
        assert f"tensor names are read without the prefix {told} of module wrappers" in result.stderr
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), want)


def test_prefix_of_only_some_tensors_is_kept(save: Any) -> None:
    folder = Path(save("llama")[1])
    want = load_file(folder / "model.safetensors")
    save_file({**want, "module.extra": np.ones(3, np.float32)}, folder / "model.safetensors")
    assert contents(folder).keys() == {*want, "module.extra"} and load_source(folder).unread == ["module.extra"]
    twice = {**want, "model._orig_mod.norm.weight": want["model.norm.weight"]}
    save_file(twice, folder / "model.safetensors")
    assert "a tensor exists twice, with and without '_orig_mod.' in its name" in refused("inspect", folder)


def test_index_may_omit_tensors(save: Any) -> None:
    folder = Path(save("llama", shard="20KB")[1])
    want, index = contents(folder), json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert np.array_equal(theirs["model.norm.weight"].numpy(), want["model.norm.weight"])
    assert same(contents(folder), want)


def test_shards_in_a_subfolder_are_read(save: Any, tmp_path: Path) -> None:
    folder = Path(save("llama", shard="20KB")[1])
    want, index = contents(folder), json.loads((folder / INDEX).read_text())
    (folder / "shards").mkdir()
    for file in folder.glob("*.safetensors"):
        file.rename(folder / "shards" / file.name)
    index["weight_map"] = {key: f"shards/{name}" for key, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert np.array_equal(theirs["model.norm.weight"].numpy(), want["model.norm.weight"])
    assert same(contents(folder), want)
    assert {file.parent.name for file in load_source(folder).files if file.suffix == ".safetensors"} == {"shards"}
    index["weight_map"] = {key: f"../{name}" for key, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    assert "is empty or names other folders" in refused("inspect", folder)


def linked(folder: Path, hub: Path, name: str) -> Path:
    """A snapshot of the hub's cache whose files are links to blobs, as `hf download` makes it."""
    repository = hub / f"models--me--{name}"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for file in (path for path in folder.rglob("*") if path.is_file()):
        link = repository / "snapshots" / "abc" / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / file.relative_to(folder).as_posix().replace("/", "-")
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return repository / "snapshots" / "abc"


def test_snapshots_of_links_are_read(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hub = Path(save("llama")[1]), tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    weft.compile(folder, tmp_path / "out")
    source, compiled = linked(folder, hub, "source"), linked(tmp_path / "out", hub, "compiled")
    for name in (source, "me/source"):
        done("inspect", name)
    wanted = weft.load(tmp_path / "out").generate([1, 5, 7], max_tokens=4)[0].tokens
    assert weft.load(compiled).generate([1, 5, 7], max_tokens=4)[0].tokens == wanted
    for name in (compiled, "me/compiled"):
        done("run", name, "--ids", "1,5,7", "--max-tokens", "2", "--check")
    blob = compiled / "weft.json"
    blob.resolve().write_text(blob.read_text().replace("decoder", "encoder"))
    assert "was modified after compilation" in refused("run", compiled, "--ids", "1", "--check")


def test_models_in_a_folder_of_a_snapshot(save: Any, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    shutil.copytree(Path(save("llama")[1]), tmp_path / "repository" / "inner")
    (tmp_path / "repository" / "inner" / "tokenizer_config.json").write_text("{}")
    assert load_source(linked(tmp_path / "repository", tmp_path / "hub", "nested") / "inner").graph.params
