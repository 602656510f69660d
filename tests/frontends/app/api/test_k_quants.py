"""GGUF files of K-quants and of codes of 5 bits whose weights stay in codes, by the pass quantize and --keep-blocks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

import weft
from weft.frontends.app.api.inspect.weight_sizes import compute_weight_sizes
from weft.frontends.app.api.source.sources import load_source
from weft.frontends.app.api.verify.verification import verify_folder
from weft.ir import Graph, WeftError
from weft.ir.recipes.blocks import AsStored, OnGrid, find_block_layout
from weft.ir.types.block_layouts import LAYOUTS
from weft.passes import run_passes

from ....backends.onnx.quantized_llama import LAYERS
from ....backends.onnx.quantized_llama import write as write_llama
from ....sampling import by_turns
from .test_stored_codes import IDS, logits, quantized
from .test_weights import ExactOptions

Array = np.ndarray[Any, Any]
DIM, VOCAB, STD = 256, 96, 0.15
# What llama.cpp makes of a small model, and what 5 and 6 bits a weight look like.
Q4_K_M = {"": Type.Q4_K, "attn_v": Type.Q6_K, "token_embd": Type.Q6_K}
FIVES = {"": Type.Q5_0, "attn_v": Type.Q8_0, "ffn_down": Type.Q5_1, "ffn_up": Type.Q5_K, "token_embd": Type.Q8_0}


def k_blocks(rng: np.random.Generator, shape: tuple[int, int], kind: Type, std: float) -> Array:
    """Blocks of a K-quant of numbers [rows, width] of deviation `std`: random codes, and scales that differ by half."""
    rows, width = shape
    layout = LAYOUTS[kind.name.lower()]
    raw = rng.integers(0, 256, (rows, width // 256, layout.dtype.block_bytes), dtype=np.uint8)

    def put(at: int, numbers: Array | float) -> None:
        halves = np.broadcast_to(np.asarray(numbers, np.float16)[..., None], (*raw.shape[:2], 1))
        raw[..., at : at + 2] = np.ascontiguousarray(halves).view(np.uint8)

    scale = std * rng.uniform(0.8, 1.2, raw.shape[:2])
    levels = rng.integers(32, 64, (*raw.shape[:2], 16), dtype=np.uint8)
    if kind in (Type.Q4_K, Type.Q5_K):
        # Minima are nearly half of the range, so that groups are about 0, like those of trained weights.
        most = 15 if kind == Type.Q4_K else 31
        put(0, scale / 48 / most * np.sqrt(12))
        put(2, scale / 48 / 2 * np.sqrt(12))
        minima = np.minimum(levels[..., :8] + rng.integers(0, 3, (*raw.shape[:2], 8), dtype=np.uint8), 63)
        for first, each in ((4, levels[..., :8]), (8, minima)):
            raw[..., first : first + 4] = each[..., :4] | (each[..., 4:] >> 4) << 6
        raw[..., 12:16] = (levels[..., 4:8] & 15) | (minima[..., 4:] & 15) << 4
    elif kind == Type.Q6_K:
        put(208, scale / 48 / 63 * np.sqrt(12))
        raw[..., 192:208] = (levels.astype(np.int8) * rng.choice([-1, 1], levels.shape).astype(np.int8)).view(np.uint8)
    elif kind == Type.Q3_K:
        put(108, scale / 16 / 7 * np.sqrt(12))
    return raw.reshape(rows, -1)


def stored(numbers: Array, kind: Type) -> Array:
    """Blocks of `numbers` [rows, width]; of K-quants, which have no quantizer in Python, random ones of their size."""
    if not kind.name.endswith("_K"):
        return quantize(numbers, kind)
    seed = numbers[0, :4].view(np.uint32)
    rows, width = numbers.shape
    return k_blocks(np.random.default_rng(seed), (rows, width), kind, STD)


write = partial(write_llama, dim=DIM, ffn=DIM, vocab=VOCAB, std=STD, store=stored)


def layouts(graph: Graph) -> dict[str, str]:
    """The layouts of the first layer's weights and of the table, by the last part of their names."""
    names = [name for name, param in graph.params.items() if param.type.rank == 2 and not name.startswith("layers.1")]
    return {
        n.removesuffix(".weight").split(".")[-1]: str(find_block_layout(graph.params[n].recipe, graph.reader))
        for n in names
    }


