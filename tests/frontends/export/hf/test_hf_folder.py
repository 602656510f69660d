"""Graphs written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.dsl import Block, Decoder, Mamba, RMSNorm
from weft.frontends.export.hf.hf_folder import write_huggingface
from weft.frontends.model import Model
from weft.ir import WeftError

from ...conftest import Save
from ..codes import export_with_notes, quantize
from ..folders import CONFIG, SHAPES, write_llama


def test_codes_that_transformers_cannot_load_are_dequantized(save: Save, tmp_path: Path) -> None:
    """Its layers multiply by their `weight`, which transformers takes away from layers with codes."""
    _, folder = save("falcon", new_decoder_architecture=True, num_kv_heads=2)
    model = quantize(folder, group=16)
    (note,) = export_with_notes(model, tmp_path / "out")
    assert note == "all weights are written as floats: transformers cannot load codes of falcon models"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        export_with_notes(model, tmp_path / "codes", weights="codes")[0]
        == "weights that keep their codes: 12 as uint4_16"
    )


def test_decoder_of_the_dsl_becomes_a_folder_of_its_family(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    model = rewrite(load_source(tmp_path / "model"), "sliding-window{size=4}")
    fit = write_huggingface(model, tmp_path / "out", dtype="f16")
    assert fit.family == "mistral"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["sliding_window"], config["dtype"]) == (
        ["MistralForCausalLM"],
        4,
        "float16",
    )
    assert config["eos_token_id"] == 2
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float16)} and tensors.keys() == SHAPES.keys()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_source_config_and_tensors_are_kept(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"top_k": 3}')
    write_huggingface(rewrite(load_source(tmp_path / "model"), "pack-qkv"), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for key, values in tensors.items():
        np.testing.assert_array_equal(written[key], values)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**CONFIG, "dtype": "float32"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"top_k": 3}


def test_graph_without_a_family_is_refused_with_the_alternative(tmp_path: Path) -> None:
    model = Model(Decoder(17, 16, 1, Block(Mamba(32), norm=RMSNorm())).graph(), "mamba", "a model")
    with pytest.raises(
        WeftError, match=r"no softmax attention, which a config needs; `weft compile --target transformers` writes"
    ):
        write_huggingface(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
