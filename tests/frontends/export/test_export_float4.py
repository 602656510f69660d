"""Floats of 4 bits in exports, decoded here by the published layouts of compressed-tensors and GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file

import weft
from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite
from weft.ir.recipes.blocks import BlockRecipe

from ..conftest import Save
from .test_export_codes import GQA, IDS, exported, meaning

HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array([*HALF, *(-v for v in HALF)])
MIXTURE = {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}


def decoded(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """The numbers of a module of compressed-tensors, float64; the first of two codes is in the low half of a byte."""
    packed, scales = tensors[f"{name}.weight_packed"].numpy(), tensors[f"{name}.weight_scale"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    if scales.dtype == torch.uint8:
        numbers = 2.0 ** (scales.double().numpy() - 127)
    else:
        assert scales.dtype == torch.float8_e4m3fn
        (divisor,) = tensors[f"{name}.weight_global_scale"].tolist()
        numbers = scales.double().numpy() / divisor
    found: np.ndarray = E2M1[codes] * numbers.repeat(codes.shape[1] // numbers.shape[1], 1)
    return found


def how(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("form", "group"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("packed", ["", ", pack-qkv, pack-gate-up"])
def test_a_folder_of_compressed_tensors(form: str, group: int, packed: str, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    plain = rewrite(load_source(folder), f"quantize{{format={form}}}")
    model = rewrite(load_source(folder), f"quantize{{format={form}}}{packed}")
    notes = exported(model, tmp_path / "out", dtype="bf16")
    told = "model.embed_tokens.weight, lm_head.weight: dequantized values are written instead of codes, in bf16"
    assert notes == [f"weights that keep their codes: 21 as {form}", told]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for ours, theirs in (("attn.q", "self_attn.q_proj"), ("attn.v", "self_attn.v_proj"), ("ffn.down", "mlp.down_proj")):
        param = plain.graph.params[f"layers.1.{ours}.weight"]
        want = param.recipe.evaluate(plain.graph.reader)
        # The divisor, products with it, and those with a code are rounded to f32.
        np.testing.assert_allclose(decoded(tensors, f"model.layers.1.{theirs}"), want, rtol=4 * 2.0**-24, atol=0)
    config = how(tmp_path / "out")
    (scheme,) = config["config_groups"].values()
    kind, strategy = ("torch.uint8", "group") if form == "mxfp4" else ("torch.float8_e4m3fn", "tensor_group")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    assert scheme["weights"].items() >= (weights | {"dynamic": False, "scale_dtype": kind}).items()
    assert config["format"] == scheme["format"] == f"{form}-pack-quantized" and scheme["targets"] == ["Linear"]
    if form == "nvfp4":  # what runtimes multiply at once has one scale
        divisors = {p: tensors[f"model.layers.0.self_attn.{p}_proj.weight_global_scale"].item() for p in "qkvo"}
        assert divisors["q"] == divisors["k"] == divisors["v"] != divisors["o"]


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_read_again_it_is_the_same_model(form: str, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = rewrite(load_source(folder), f"quantize{{format={form}}}")
    exported(model, tmp_path / "out")
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    want = meaning(model.graph)
    np.testing.assert_allclose(meaning(again.graph), want, rtol=0, atol=1e-5 * np.abs(want).max())
    notes = exported(again, tmp_path / "twice", weights="codes")
    assert notes[0] == f"weights that keep their codes: 21 as {form}"
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "twice"))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        if key.endswith(("_packed", "_scale")) and "global" not in key:
            assert torch.equal(tensor.view(torch.uint8), second[key].view(torch.uint8)), key
        else:
            torch.testing.assert_close(tensor, second[key], rtol=2.0**-22, atol=0)
    how_mixed = 'quantize{format=nvfp4, keep="down"}, quantize{format=mxfp4}'
    exported(rewrite(load_source(folder), how_mixed), tmp_path / "mixed")
    formats = {group["format"] for group in how(tmp_path / "mixed")["config_groups"].values()}
    assert formats == {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}


def test_experts(save: Save, tmp_path: Path) -> None:
    """Those of nvfp4 are floats by default: transformers multiplies by their scales without that of the matrix."""
    _, folder = save("mixtral", **MIXTURE)
    count = 3 * (4 + 4 * 3)
    model = rewrite(load_source(folder), "quantize{format=mxfp4}")
    assert exported(model, tmp_path / "mx")[0] == f"weights that keep their codes: {count} as mxfp4"
    np.testing.assert_array_equal(meaning(load_source(tmp_path / "mx").graph), meaning(model.graph))
    model = rewrite(load_source(folder), "quantize{format=nvfp4}")
    (note,) = exported(model, tmp_path / "nv")
    assert note.startswith("all weights are written as floats: transformers leaves out the scales of experts' matrices")
    assert "quantization_config" not in json.loads((tmp_path / "nv" / "config.json").read_text())
    np.testing.assert_array_equal(meaning(load_source(tmp_path / "nv").graph), meaning(model.graph))
    notes = exported(model, tmp_path / "codes", weights="codes")
    assert notes[0] == f"weights that keep their codes: {count} as nvfp4"
    again, want = meaning(load_source(tmp_path / "codes").graph), meaning(model.graph)
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_one_tensor_of_several_matrices(save: Save, tmp_path: Path) -> None:
    """Query, key and value of Phi-3, which are one tensor, have one scale; rows that others put together may not."""
    _, folder = save("phi3", num_key_value_heads=2, pad_token_id=0)
    model = rewrite(load_source(folder), "quantize{format=nvfp4}")
    assert exported(model, tmp_path / "out")[0] == "weights that keep their codes: 12 as nvfp4"
    again, want = meaning(load_source(tmp_path / "out").graph), meaning(model.graph)
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5 * np.abs(want).max())
    apart = rewrite(load_source(folder), 'quantize{format=nvfp4, keep="q"}, quantize{format=nvfp4}')
    (note,) = exported(apart, tmp_path / "apart")
    assert "its rows have several tensor scales, but nvfp4 stores one" in note


@pytest.mark.parametrize(("form", "width", "group"), [("mxfp4", 80, 32), ("nvfp4", 72, 16)])
def test_rows_that_are_no_whole_groups(form: str, width: int, group: int, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2, intermediate_size=width)
    model = rewrite(load_source(folder), f"quantize{{format={form}}}")
    (note,) = exported(model, tmp_path / "auto")
    assert f"rows of {width} values are not whole groups of {group}, as in {form}" in note
    np.testing.assert_array_equal(meaning(load_source(tmp_path / "auto").graph), meaning(model.graph))


def test_a_file_of_gguf(save: Save, tmp_path: Path) -> None:
    """The format has blocks for mxfp4, and other blocks than these for nvfp4."""
    _, folder = save("llama", **GQA)
    model = rewrite(load_source(folder), "quantize{format=mxfp4}")
    assert exported(model, tmp_path / "mx.gguf") == ["weights that keep their codes: 2 as int8_32, 21 as mxfp4"]
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "mx.gguf").tensors}
    for i in range(3):
        tensor, param = found[f"blk.{i}.ffn_down.weight"], model.graph.params[f"layers.{i}.ffn.down.weight"]
        assert tensor.tensor_type.name == "MXFP4" and isinstance(param.recipe, BlockRecipe)
        want = param.recipe.evaluate(model.graph.reader)
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), want)
    again = load_source(tmp_path / "mx.gguf")
    want = meaning(model.graph)
    np.testing.assert_allclose(meaning(again.graph), want, rtol=0, atol=1e-6 * np.abs(want).max())
    weft.compile(tmp_path / "mx.gguf", tmp_path / "kept", target="torch", keep_blocks="all", max_length=24)
    assert json.loads((tmp_path / "kept" / "weft.json").read_text())["blocks"] == {
        "mxfp4": 21,
        "q8_0": 1,
    }  # but the table
    found_logits = weft.load(tmp_path / "kept", trust=True).logits(IDS[0].tolist())
    np.testing.assert_allclose(found_logits[-1], want[0, -1], rtol=0, atol=5e-5 * np.abs(want).max())
    model = rewrite(load_source(folder), "quantize{format=nvfp4}")
    (note,) = exported(model, tmp_path / "nv.gguf")
    assert "GGUF has no blocks for codes of nvfp4" in note
