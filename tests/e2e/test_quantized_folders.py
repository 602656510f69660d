"""Folders quantized as published (gpt-oss in MXFP4, DeepSeek-V3 in FP8) are the models of their dequantized weights."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import weft
from weft.frontends import load_source
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.export.hf.checkpoint import write_folder
from weft.frontends.formats.hf import Folder
from weft.frontends.model import Model
from weft.ir import WeftError

from ..sampling import others_long
from .families import LENGTH, ROWS, VOCAB, error, reference
from .test_family_configs import edited

Tensors = dict[str, torch.Tensor]
MXFP4, FP8 = {"quant_method": "mxfp4"}, {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8 |= {"activation_scheme": "dynamic", "fmt": "e4m3"}
TOLERANCE = 3e-5
IDS = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
GPT_OSS = replace(ROWS["gpt-oss"], config=ROWS["gpt-oss"].config | {"intermediate_size": 96})
# Sides that are no multiples of a tile's, as the 576 rows of DeepSeek's kv_a_proj_with_mqa.
RAGGED = {"hidden_size": 160, "intermediate_size": 200}
TILED = {
    "deepseek-v3": (RAGGED | {"moe_intermediate_size": 136}, torch.float32),
    "deepseek_v32": (RAGGED | {"moe_intermediate_size": 136}, torch.float32),
    "qwen3-moe": (RAGGED | {"moe_intermediate_size": 264}, torch.bfloat16),
    "qwen3-gqa": (RAGGED, torch.bfloat16),
}
WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32, "num_attention_heads": 8}


def tensors(folder: Path) -> Tensors:
    """All tensors of a folder."""
    return {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}


def rewritten(source: Path, folder: Path, stored: Tensors, **changes: Any) -> Path:
    """A folder of the tensors `stored`, its config that of `source` but for `changes`."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file({k: t.contiguous() for k, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    return edited(folder, **changes)


