"""Codes in the formats of compressed-tensors, decoded here by the published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file

from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite

from ...conftest import Save
from ..codes import GQA, compute_logits, export_with_notes, quantize, read_blocks, unpack_module


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 32), (4, 16), (4, 32), (8, 32)])
def test_integer_codes_are_packed_by_the_published_layout(
    bits: int, group: int, zeros: bool, save: Save, tmp_path: Path
) -> None:
    _, folder = save("llama", **GQA)
    model = quantize(folder, bits, group, zeros)
    notes = export_with_notes(model, tmp_path / "out")
    layout = f"{'u' if zeros and bits < 8 else ''}int{bits}_{group}"
    assert notes == [
        f"weights that keep their codes: 21 as {layout}",
        "model.embed_tokens.weight, lm_head.weight: written dequantized, as transformers needs floats there, in f32",
    ]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for i, (ours, theirs) in enumerate([("attn.k", "self_attn.k_proj"), ("ffn.down", "mlp.down_proj")]):
        want = read_blocks(model.graph, f"layers.{i}.{ours}.weight")
        codes, scales, points = unpack_module(tensors, f"model.layers.{i}.{theirs}", bits)
        np.testing.assert_array_equal(codes, want.codes.reshape(codes.shape))
        np.testing.assert_array_equal(scales, want.scales)
        assert (points is None) == (want.zeros is None)
        if points is not None:
            np.testing.assert_array_equal(points, want.zeros)
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    np.testing.assert_array_equal(compute_logits(again.graph), compute_logits(model.graph))
    assert str(again.graph.reader.dtype("model.layers.0.mlp.up_proj.weight")) == f"{layout}_f32"


def test_float8_tiles_are_packed_by_the_published_layout(save: Save, tmp_path: Path) -> None:
    """Tiles may be cut at both ends."""
    _, folder = save("llama", **GQA | {"intermediate_size": 288})
    model = rewrite(load_source(folder), "quantize{format=fp8}")
    notes = export_with_notes(model, tmp_path / "out")
    assert notes[0] == "weights that keep their codes: 21 as f8e4m3_128"
    tensors = torch_file(tmp_path / "out" / "model.safetensors")
    for ours, theirs in (("attn.k", "self_attn.k_proj"), ("ffn.up", "mlp.up_proj"), ("ffn.down", "mlp.down_proj")):
        codes, scales = (tensors[f"model.layers.1.{theirs}.weight{part}"] for part in ("", "_scale"))
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        wide = scales.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
        param = model.graph.params[f"layers.1.{ours}.weight"]
        np.testing.assert_array_equal(codes.float() * wide, param.recipe.evaluate(model.graph.reader))
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert (group["weights"]["strategy"], group["weights"]["block_structure"]) == ("block", [128, 128])
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    np.testing.assert_array_equal(compute_logits(again.graph), compute_logits(model.graph))
    # A folder of a pass that rounded the rest to integers says of every layer which it has.
    mixed = rewrite(load_source(folder), 'quantize{format=fp8, keep="down"}, quantize{method=rtn, group=16}')
    export_with_notes(mixed, tmp_path / "mixed")
    read_quantization_config = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert read_quantization_config["format"] == "mixed-precision"
    assert {g["format"] for g in read_quantization_config["config_groups"].values()} == {
        "float-quantized",
        "pack-quantized",
    }
    np.testing.assert_array_equal(compute_logits(load_source(tmp_path / "mixed").graph), compute_logits(mixed.graph))


def test_quantization_config_describes_the_codes(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    export_with_notes(quantize(folder, zeros=True), tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    assert group["weights"].items() >= weights.items() and group["input_activations"] is None
    facts = config["quant_method"], config["format"], config["quantization_status"]
    assert facts == ("compressed-tensors", "pack-quantized", "compressed")
    told = "scales stay f16: a loader that rounds them to bf16 changes weights"
    assert told in export_with_notes(quantize(folder), tmp_path / "bf16", dtype="bf16")
    mixed = rewrite(quantize(folder, 8, before='quantize{method=rtn, keep="q"}, '), "")
    export_with_notes(mixed, tmp_path / "two")
    groups = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]["config_groups"]
    named = {g["weights"]["num_bits"]: g["targets"] for g in groups.values()}
    assert named[8] == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)] and len(named[4]) == 18
    np.testing.assert_array_equal(compute_logits(load_source(tmp_path / "two").graph), compute_logits(mixed.graph))


def test_codes_of_fused_weights_are_split_by_rows(save: Save, tmp_path: Path) -> None:
    """Rows of packed q, k and v go where they come from; the scales of a folder in f16 are as they were."""
    _, folder = save("llama", **GQA, tie_word_embeddings=True)
    model = quantize(folder, before="fold-norm-scale, pack-qkv, pack-gate-up, ")
    notes = export_with_notes(model, tmp_path / "out", dtype="f16")
    assert notes[0] == "weights that keep their codes: 21 as uint4_32" and notes[1].endswith(
        "as transformers needs floats there, in f16"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    want = read_blocks(model.graph, "layers.2.attn.qkv.weight")
    parts = [unpack_module(tensors, f"model.layers.2.self_attn.{p}_proj", 4) for p in "qkv"]
    for found, kept in zip(zip(*parts, strict=True), (want.codes, want.scales, want.zeros), strict=True):
        whole = np.concatenate(found)
        np.testing.assert_array_equal(whole, kept.reshape(whole.shape))
    assert tensors["model.layers.2.self_attn.q_proj.weight_scale"].dtype == np.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == [
        "model.embed_tokens",
        "lm_head",
    ]


@pytest.mark.parametrize(
    ("model_type", "config", "count"),
    [
        ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}, 3 * (4 + 4 * 3)),
        ("gpt_neox", {"tie_word_embeddings": True}, 3 * 4),
        ("phi3", {"num_key_value_heads": 2, "pad_token_id": 0}, 3 * 4),
    ],
)
def test_codes_of_stacked_and_interleaved_weights_are_kept(
    model_type: str, config: dict[str, Any], count: int, save: Save, tmp_path: Path
) -> None:
    """Experts of their own tensors, and rows of q, k and v in one tensor."""
    _, folder = save(model_type, **config)
    model = quantize(folder, group=16, zeros=False)
    assert export_with_notes(model, tmp_path / "out")[0] == f"weights that keep their codes: {count} as int4_16"
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    want = compute_logits(model.graph)
    np.testing.assert_allclose(compute_logits(again.graph), want, rtol=0, atol=1e-12 * np.abs(want).max())


HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


E2M1 = np.array([*HALF, *(-v for v in HALF)])


MIXTURE = {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}


def decode_float4(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
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


def read_quantization_config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("form", "group"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("packed", ["", ", pack-qkv, pack-gate-up"])
def test_float4_codes_are_packed_by_the_published_layout(
    form: str, group: int, packed: str, save: Save, tmp_path: Path
) -> None:
    _, folder = save("llama", **GQA)
    plain = rewrite(load_source(folder), f"quantize{{format={form}}}")
    model = rewrite(load_source(folder), f"quantize{{format={form}}}{packed}")
    notes = export_with_notes(model, tmp_path / "out", dtype="bf16")
    told = "model.embed_tokens.weight, lm_head.weight: written dequantized, as transformers needs floats there, in bf16"
    assert notes == [f"weights that keep their codes: 21 as {form}", told]
    tensors = torch_file(tmp_path / "out" / "model.safetensors")
    for ours, theirs in (("attn.q", "self_attn.q_proj"), ("attn.v", "self_attn.v_proj"), ("ffn.down", "mlp.down_proj")):
        param = plain.graph.params[f"layers.1.{ours}.weight"]
        want = param.recipe.evaluate(plain.graph.reader)
        # The divisor, products with it, and those with a code are rounded to f32.
        np.testing.assert_allclose(decode_float4(tensors, f"model.layers.1.{theirs}"), want, rtol=4 * 2.0**-24, atol=0)
    config = read_quantization_config(tmp_path / "out")
    (scheme,) = config["config_groups"].values()
    kind, strategy = ("torch.uint8", "group") if form == "mxfp4" else ("torch.float8_e4m3fn", "tensor_group")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    assert scheme["weights"].items() >= (weights | {"dynamic": False, "scale_dtype": kind}).items()
    assert config["format"] == scheme["format"] == f"{form}-pack-quantized" and scheme["targets"] == ["Linear"]
    if form == "nvfp4":  # what runtimes multiply at once has one scale
        divisors = {p: tensors[f"model.layers.0.self_attn.{p}_proj.weight_global_scale"].item() for p in "qkvo"}
        assert divisors["q"] == divisors["k"] == divisors["v"] != divisors["o"]


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_float4_export_reads_back_as_the_same_model(form: str, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = rewrite(load_source(folder), f"quantize{{format={form}}}")
    export_with_notes(model, tmp_path / "out")
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    want = compute_logits(model.graph)
    np.testing.assert_allclose(compute_logits(again.graph), want, rtol=0, atol=1e-5 * np.abs(want).max())
    notes = export_with_notes(again, tmp_path / "twice", weights="codes")
    assert notes[0] == f"weights that keep their codes: 21 as {form}"
    first, second = (torch_file(tmp_path / name / "model.safetensors") for name in ("out", "twice"))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        if key.endswith(("_packed", "_scale")) and "global" not in key:
            assert torch.equal(tensor.view(torch.uint8), second[key].view(torch.uint8)), key
        else:
            torch.testing.assert_close(tensor, second[key], rtol=2.0**-22, atol=0)
    how_mixed = 'quantize{format=nvfp4, keep="down"}, quantize{format=mxfp4}'
    export_with_notes(rewrite(load_source(folder), how_mixed), tmp_path / "mixed")
    formats = {group["format"] for group in read_quantization_config(tmp_path / "mixed")["config_groups"].values()}
    assert formats == {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}


def test_nvfp4_experts_are_floats_by_default(save: Save, tmp_path: Path) -> None:
    """Those of nvfp4 are floats by default: transformers multiplies by their scales without that of the matrix."""
    _, folder = save("mixtral", **MIXTURE)
    count = 3 * (4 + 4 * 3)
    model = rewrite(load_source(folder), "quantize{format=mxfp4}")
    assert export_with_notes(model, tmp_path / "mx")[0] == f"weights that keep their codes: {count} as mxfp4"
    np.testing.assert_array_equal(compute_logits(load_source(tmp_path / "mx").graph), compute_logits(model.graph))
    model = rewrite(load_source(folder), "quantize{format=nvfp4}")
    (note,) = export_with_notes(model, tmp_path / "nv")
    assert note.startswith("all weights are written as floats: transformers leaves out the scales of experts")
    assert "quantization_config" not in json.loads((tmp_path / "nv" / "config.json").read_text())
    np.testing.assert_array_equal(compute_logits(load_source(tmp_path / "nv").graph), compute_logits(model.graph))
    notes = export_with_notes(model, tmp_path / "codes", weights="codes")
    assert notes[0] == f"weights that keep their codes: {count} as nvfp4"
    again, want = compute_logits(load_source(tmp_path / "codes").graph), compute_logits(model.graph)
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_nvfp4_tensor_of_several_matrices_needs_one_scale(save: Save, tmp_path: Path) -> None:
    """Query, key and value of Phi-3, which are one tensor, have one scale; rows that others put together may not."""
    _, folder = save("phi3", num_key_value_heads=2, pad_token_id=0)
    model = rewrite(load_source(folder), "quantize{format=nvfp4}")
    assert export_with_notes(model, tmp_path / "out")[0] == "weights that keep their codes: 12 as nvfp4"
    again, want = compute_logits(load_source(tmp_path / "out").graph), compute_logits(model.graph)
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5 * np.abs(want).max())
    apart = rewrite(load_source(folder), 'quantize{format=nvfp4, keep="q"}, quantize{format=nvfp4}')
    (note,) = export_with_notes(apart, tmp_path / "apart")
    assert "nvfp4 stores one scale per tensor, but its rows differ in it" in note


@pytest.mark.parametrize(("form", "width", "group"), [("mxfp4", 80, 32), ("nvfp4", 72, 16)])
def test_float4_rows_need_whole_groups(form: str, width: int, group: int, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2, intermediate_size=width)
    model = rewrite(load_source(folder), f"quantize{{format={form}}}")
    (note,) = export_with_notes(model, tmp_path / "auto")
    assert f"{form} has groups of {group}, which does not divide its rows of {width} values" in note
    np.testing.assert_array_equal(compute_logits(load_source(tmp_path / "auto").graph), compute_logits(model.graph))
