"""Quantized weights that keep their codes in exports, decoded here by the published layouts of the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_file

from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.model import Model
from weft.ir import Graph, WeftError, interpret
from weft.ir.recipes.blocks import BlockRecipe

from ..command import done, refused
from ..conftest import Save

Array = np.ndarray[Any, Any]
IDS = np.random.default_rng(2).integers(0, 97, (1, 24))
FEEDS = {"input_ids": IDS, "position_ids": np.arange(24)[None]}
GQA = {"num_key_value_heads": 2, "intermediate_size": 96}
RTN = "quantize{method=rtn, bits=%d, group=%d, zeros=%s}"


def meaning(graph: Graph) -> Array:
    return interpret(graph, {name: FEEDS[name] for name in graph.inputs})["logits"]


def quantized(folder: Path, bits: int = 4, group: int = 32, zeros: bool = True, before: str = "") -> Model:
    return rewrite(load_source(folder), before + RTN % (bits, group, str(zeros).lower()))


def exported(model: Any, out: Path, **options: Any) -> list[str]:
    """Export, and return the notes."""
    notes: list[str] = []
    export(model, out, note=notes.append, **options)
    return notes


def taken_apart(tensors: dict[str, Array], name: str, bits: int) -> tuple[Array, Array, Array | None]:
    """Codes and zero points from 0 on, and scales, of a module in compressed-tensors: code i of a row begins at bit
    i · bits of the row's words, a zero point so along the outputs."""
    rows, width = tensors[f"{name}.weight_shape"].tolist()

    def codes(words: Array, count: int) -> Array:
        numbers = [int.from_bytes(row.astype("<i4").tobytes(), "little") for row in words]
        return np.array([[n >> (bits * i) & ((1 << bits) - 1) for i in range(count)] for n in numbers])

    zeros = tensors.get(f"{name}.weight_zero_point")
    packed, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    assert packed.shape == (rows, -(-width * bits // 32)) and packed.dtype == np.int32
    return codes(packed, width), scales, None if zeros is None else codes(np.ascontiguousarray(zeros.T), rows).T


def blocks(graph: Graph, name: str) -> Any:
    """The blocks of a parameter that a pass quantized."""
    recipe = graph.params[name].recipe
    assert isinstance(recipe, BlockRecipe)
    return recipe.read_blocks(graph.reader, 0, recipe.shape(graph.reader)[0])


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 32), (4, 16), (4, 32), (8, 32)])
def test_codes_of_a_folder(bits: int, group: int, zeros: bool, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = quantized(folder, bits, group, zeros)
    notes = exported(model, tmp_path / "out")
    layout = f"{'u' if zeros and bits < 8 else ''}int{bits}_{group}"
    assert notes == [
        f"weights that keep their codes: 21 as {layout}",
        "model.embed_tokens.weight, lm_head.weight: dequantized values are written instead of codes, in f32",
    ]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for i, (ours, theirs) in enumerate([("attn.k", "self_attn.k_proj"), ("ffn.down", "mlp.down_proj")]):
        want = blocks(model.graph, f"layers.{i}.{ours}.weight")
        codes, scales, points = taken_apart(tensors, f"model.layers.{i}.{theirs}", bits)
        np.testing.assert_array_equal(codes, want.codes.reshape(codes.shape))
        np.testing.assert_array_equal(scales, want.scales)
        assert (points is None) == (want.zeros is None)
        if points is not None:
            np.testing.assert_array_equal(points, want.zeros)
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    np.testing.assert_array_equal(meaning(again.graph), meaning(model.graph))
    assert str(again.graph.reader.dtype("model.layers.0.mlp.up_proj.weight")) == f"{layout}_f32"


def test_floats_of_8_bits_in_a_folder(save: Save, tmp_path: Path) -> None:
    """Tiles may be cut at both ends."""
    _, folder = save("llama", **GQA | {"intermediate_size": 288})
    model = rewrite(load_source(folder), "quantize{format=fp8}")
    notes = exported(model, tmp_path / "out")
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
    np.testing.assert_array_equal(meaning(again.graph), meaning(model.graph))
    # A folder of a pass that rounded the rest to integers says of every layer which it has.
    mixed = rewrite(load_source(folder), 'quantize{format=fp8, keep="down"}, quantize{method=rtn, group=16}')
    exported(mixed, tmp_path / "mixed")
    how = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert how["format"] == "mixed-precision"
    assert {g["format"] for g in how["config_groups"].values()} == {"float-quantized", "pack-quantized"}
    np.testing.assert_array_equal(meaning(load_source(tmp_path / "mixed").graph), meaning(mixed.graph))


def test_the_config_of_codes(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    exported(quantized(folder, zeros=True), tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    assert group["weights"].items() >= weights.items() and group["input_activations"] is None
    facts = config["quant_method"], config["format"], config["quantization_status"]
    assert facts == ("compressed-tensors", "pack-quantized", "compressed")
    told = "scales stay f16: a loader that rounds them to bf16 changes weights"
    assert told in exported(quantized(folder), tmp_path / "bf16", dtype="bf16")
    mixed = rewrite(quantized(folder, 8, before='quantize{method=rtn, keep="q"}, '), "")
    exported(mixed, tmp_path / "two")
    groups = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]["config_groups"]
    named = {g["weights"]["num_bits"]: g["targets"] for g in groups.values()}
    assert named[8] == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)] and len(named[4]) == 18
    np.testing.assert_array_equal(meaning(load_source(tmp_path / "two").graph), meaning(mixed.graph))