def in_mxfp4(folder: Path) -> Path:
    """A tiny gpt-oss, its experts random blocks."""
    GPT_OSS.save(folder / "plain")
    stored, generator = tensors(folder / "plain"), torch.Generator().manual_seed(2)
    for key in [k for k in stored if k.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = stored.pop(key).shape
        shape = (experts, rows, width // 32)
        stored[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        stored[f"{key}_scales"] = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
    return rewritten(folder / "plain", folder / "mxfp4", stored, quantization_config=MXFP4)


def in_fp8(name: str, folder: Path) -> tuple[Path, Path]:
    """A tiny model, its projections in tiles of FP8; and in the numbers that those stand for."""
    changes, scaled_in = TILED.get(name, (WHOLE, torch.float32))
    row = ROWS[name if name in ROWS else "qwen3-gqa"]
    replace(row, config=row.config | changes).save(folder / "hf")
    stored = tensors(folder / "hf")
    plain = dict(stored)
    for key in [k for k in stored if re.search(r"_proj|\.wq_b|\.wk\b", k) and k.endswith(".weight")]:
        weight = stored[key]
        plain[key], stored[key] = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        counts = [-(-n // 128) for n in weight.shape]
        scales = stored[f"{key}_scale_inv"] = torch.empty(counts, dtype=scaled_in)
        for i, j in itertools.product(*map(range, counts)):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[tile].abs().max() / 448
            stored[key][tile] = (weight[tile] / scales[i, j].float()).to(torch.float8_e4m3fn)
            plain[key][tile] = stored[key][tile].float() * scales[i, j].float()
    quantized = rewritten(folder / "hf", folder / "fp8", stored, quantization_config=FP8)
    return quantized, rewritten(folder / "hf", folder / "plain", plain)


def by_transformers(folder: Path, **options: Any) -> np.ndarray:
    """The logits of IDS [1, seq, vocab] that transformers computes from `folder` in float32."""
    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
    return reference(model.eval(), IDS)


def compiled(source: Path, out: Path) -> np.ndarray:
    """The same by weft; everything in the folder is read."""
    report = weft.compile(source, out, passes="default, -last-token-logits", max_length=LENGTH)
    assert (report.model.unread, report.model.ignored) == ([], [])
    return weft.load(out).logits(IDS[0].tolist())[None]


def values(model: Model) -> Mapping[str, np.ndarray]:
    """The parameters by name."""
    return {name: p.recipe.evaluate(model.graph.reader) for name, p in model.graph.params.items()}


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    folder = in_mxfp4(tmp_path)
    want = by_transformers(folder, quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert error(compiled(folder, tmp_path / "out"), want) < TOLERANCE
    assert "mxfp4" in inspect(load_source(folder)).parameters_by_storage
    assert verify_folder(tmp_path / "out", against=folder).passed


@pytest.mark.parametrize("name", others_long(TILED, 2))
def test_fp8_tiles_equal_dequantized_weights(name: str, tmp_path: Path) -> None:
    folder, plain = in_fp8(name, tmp_path)
    assert error(compiled(folder, tmp_path / "out"), by_transformers(plain)) < TOLERANCE
    found, want = values(load_source(folder)), values(load_source(plain))
    assert all(np.array_equal(found[parameter], want[parameter]) for parameter in want)
    assert "f8e4m3_128" in inspect(load_source(folder)).parameters_by_storage


def test_fp8_tiles_are_kept_on_request(tmp_path: Path) -> None:
    """In a model of PyTorch that keeps blocks: the same numbers in a quarter of the bytes."""
    folder, plain = in_fp8("qwen3-whole", tmp_path)
    same: Any = {"target": "torch", "max_length": LENGTH}
    report = weft.compile(folder, tmp_path / "kept", keep_blocks="all", **same)
    wide = weft.compile(folder, tmp_path / "wide", **same)
    facts = json.loads((tmp_path / "kept" / "weft.json").read_text())
    assert facts["blocks"] == {"f8e4m3_128": sum(key.endswith("_scale_inv") for key in tensors(folder))}
    assert report.weight_bytes < 0.4 * wide.weight_bytes
    found = weft.load(tmp_path / "kept", trust=True).logits(IDS[0].tolist())[None]
    assert error(found, by_transformers(plain)) < TOLERANCE
    with pytest.raises(WeftError, match=r"--keep-blocks all has no effect.* f8e4m3_128: its codes are floats"):
        weft.compile(folder, tmp_path / "out", keep_blocks="all")


def test_fp8_rows_of_partial_tiles_are_dequantized(tmp_path: Path) -> None:
    folder, _ = in_fp8("qwen3-gqa", tmp_path)
    notes = weft.compile(folder, tmp_path / "out", target="torch", keep_blocks="all", max_length=LENGTH).trace
    assert any("the width of its rows is not a multiple of 128" in note for note in notes)


def test_nan_codes_are_named(tmp_path: Path) -> None:
    folder, _ = in_fp8("qwen3-whole", tmp_path)
    stored, key = tensors(folder), "model.layers.1.mlp.up_proj.weight"
    stored[key].view(torch.uint8)[300, 5] = 0x7F
    broken = rewritten(folder, tmp_path / "broken", stored)
    with pytest.raises(WeftError, match=f"'{key}' contains NaN; the checkpoint is damaged"):
        weft.compile(broken, tmp_path / "out", target="torch", keep_blocks="all")
    assert not (tmp_path / "out").exists()


def test_every_mxfp4_byte_and_exponent_is_decoded(tmp_path: Path) -> None:
    """OCP MX specification 1.0, 5.3: E2M1 is sign, exponent of bias 1, one bit of mantissa; E8M0 is 2^(x - 127), and
    255 no number."""

    def e2m1(code: int) -> float:
        sign, exponent, mantissa = 1 - 2 * (code >> 3), code >> 1 & 3, code & 1
        return sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 253, 16, 16)
    scales = torch.arange(253, dtype=torch.uint8).reshape(1, 253, 1).expand(2, 253, 16).clone()
    scales[1, 7] = 255
    stored = {"x_blocks": blocks, "x_scales": scales}
    (tmp_path / "config.json").write_text("{}")
    reader = Folder.open(rewritten(tmp_path, tmp_path / "x", stored, quantization_config=MXFP4)).open_weights()
    codes = np.array([e2m1(code) for byte in range(256) for code in (byte & 15, byte >> 4)])
    want = np.ldexp(codes[:, None], np.arange(253) - 127)
    assert (list(reader.keys()), reader.shape("x")) == (["x"], (2, 512, 253))
    first, second = reader.read("x", 0, 1), reader.read("x", 1, 2)
    assert np.array_equal(first, want[None])
    assert np.isnan(second[0, :, 7]).all()
    assert np.array_equal(np.delete(second, 7, 2), np.delete(want, 7, 1)[None])


@pytest.mark.parametrize("shape", [(256, 384), (3, 256, 128)])
def test_fp8_tiles_dequantize_as_in_transformers(shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)  # 127 is no number
    codes += 128 * torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand((*shape[:-2], shape[-2] // 128, shape[-1] // 128), generator=generator)
    stored = {"x": codes.view(torch.float8_e4m3fn), "x_scale_inv": scales}
    (tmp_path / "config.json").write_text("{}")
    reader = Folder.open(rewritten(tmp_path, tmp_path / "x", stored, quantization_config=FP8)).open_weights()
    want = Fp8Dequantize(None)._dequantize_one(stored["x"], scales, torch.float32).numpy()
    for start, stop in ((0, shape[0]), (1, 2), (shape[0] // 2 - 1, shape[0] - 1)):
        assert np.array_equal(reader.read("x", start, stop), want[start:stop])


def test_exported_quantized_folders_are_unquantized(tmp_path: Path) -> None:
    folder = in_mxfp4(tmp_path)
    write_folder(load_source(folder), tmp_path / "back")
    want = by_transformers(folder, quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert np.array_equal(by_transformers(tmp_path / "back"), want)


def test_ir_text_reads_the_same_values(tmp_path: Path) -> None:
    folder = in_mxfp4(tmp_path)
    model = load_source(folder)
    (tmp_path / "model.weft").write_text(str(model.graph))
    found, want = values(load_source(tmp_path / "model.weft")), values(model)
    assert all(np.array_equal(found[name], want[name]) for name in want)


EMPTY = {"x": torch.zeros(256, 256).to(torch.float8_e4m3fn)}
BLOCKS = {"x_blocks": torch.zeros((2, 8, 4, 16), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("how", "stored", "message"),
    [
        ({"quant_method": "hqq"}, {}, r"quantization by hqq is not supported, only by mxfp4, fp8, gptq, a"),
        ("quark", {}, r"quantization by quark .*, bitsandbytes or torchao: give weft"),
        (
            "torchao",
            {"x._weight_qdata": torch.zeros(8, 8).char(), "x._weight_scale": torch.ones(8, 1)},
            r"torchao: x.weight is stored without the name of its class; weft reads Int8Tensor, .*Float8Tensor",
        ),
        ({"load_in_2bit": True}, {}, r"quantization by None is not supported"),
        (
            FP8 | {"weight_block_size": None},
            {},
            r"quantized by fp8: weight_block_size=None must be two positive integers",
        ),
        (FP8 | {"activation_scheme": "static"}, {}, "activation_scheme='static' is not supported, only 'dynamic'"),
        (FP8, EMPTY, "there is no 'x_scale_inv' next to 'x'; the checkpoint is incomplete"),
        (
            FP8,
            EMPTY | {"x_scale_inv": torch.ones(2, 1)},
            r"x f8e4m3 \[256, 256\] and x_scale_inv f32 \[2, 1\] do not fit",
        ),
        (FP8, EMPTY | {"x_scale_inv": torch.ones(2, 2).byte()}, r"x_scale_inv u8 .* one for each tile of 128 · 128"),
        (MXFP4, BLOCKS, "there is no 'x_scales' next to 'x_blocks'"),
        (MXFP4, BLOCKS | {"x_scales": torch.ones(2, 8, 3).byte()}, r"x_scales u8 \[2, 8, 3\] do not fit together"),
        (MXFP4, BLOCKS | {"x_scales": torch.ones(2, 8, 4)}, r"x_scales f32 \[2, 8, 4\] do not fit together"),
    ],
)
def test_unknown_quantization_is_refused(how: Any, stored: Tensors, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    folder = rewritten(tmp_path, tmp_path / "x", {"y": torch.ones(1)} | stored, quantization_config=how)
    with pytest.raises(WeftError, match=message) as e:
        load_source(folder)
    assert str(e.value).startswith(f"{folder / 'config.json'}: ")