def errors(before: Graph, after: Graph, name: str) -> float:
    """The relative error of the weight `name`, of root mean squares."""
    want, found = (g.params[name].recipe.evaluate(g.reader).astype(np.float64) for g in (before, after))
    return float(np.sqrt(np.square(found - want).mean() / np.square(want).mean()))


def test_four_bit_files_keep_their_codes(tmp_path: Path) -> None:
    before, after = quantized(write(tmp_path / "model.gguf", Q4_K_M), "int4")
    kept = dict.fromkeys(("q", "k", "o", "gate", "up", "down"), "uint4_32_sums")
    assert layouts(after) == {**kept, "v": "int8_32", "embed": "int8_32"}
    anew = run_passes(before, "quantize{method=rtn}")
    for name in ("layers.0.attn.q.weight", "layers.1.ffn.down.weight"):
        assert after.params[name].recipe.has(AsStored)
        # Codes stay: what is left is the rounding of scales, to 255ths, and of what minima have beyond zero points.
        assert errors(before, after, name) < errors(before, anew, name) / 5
    # Uniform numbers between ±s in steps of s / 127 differ by their 12th root from the nearest.
    assert errors(before, after, "layers.0.attn.v.weight") < 1.2 * np.sqrt(1 / 12) / 127 * np.sqrt(3)


def test_five_bit_codes_become_8_bit_codes_exactly(tmp_path: Path) -> None:
    before, after = quantized(write(tmp_path / "model.gguf", FIVES), "int4")
    eights = {"down": "int8_32", "up": "int8_32"}
    assert layouts(after) == {**dict.fromkeys(("q", "k", "v", "o", "gate", "embed"), "q8_0"), **eights}
    for name in ("layers.0.attn.q.weight", "layers.0.attn.v.weight", "embed.weight"):
        assert errors(before, after, name) == 0
    assert 0 < errors(before, after, "layers.0.ffn.down.weight") < 0.01


def test_wider_codes_are_rounded_to_the_requested_bits(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q6_K})
    assert set(layouts(quantized(source, "int4")[1]).values()) == {"uint4_32", "int8_32"}
    assert set(layouts(quantized(source, "int8")[1]).values()) == {"int8_32"}
    assert set(layouts(quantized(write(tmp_path / "few.gguf", Q4_K_M), "int3")[1]).values()) == {"uint3_32", "int8_32"}


