"""Models written back as the Hugging Face folders that they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.export.hf.checkpoint import copy_generation, write_folder
from weft.ir import WeftError

from ..folders import CONFIG, LAYER, write_llama
from ..graphs import decoder


def test_fused_graph_is_written_with_the_original_tensors(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    model = rewrite(load_source(tmp_path / "model"), "pack-qkv, pack-gate-up")
    write_folder(model, tmp_path / "back")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for key, values in tensors.items():
        np.testing.assert_array_equal(written[key], values)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


def test_new_values_of_a_parameter_go_to_the_tensors_it_reads(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    model = rewrite(load_source(tmp_path / "model"), "pack-qkv")
    values = np.zeros(model.graph.params["layers.0.attn.qkv.weight"].shape, np.float32)
    write_folder(model, tmp_path / "back", params={"layers.0.attn.qkv.weight": values}, dtype="f16")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert not any(written[f"{LAYER}self_attn.{name}_proj.weight"].any() for name in "qkv")
    head = written["lm_head.weight"]
    np.testing.assert_array_equal(head, tensors["lm_head.weight"].astype(np.float16))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {**CONFIG, "dtype": "float16"}


def test_weights_are_split_into_shards(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    write_folder(load_source(tmp_path / "model"), tmp_path / "back", shard_bytes=1000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    shards = {name: load_file(tmp_path / "back" / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 1 and index["weight_map"].keys() == tensors.keys()
    assert all(sum(array.nbytes for array in shard.values()) <= 1000 for shard in shards.values())


def test_model_that_is_not_fully_described_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    model = load_source(tmp_path / "model")
    with pytest.raises(WeftError, match="tensor 'extra' cannot be written: the model does not read it"):
        write_folder(replace(model, unread=["extra"]), tmp_path / "back")
    with pytest.raises(WeftError, match="is not from a Hugging Face folder"):
        write_folder(replace(model, graph=decoder()), tmp_path / "back")
    model.graph.meta["source"] = {**model.graph.meta["source"], "adapters": ["a"]}
    with pytest.raises(WeftError, match="has merged adapters, whose weights only `weft export` writes"):
        write_folder(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_generation_config_is_copied_if_it_exists(tmp_path: Path) -> None:
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    assert not copy_generation(tmp_path / "source", tmp_path / "out")
    (tmp_path / "source" / "generation_config.json").write_text('{"top_k": 3}')
    assert copy_generation(tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_k": 3}'