def test_codes_of_packed_weights(save: Save, tmp_path: Path) -> None:
    """Rows of packed q, k and v go where they come from; the scales of a folder in f16 are as they were."""
    _, folder = save("llama", **GQA, tie_word_embeddings=True)
    model = quantized(folder, before="fold-norm-scale, pack-qkv, pack-gate-up, ")
    notes = exported(model, tmp_path / "out", dtype="f16")
    assert notes[0] == "weights that keep their codes: 21 as uint4_32" and notes[1].endswith(
        "are written instead of codes, in f16"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    want = blocks(model.graph, "layers.2.attn.qkv.weight")
    parts = [taken_apart(tensors, f"model.layers.2.self_attn.{p}_proj", 4) for p in "qkv"]
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
def test_families_that_stack_or_interleave(
    model_type: str, config: dict[str, Any], count: int, save: Save, tmp_path: Path
) -> None:
    """Experts of their own tensors, and rows of q, k and v in one tensor."""
    _, folder = save(model_type, **config)
    model = quantized(folder, group=16, zeros=False)
    assert exported(model, tmp_path / "out")[0] == f"weights that keep their codes: {count} as int4_16"
    again = load_source(tmp_path / "out")
    assert (again.unread, again.ignored) == ([], [])
    want = meaning(model.graph)
    np.testing.assert_allclose(meaning(again.graph), want, rtol=0, atol=1e-12 * np.abs(want).max())


def test_floats_on_request(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = quantized(folder)
    assert exported(model, tmp_path / "out", weights="float") == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    np.testing.assert_array_equal(meaning(load_source(tmp_path / "out").graph), meaning(model.graph))
    assert exported(model, tmp_path / "out.gguf", weights="float", dtype="f32") == []
    assert {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors} == {"F32"}
    with pytest.raises(WeftError, match="--weights codes is for hf and gguf"):
        export(model, tmp_path / "out.safetensors", weights="codes")
    with pytest.raises(WeftError, match="--weights 'int4' is not known; an export takes auto, codes, float"):
        export(model, tmp_path / "new", weights="int4")
    assert not (tmp_path / "new").exists()


def test_codes_that_do_not_fit(save: Save, tmp_path: Path) -> None:
    """Rows of 72 numbers end within a group: all are floats by default, that one on request; GPT-2 stores [in, out]."""
    _, folder = save("llama", num_key_value_heads=2, intermediate_size=72)
    model = quantized(folder)
    names = ", ".join(f"model.layers.{i}.mlp.down_proj.weight" for i in range(3))
    reason = "rows of 72 codes of 4 bits are not whole groups of 32, in words of 32 bits"
    assert exported(model, tmp_path / "auto") == [
        f"all weights are written as floats, since not all codes fit the format: {names} ({reason})"
    ]
    notes = exported(model, tmp_path / "codes", weights="codes")
    assert notes[0] == f"written as floats: {names} ({reason})"
    ignored = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [*(f"model.layers.{i}.mlp.down_proj" for i in range(3)), "lm_head"]
    for name in ("auto", "codes"):
        np.testing.assert_array_equal(meaning(load_source(tmp_path / name).graph), meaning(model.graph))
    (note,) = exported(model, tmp_path / "out.gguf")
    assert "blk.0.ffn_down.weight" in note and "(its rows of 72 values are not whole blocks of 32)" in note
    _, other = save("gpt2")
    with pytest.raises(
        WeftError, match=r"--weights codes has no weights whose codes can be stored: transformer\.h\.0\.attn"
    ):
        export(quantized(other), tmp_path / "gpt2", weights="codes")
    with pytest.raises(WeftError, match=r"--weights codes has no weights whose codes can be stored$"):
        export(other, tmp_path / "gpt2", weights="codes")
    assert not (tmp_path / "gpt2").exists()


def test_tables_alone_are_told(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    model = rewrite(load_source(folder), 'quantize{method=rtn, keep="layers.*"}')
    (note,) = exported(model, tmp_path / "out")
    assert note == "model.embed_tokens.weight, lm_head.weight: dequantized values are written instead of codes, in f32"
    assert exported(model, tmp_path / "out.gguf", dtype="f16") == ["weights that keep their codes: 2 as int8_32"]


def test_codes_that_transformers_does_not_load(save: Save, tmp_path: Path) -> None:
    """Its layers multiply by their `weight`, which transformers takes away from layers with codes."""
    _, folder = save("falcon", new_decoder_architecture=True, num_kv_heads=2)
    model = quantized(folder, group=16)
    (note,) = exported(model, tmp_path / "out")
    assert note == "all weights are written as floats: transformers cannot load codes of falcon models"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported(model, tmp_path / "codes", weights="codes")[0] == "weights that keep their codes: 12 as uint4_16"


def gptq_folder(folder: Path, act_order: bool) -> Path:
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


def test_codes_of_a_checkpoint_on_request(save: Save, tmp_path: Path) -> None:
    """GPTQ to compressed-tensors and to GGUF: the same codes in other words. Without a request they are floats."""
    _, folder = save("llama", hidden_size=64, num_attention_heads=4, **GQA)
    source = gptq_folder(folder, act_order=False)
    assert exported(source, tmp_path / "float") == []
    assert exported(source, tmp_path / "out", weights="codes")[0] == "weights that keep their codes: 21 as int4_32"
    theirs, ours = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    words = theirs["model.layers.1.mlp.up_proj.qweight"].astype(np.int64) & 0xFFFFFFFF
    codes = np.stack([words >> (4 * i) & 15 for i in range(8)], 1).reshape(-1, words.shape[1]).T
    found, scales, points = taken_apart(ours, "model.layers.1.mlp.up_proj", 4)
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(scales, theirs["model.layers.1.mlp.up_proj.scales"].T)
    assert points is None
    want = meaning(load_source(source).graph)
    exported(source, tmp_path / "out.gguf", weights="codes", dtype="f32")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0" and kinds["token_embd.weight"] == "F32"
    for name in ("float", "out", "out.gguf"):
        np.testing.assert_allclose(meaning(load_source(tmp_path / name).graph), want, atol=1e-12 * np.abs(want).max())


def test_act_order_is_told(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", hidden_size=64, num_attention_heads=4, **GQA)
    source = gptq_folder(folder, act_order=True)
    with pytest.raises(WeftError, match="has no weights whose codes can be stored"):
        export(source, tmp_path / "out", weights="codes")
    assert not (tmp_path / "out").exists()


# -- GGUF


@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize(
    ("bits", "kind", "file_type"), [(8, "Q8_0", 7), (4, "Q4_0", 2), (3, "Q4_0", 2), (2, "Q4_0", 2)]
)
def test_blocks_of_gguf(bits: int, kind: str, file_type: int, group: int, save: Save, tmp_path: Path) -> None:
    """Without zero points, numbers are exactly those of the graph, by the gguf package."""
    _, folder = save("llama", hidden_size=96, num_attention_heads=4, **GQA)
    model = load_source(folder)
    model = (
        rewrite(model, RTN % (bits, 32 if group == 32 else 64, "false")) if group == 32 else _wide(model, bits, group)
    )
    notes = exported(model, tmp_path / "out.gguf")
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
        meaning(load_source(tmp_path / "out.gguf").graph), meaning(model.graph), rtol=0, atol=1e-9
    )


def _wide(model: Model, bits: int, group: int) -> Model:
    """`model` rounded in groups of `group`, which the pass does not offer."""
    from weft.ir.recipes.blocks import Quantize
    from weft.passes.fitting.matrices import Matrix, find_matrices

    for param, matrix in find_matrices(model.graph).items():
        assert isinstance(matrix, Matrix)
        wide = matrix.kind == "linear"
        param.recipe = Quantize(param.recipe, bits if wide else 8, group if wide else 32, False)
    return model


@pytest.mark.parametrize("bits", [3, 4])
def test_zero_points_become_minima(bits: int, save: Save, tmp_path: Path) -> None:
    """Codes and scales are exact, minima are f16: the note says how far weights are off, which is less than a tenth of
    a step, as a minimum is at most 2^bits − 1 steps and f16 has 11 bits."""
    _, folder = save("llama", **GQA)
    model = quantized(folder, bits)
    notes = exported(model, tmp_path / "out.gguf")
    assert notes[0] == f"weights that keep their codes: 2 as int8_32, 21 as uint{bits}_32"
    worst = 0.0
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        name = tensor.name.removeprefix("blk.1.").removesuffix(".weight")
        if name not in ("ffn_down", "attn_v", "ffn_up"):
            continue
        assert tensor.tensor_type.name == "Q4_1"
        ours = {"ffn_down": "ffn.down", "attn_v": "attn.v", "ffn_up": "ffn.up"}[name]
        want = blocks(model.graph, f"layers.1.{ours}.weight")
        raw = tensor.data.reshape(*want.scales.shape, 20)
        np.testing.assert_array_equal(raw[..., :2].copy().view(np.float16)[..., 0], want.scales)
        minima = raw[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64)
        np.testing.assert_array_equal(minima, (-want.scales * want.zeros).astype(np.float16))
        halves = np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], -1)
        np.testing.assert_array_equal(halves, want.codes)
        exact = model.graph.params[f"layers.1.{ours}.weight"].recipe.evaluate(model.graph.reader)
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        worst = max(worst, float(np.abs(found - exact).max()))
    told = notes[1].split("changes weights by ")[1].split(" ")
    assert 0 < worst <= 1.01 * float(told[0]) and 0 < float(told[3]) <= (2**bits - 1) * 2.0**-11
    assert "blk.0." in notes[1]


def test_blocks_of_a_gguf_file_on_request(save: Save, tmp_path: Path) -> None:
    """Of a file with blocks, the same bytes; rows of q and k are permuted there and back."""
    _, folder = save("llama", **GQA)
    exported(quantized(folder, zeros=True), tmp_path / "a.gguf")
    notes = exported(tmp_path / "a.gguf", tmp_path / "b.gguf", weights="codes")
    assert notes == ["weights that keep their codes: 21 as q4_1, 2 as q8_0"]
    first, second = (gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors for name in "ab")
    for a, b in zip(first, second, strict=True):
        assert (a.name, a.tensor_type) == (b.name, b.tensor_type)
        np.testing.assert_array_equal(a.data, b.data)
    exported(tmp_path / "a.gguf", tmp_path / "c.gguf")
    assert {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "c.gguf").tensors} == {"F32"}


