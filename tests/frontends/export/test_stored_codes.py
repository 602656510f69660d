"""Quantized weights that keep their codes in exports: which, and the notes about the others."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.ir import WeftError

from ..command import done, refused
from ..conftest import Save
from .codes import GQA, RTN, compute_logits, export_with_notes, quantize, unpack_module


def test_weights_float_writes_dequantized_values(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = quantize(folder)
    assert export_with_notes(model, tmp_path / "out", weights="float") == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    np.testing.assert_array_equal(compute_logits(load_source(tmp_path / "out").graph), compute_logits(model.graph))
    assert export_with_notes(model, tmp_path / "out.gguf", weights="float", dtype="f32") == []
    assert {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors} == {"F32"}
    with pytest.raises(WeftError, match="--weights codes needs format hf or gguf"):
        export(model, tmp_path / "out.safetensors", weights="codes")
    with pytest.raises(WeftError, match="--weights 'int4' is unknown; known are auto, codes, float"):
        export(model, tmp_path / "new", weights="int4")
    assert not (tmp_path / "new").exists()


def test_codes_that_do_not_fit_are_written_as_floats(save: Save, tmp_path: Path) -> None:
    """Rows of 72 numbers end within a group: all are floats by default, that one on request; GPT-2 stores [in, out]."""
    _, folder = save("llama", num_key_value_heads=2, intermediate_size=72)
    model = quantize(folder)
    names = ", ".join(f"model.layers.{i}.mlp.down_proj.weight" for i in range(3))
    reason = "rows of 72 codes of 4 bits do not fill whole groups of 32 and 32-bit words"
    assert export_with_notes(model, tmp_path / "auto") == [
        f"all weights are written as floats, since some codes do not fit: {names} ({reason})"
    ]
    notes = export_with_notes(model, tmp_path / "codes", weights="codes")
    assert notes[0] == f"written as floats: {names} ({reason})"
    ignored = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [*(f"model.layers.{i}.mlp.down_proj" for i in range(3)), "lm_head"]
    for name in ("auto", "codes"):
        np.testing.assert_array_equal(compute_logits(load_source(tmp_path / name).graph), compute_logits(model.graph))
    (note,) = export_with_notes(model, tmp_path / "out.gguf")
    assert "blk.0.ffn_down.weight" in note and "(GGUF blocks have 32 values, which does not divide rows of 72)" in note
    _, other = save("gpt2")
    with pytest.raises(
        WeftError,
        match=r"--weights codes has no effect: no weight has codes that can be stored \(transformer\.h\.0\.attn",
    ):
        export(quantize(other), tmp_path / "gpt2", weights="codes")
    with pytest.raises(WeftError, match=r"--weights codes has no effect: no weight has codes that can be stored$"):
        export(other, tmp_path / "gpt2", weights="codes")
    assert not (tmp_path / "gpt2").exists()


def test_quantized_tables_are_dequantized_in_folders(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = rewrite(load_source(folder), 'quantize{method=rtn, keep="layers.*"}')
    (note,) = export_with_notes(model, tmp_path / "out")
    assert (
        note
        == "model.embed_tokens.weight, lm_head.weight: written dequantized, as transformers needs floats there, in f32"
    )
    assert export_with_notes(model, tmp_path / "out.gguf", dtype="f16") == [
        "weights that keep their codes: 2 as int8_32"
    ]


def write_gptq_folder(folder: Path, act_order: bool) -> Path:
    """A folder of GPTQ, made of a plain one: random codes of 4 bits for every projection."""
    rng, tensors = np.random.default_rng(6), load_file(folder / "model.safetensors")
    for key in [key for key in tensors if "_proj" in key]:
        rows, width = tensors.pop(key).shape
        name = key.removesuffix("weight")
        tensors[f"{name}qweight"] = rng.integers(-(1 << 31), 1 << 31, (width // 8, rows)).astype(np.int32)
        tensors[f"{name}qzeros"] = np.full((width // 32, rows // 8), 0x77777777, np.int32)
        tensors[f"{name}scales"] = rng.uniform(0.01, 0.02, (width // 32, rows)).astype(np.float16)
        index = np.arange(width) // 32
        tensors[f"{name}g_idx"] = (index[::-1] if act_order else index).astype(np.int32)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": act_order}
    out = folder.with_name("gptq")
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_codes_of_a_checkpoint_are_kept_on_request(save: Save, tmp_path: Path) -> None:
    """GPTQ to compressed-tensors and to GGUF: the same codes in other words. Without a request they are floats."""
    _, folder = save("llama", hidden_size=64, num_attention_heads=4, **GQA)
    source = write_gptq_folder(folder, act_order=False)
    assert export_with_notes(source, tmp_path / "float") == []
    assert (
        export_with_notes(source, tmp_path / "out", weights="codes")[0]
        == "weights that keep their codes: 21 as int4_32"
    )
    theirs, ours = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    words = theirs["model.layers.1.mlp.up_proj.qweight"].astype(np.int64) & 0xFFFFFFFF
    codes = np.stack([words >> (4 * i) & 15 for i in range(8)], 1).reshape(-1, words.shape[1]).T
    found, scales, points = unpack_module(ours, "model.layers.1.mlp.up_proj", 4)
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(scales, theirs["model.layers.1.mlp.up_proj.scales"].T)
    assert points is None
    want = compute_logits(load_source(source).graph)
    export_with_notes(source, tmp_path / "out.gguf", weights="codes", dtype="f32")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0" and kinds["token_embd.weight"] == "F32"
    for name in ("float", "out", "out.gguf"):
        np.testing.assert_allclose(
            compute_logits(load_source(tmp_path / name).graph), want, atol=1e-12 * np.abs(want).max()
        )


def test_codes_in_act_order_cannot_be_stored(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", hidden_size=64, num_attention_heads=4, **GQA)
    source = write_gptq_folder(folder, act_order=True)
    with pytest.raises(WeftError, match="no weight has codes that can be stored"):
        export(source, tmp_path / "out", weights="codes")
    assert not (tmp_path / "out").exists()


def test_rows_in_pieces_yield_equal_files(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, which make the same files."""
    from weft.frontends.export import stored_codes as codes

    _, folder = save("llama", **GQA)
    model = quantize(folder)
    export_with_notes(model, tmp_path / "whole.gguf")
    export_with_notes(model, tmp_path / "whole")
    for name in ("BLOCK_ELEMENTS", "SWEEP_ELEMENTS"):
        monkeypatch.setattr(codes, name, 200)
    export_with_notes(model, tmp_path / "pieces.gguf")
    export_with_notes(model, tmp_path / "pieces")
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "pieces")]
    assert both[0] == both[1]


def test_command_keeps_codes(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    told = done("export", folder, "-p", RTN % (4, 32, "false"), "-o", tmp_path / "out").stderr
    assert "weft: weights that keep their codes: 21 as int4_32\n" in told
    assert (
        done("export", folder, "-p", RTN % (4, 32, "false"), "--weights", "float", "-o", tmp_path / "f").exit_code == 0
    )
    line = refused("export", folder, "--weights", "codes", "-o", tmp_path / "new")
    assert line.endswith("--weights codes has no effect: no weight has codes that can be stored")
    assert not (tmp_path / "new").exists()
