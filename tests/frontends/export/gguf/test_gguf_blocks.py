"""Codes as blocks of GGUF files, decoded by the gguf package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

import weft
from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.model import Model
from weft.ir import WeftError
from weft.ir.recipes.blocks import BlockRecipe

from ...conftest import Save
from ..codes import GQA, IDS, RTN, compute_logits, export_with_notes, quantize, read_blocks


@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize(
    ("bits", "kind", "file_type"), [(8, "Q8_0", 7), (4, "Q4_0", 2), (3, "Q4_0", 2), (2, "Q4_0", 2)]
)
def test_codes_without_zero_points_are_exact_in_gguf_blocks(
    bits: int, kind: str, file_type: int, group: int, save: Save, tmp_path: Path
) -> None:
    """Without zero points, numbers are exactly those of the graph, by the gguf package."""
    _, folder = save("llama", hidden_size=96, num_attention_heads=4, **GQA)
    model = load_source(folder)
    model = (
        rewrite(model, RTN % (bits, 32 if group == 32 else 64, "false"))
        if group == 32
        else quantize_in_groups(model, bits, group)
    )
    notes = export_with_notes(model, tmp_path / "out.gguf")
    assert (len(notes) == 1 and f"21 as int{bits}_{group}" in notes[0]) or bits == 8
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = {t.name: t for t in reader.tensors}
    assert reader.fields["general.file_type"].contents() == file_type
    assert reader.fields["general.quantization_version"].contents() == 2
    for name, ours in {"ffn_down": "ffn.down", "attn_v": "attn.v", "attn_output": "attn.o"}.items():
        tensor = tensors[f"blk.1.{name}.weight"]
        assert tensor.tensor_type.name == kind
        want = model.graph.params[f"layers.1.{ours}.weight"].recipe.evaluate(model.graph.reader)
        np.testing.assert_array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), want)
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    np.testing.assert_allclose(
        compute_logits(load_source(tmp_path / "out.gguf").graph), compute_logits(model.graph), rtol=0, atol=1e-9
    )


def quantize_in_groups(model: Model, bits: int, group: int) -> Model:
    """`model` rounded in groups of `group`, which the pass does not offer."""
    from weft.ir.recipes.blocks import Quantize
    from weft.passes.fitting.matrices import Matrix, find_matrices

    for param, matrix in find_matrices(model.graph).items():
        assert isinstance(matrix, Matrix)
        wide = matrix.kind == "linear"
        param.recipe = Quantize(param.recipe, bits if wide else 8, group if wide else 32, False)
    return model


@pytest.mark.parametrize("bits", [3, 4])
def test_zero_points_become_minima_in_f16(bits: int, save: Save, tmp_path: Path) -> None:
    """Codes and scales are exact, minima are f16: the note says how far weights are off, which is less than a tenth of
    a step, as a minimum is at most 2^bits − 1 steps and f16 has 11 bits."""
    _, folder = save("llama", **GQA)
    model = quantize(folder, bits)
    notes = export_with_notes(model, tmp_path / "out.gguf")
    assert notes[0] == f"weights that keep their codes: 2 as int8_32, 21 as uint{bits}_32"
    worst = 0.0
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        name = tensor.name.removeprefix("blk.1.").removesuffix(".weight")
        if name not in ("ffn_down", "attn_v", "ffn_up"):
            continue
        assert tensor.tensor_type.name == "Q4_1"
        ours = {"ffn_down": "ffn.down", "attn_v": "attn.v", "ffn_up": "ffn.up"}[name]
        want = read_blocks(model.graph, f"layers.1.{ours}.weight")
        raw = tensor.data.reshape(*want.scales.shape, 20)
        np.testing.assert_array_equal(raw[..., :2].copy().view(np.float16)[..., 0], want.scales)
        minima = raw[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64)
        np.testing.assert_array_equal(minima, (-want.scales * want.zeros).astype(np.float16))
        halves = np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], -1)
        np.testing.assert_array_equal(halves, want.codes)
        exact = model.graph.params[f"layers.1.{ours}.weight"].recipe.evaluate(model.graph.reader)
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        worst = max(worst, float(np.abs(found - exact).max()))
    told = notes[1].split("changes weights by at most ")[1].split(" ")
    assert 0 < worst <= 1.01 * float(told[0].strip(",")) and 0 < float(told[2]) <= (2**bits - 1) * 2.0**-11
    assert "blk.0." in notes[1]


def test_blocks_of_a_gguf_file_are_copied_on_request(save: Save, tmp_path: Path) -> None:
    """Of a file with blocks, the same bytes; rows of q and k are permuted there and back."""
    _, folder = save("llama", **GQA)
    export_with_notes(quantize(folder, zeros=True), tmp_path / "a.gguf")
    notes = export_with_notes(tmp_path / "a.gguf", tmp_path / "b.gguf", weights="codes")
    assert notes == ["weights that keep their codes: 21 as q4_1, 2 as q8_0"]
    first, second = (gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors for name in "ab")
    for a, b in zip(first, second, strict=True):
        assert (a.name, a.tensor_type) == (b.name, b.tensor_type)
        np.testing.assert_array_equal(a.data, b.data)
    export_with_notes(tmp_path / "a.gguf", tmp_path / "c.gguf")
    assert {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "c.gguf").tensors} == {"F32"}


def test_stacks_of_experts_are_stored_in_blocks(save: Save, tmp_path: Path) -> None:
    """Stacks [experts, out, in] are blocks as well."""
    _, folder = save("mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    model = quantize(folder, zeros=False)
    export_with_notes(model, tmp_path / "out.gguf")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.ffn_down_exps.weight"] == "Q4_0"
    np.testing.assert_allclose(
        compute_logits(load_source(tmp_path / "out.gguf").graph), compute_logits(model.graph), atol=1e-9
    )


def test_a_minimum_beyond_f16_is_refused(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = np.where(np.arange(tensors[key].size).reshape(tensors[key].shape) == 5, -90_000, tensors[key])
    save_file({k: t.astype(np.float32) for k, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeftError, match=r"'blk\.1\.ffn_up\.weight' has a scale or minimum beyond the range of f16"):
        export(quantize(folder), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_mxfp4_has_gguf_blocks_and_nvfp4_has_none(save: Save, tmp_path: Path) -> None:
    """The format has blocks for mxfp4, and other blocks than these for nvfp4."""
    _, folder = save("llama", **GQA)
    model = rewrite(load_source(folder), "quantize{format=mxfp4}")
    assert export_with_notes(model, tmp_path / "mx.gguf") == [
        "weights that keep their codes: 2 as int8_32, 21 as mxfp4"
    ]
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "mx.gguf").tensors}
    for i in range(3):
        tensor, param = found[f"blk.{i}.ffn_down.weight"], model.graph.params[f"layers.{i}.ffn.down.weight"]
        assert tensor.tensor_type.name == "MXFP4" and isinstance(param.recipe, BlockRecipe)
        want = param.recipe.evaluate(model.graph.reader)
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), want)
    again = load_source(tmp_path / "mx.gguf")
    want = compute_logits(model.graph)
    np.testing.assert_allclose(compute_logits(again.graph), want, rtol=0, atol=1e-6 * np.abs(want).max())
    weft.compile(tmp_path / "mx.gguf", tmp_path / "kept", target="torch", keep_blocks="all", max_length=24)
    assert json.loads((tmp_path / "kept" / "weft.json").read_text())["blocks"] == {
        "mxfp4": 21,
        "q8_0": 1,
    }  # but the table
    found_logits = weft.load(tmp_path / "kept", trust=True).logits(IDS[0].tolist())
    np.testing.assert_allclose(found_logits[-1], want[0, -1], rtol=0, atol=5e-5 * np.abs(want).max())
    model = rewrite(load_source(folder), "quantize{format=nvfp4}")
    (note,) = export_with_notes(model, tmp_path / "nv.gguf")
    assert "GGUF has no blocks for codes of nvfp4" in note