def test_experts_of_gguf(save: Save, tmp_path: Path) -> None:
    """Stacks [experts, out, in] are blocks as well."""
    _, folder = save("mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    model = quantized(folder, zeros=False)
    exported(model, tmp_path / "out.gguf")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.ffn_down_exps.weight"] == "Q4_0"
    np.testing.assert_allclose(meaning(load_source(tmp_path / "out.gguf").graph), meaning(model.graph), atol=1e-9)


def test_many_rows_are_written_in_pieces(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, which make the same files."""
    from weft.frontends.export import stored_codes as codes

    _, folder = save("llama", **GQA)
    model = quantized(folder)
    exported(model, tmp_path / "whole.gguf")
    exported(model, tmp_path / "whole")
    for name in ("BLOCK_ELEMENTS", "SWEEP_ELEMENTS"):
        monkeypatch.setattr(codes, name, 200)
    exported(model, tmp_path / "pieces.gguf")
    exported(model, tmp_path / "pieces")
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "pieces")]
    assert both[0] == both[1]


def test_a_minimum_beyond_f16_is_refused(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = np.where(np.arange(tensors[key].size).reshape(tensors[key].shape) == 5, -90_000, tensors[key])
    save_file({k: t.astype(np.float32) for k, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeftError, match=r"a scale or minimum of 'blk\.1\.ffn_up\.weight' exceeds the range of f16"):
        export(quantized(folder), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_the_command(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", **GQA)
    told = done("export", folder, "-p", RTN % (4, 32, "false"), "-o", tmp_path / "out").stderr
    assert "weft: weights that keep their codes: 21 as int4_32\n" in told
    assert (
        done("export", folder, "-p", RTN % (4, 32, "false"), "--weights", "float", "-o", tmp_path / "f").exit_code == 0
    )
    line = refused("export", folder, "--weights", "codes", "-o", tmp_path / "new")
    assert line.endswith("--weights codes has no weights whose codes can be stored")
    assert not (tmp_path / "new").exists()