@pytest.mark.parametrize(("kind", "bits"), [(Type.Q3_K, 4), (Type.Q6_K, 8)], ids=lambda k: str(k))
def test_groups_of_16_are_kept_on_request(kind: Type, bits: int, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": kind})
    before, after = quantized(source, f"int{bits}{{group=16}}")
    assert layouts(after)["q"] == f"int{bits}_16"
    assert errors(before, after, "layers.0.attn.q.weight") < 2.0**-11  # scales in f16


@pytest.mark.parametrize(("target", "name"), by_turns(["ort-cpu", "onnx", "torch"], ["q4_k_m", "fives"]))
def test_folders_give_the_logits_of_the_codes(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"q4_k_m": Q4_K_M, "fives": FIVES}[name]
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    source = write(tmp_path / "model.gguf", kinds)
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    report = weft.compile(source, tmp_path / "out", target=target, weights="int4", **options)
    want = logits(quantized(source, "int4")[1])[-1]
    found = weft.load(tmp_path / "out", trust=target == "torch").logits(IDS)[-1]
    np.testing.assert_allclose(found, want, rtol=0, atol=5e-5 * np.abs(want).max())
    blocks = json.loads((tmp_path / "out" / "weft.json").read_text())["blocks"]
    assert blocks.keys() == ({"uint4_32_sums", "int8_32"} if kinds == Q4_K_M else {"q8_0", "int8_32"})
    assert not any("not as codes" in note for note in report.notes)


@pytest.mark.parametrize("kinds", [Q4_K_M, FIVES], ids=["q4_k_m", "fives"])
def test_sizes_are_predicted_and_codes_reproduced(kinds: dict[str, Type], tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", kinds)
    weft.compile(source, tmp_path / "out", weights="int4")
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    sizes = compute_weight_sizes(weft.load_source(str(source)), "int4", "ort-cpu")
    assert (sizes.blocks, sizes.kinds) == (manifest["blocks"], manifest["weights"]["kinds"])
    # ONNX Runtime's own rounding of activations, or of codes of 8 bits in two halves, is near what verify allows.
    weft.compile(source, tmp_path / "torch", weights="int4", target="torch")
    found = [verify_folder(tmp_path / name, tokens=4, device="cpu", trust=True) for name in ("out", "torch")]
    assert found[1].passed
    assert all(f.weights is not None and (f.weights.fitted, f.weights.wrong) == (0, None) for f in found)


def test_rounding_activations_costs_little(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", Q4_K_M)
    weft.compile(source, tmp_path / "out", weights="int4")
    want = logits(load_source(str(source)).graph)[-1]
    found = weft.load(tmp_path / "out").logits(IDS)[-1]
    assert 0 < np.linalg.norm(found - want) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("kind", "target"),
    by_turns([Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q5_0, Type.Q6_K], ["ort-cpu", "torch"]),
    ids=str,
)
def test_kept_blocks_equal_dequantized_weights(kind: Type, target: str, tmp_path: Path) -> None:
    given = {}
    if kind == Type.Q2_K:  # codes and scales of all sizes
        raw = np.random.default_rng(0).integers(0, 256, (DIM, 84), dtype=np.uint8)
        raw[:, 80:] = np.array([0.01, 0.015], np.float16).view(np.uint8)
        given = {f"blk.{i}.ffn_up.weight": raw for i in range(LAYERS)}
    source = write(tmp_path / "model.gguf", {"": Type.Q4_K, "ffn_up": kind}, given)
    weft.compile(source, tmp_path / "kept", target=target, keep_blocks="all")
    want = logits(load_source(str(source)).graph)[-1]
    found = weft.load(tmp_path / "kept", trust=target == "torch").logits(IDS)[-1]
    np.testing.assert_allclose(found, want, rtol=0, atol=5e-5 * np.abs(want).max())
    blocks = json.loads((tmp_path / "kept" / "weft.json").read_text())["blocks"]
    # Kernels of target torch take groups of 32.
    assert blocks.keys() == {"q4_k"} | (
        {kind.name.lower()} if target != "torch" or LAYOUTS[kind.name.lower()].group == 32 else set()
    )


def test_scales_beyond_f16_are_refused(tmp_path: Path) -> None:
    raw = k_blocks(np.random.default_rng(0), (DIM, DIM), Type.Q6_K, 0.1)
    raw[3, 208:210] = np.array([60000], np.float16).view(np.uint8)
    source = write(tmp_path / "model.gguf", {"": Type.Q6_K}, {"blk.0.attn_q.weight": raw})
    with pytest.raises(
        WeftError, match=r"blk\.0\.attn_q\.weight cannot keep its blocks: a scale exceeds the range of f16"
    ):
        weft.compile(source, tmp_path / "out", weights="int8{group=16}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_floats_of_q4_k_become_codes_again(dtype: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_K, "token_embd": Type.Q6_K})
    weft.export(source, tmp_path / "hf", dtype=dtype, weights="float")
    before, after = quantized(tmp_path / "hf", "int4")
    names = [name for name, p in before.params.items() if name.startswith("layers.") and p.type.rank == 2]
    assert all(after.params[name].recipe.has(OnGrid) for name in names)
    assert max(errors(before, after, name) for name in names) < 0.01
