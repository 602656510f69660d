"""Folders of integer codes (GPTQ, AWQ, compressed-tensors, torchao) are the models of the numbers that these stand for,
and `--keep-blocks` and the pass quantize keep the codes bit by bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import weft
from weft.frontends import load_source
from weft.ir import WeftError
from weft.ir.recipes.blocks import AsStored
from weft.passes import run_passes

from ..sampling import by_turns
from . import integer_checkpoints as checkpoints
from .integer_checkpoints import VOCAB, Codes

IDS = np.random.default_rng(1).integers(0, VOCAB, 24).tolist()
TOLERANCE = 3e-5  # of the largest logit: sums in another order
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed(bits: int, symmetric: bool, format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


Pack = Callable[[Codes], dict[str, Any]]
CASES: dict[str, tuple[dict[str, Any], Pack, dict[str, Any]]] = {
    **{f"gptq-{b}": (GPTQ | {"bits": b}, checkpoints.gptq, {"bits": b}) for b in (2, 3, 4, 8)},
    "gptq-symmetric": (GPTQ | {"sym": True}, checkpoints.gptq, {"symmetric": True}),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(checkpoints.gptq, v2=True), {}),
    "awq": (AWQ, checkpoints.awq, {}),
    "ct-4": (compressed(4, False), checkpoints.pack_quantized, {"scale": "bf16"}),
    "ct-4-symmetric": (
        compressed(4, True),
        partial(checkpoints.pack_quantized, symmetric=True),
        {"symmetric": True, "scale": "f32"},
    ),
    "ct-8-symmetric": (
        compressed(8, True),
        partial(checkpoints.pack_quantized, symmetric=True),
        {"bits": 8, "symmetric": True},
    ),
}


TORCHAO: dict[str, Any] = {"quant_method": "torchao", "quant_type": {"default": {}}}
for _bits, _symmetric, _scale in ((2, False, "bf16"), (4, False, "bf16"), (4, True, "f32"), (8, True, "f32")):
    CASES[f"torchao-{_bits}{'-symmetric' * _symmetric}"] = (
        TORCHAO,
        checkpoints.torchao,
        {"bits": _bits, "symmetric": _symmetric, "scale": _scale, "tell": checkpoints.torchao_told},
    )


def logits(source: Path, out: Path, **options: Any) -> np.ndarray:
    """The logits of IDS that a compiled folder computes; everything in the source is read."""
    passes = "default" if options.get("target") == "torch" else "default, -last-token-logits"
    report = weft.compile(source, out, passes=passes, max_length=32, **options)
    assert (report.model.unread, report.model.ignored) == ([], [])
    return weft.load(out, trust=True).logits(IDS)


def initializers(folder: Path) -> dict[str, np.ndarray]:
    model = onnx.load(folder / "model.onnx")
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("case", CASES)
def test_integer_weights_equal_their_dequantized_codes(case: str, tmp_path: Path) -> None:
    how, pack, drawn = CASES[case]
    folder, _, weights = checkpoints.model(tmp_path, how, pack, **drawn)
    reader = load_source(folder).graph.reader
    for name, w in weights.items():
        rows, width = w.codes.shape
        assert reader.shape(f"{name}.weight") == (rows, width)
        for start, stop in ((0, rows), (5, 6), (7, rows - 3)):
            found = reader.read(f"{name}.weight", start, stop)
            # A product of 8 bits and 11 (f16) or 8 (bf16) is exact in f32; one with an f32 is rounded once.
            np.testing.assert_array_equal(found, w.numbers[start:stop].astype(np.float32))


@pytest.mark.halved
@pytest.mark.parametrize(("case", "target"), by_turns(CASES, ["ort-cpu", "torch"]))
def test_kept_codes_give_the_same_logits(case: str, target: str, tmp_path: Path) -> None:
    how, pack, drawn = CASES[case]
    folder, plain, weights = checkpoints.model(tmp_path, how, pack, **drawn)
    want = logits(plain, tmp_path / "wide")
    found = logits(folder, tmp_path / "kept", keep_blocks="all", target=target)
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
    (layout,) = {str(load_source(folder).graph.reader.dtype(f"{name}.weight")) for name in weights}
    counts = json.loads((tmp_path / "kept" / "weft.json").read_text())["blocks"]
    assert list(counts) == [layout]  # also where q, k and v, and gate and up are packed
    assert counts[layout] >= 4 * checkpoints.LAYERS


@pytest.mark.parametrize("case", CASES)
def test_quantize_keeps_codes(case: str, tmp_path: Path) -> None:
    how, pack, drawn = CASES[case]
    folder, _, weights = checkpoints.model(tmp_path, how, pack, **drawn)
    before = load_source(folder).graph
    after = run_passes(before, "quantize{bits=8, group=16}")
    kept = [name for name, param in after.params.items() if param.recipe.has(AsStored)]
    assert len(kept) == len(weights)
    for name in kept:
        want, found = (g.params[name].recipe.evaluate(g.reader) for g in (before, after))
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("case", CASES)
def test_kept_codes_equal_the_codes_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    how, pack, drawn = CASES[case]
    folder, _, weights = checkpoints.model(tmp_path, how, pack, **drawn)
    weft.compile(folder, tmp_path / "out", keep_blocks="all", max_length=32)
    tensors = initializers(tmp_path / "out")
    for i in range(checkpoints.LAYERS):
        for name, parts in (("attn.qkv", "qkv"), ("attn.o", "o")):
            modules = [weights[f"model.layers.{i}.self_attn.{part}_proj"] for part in parts]
            codes, scales, zeros = (
                np.concatenate([getattr(w, field) for w in modules]) for field in ("codes", "scales", "zeros")
            )
            stem, middle = f"layers.{i}.{name}.weight", 1 << (modules[0].bits - 1)
            found = multiplied(tensors, stem, modules[0].bits, *codes.shape)
            np.testing.assert_array_equal(found[0], codes)
            np.testing.assert_array_equal(found[1], scales.astype(np.float32))
            np.testing.assert_array_equal(middle if found[2] is None else found[2], zeros)


def multiplied(tensors: dict[str, np.ndarray], stem: str, bits: int, rows: int, width: int) -> Any:
    """The codes, scales and zero points by which MatMulNBits multiplies.

    It takes codes of 2 and 4 bits, so those of 3 are stored in 4, from which 4 more stands for 0, and those of 8 as two
    halves, the high ones of a row before the low ones, with the offsets (128 - zero) · scale aside.
    """
    groups = width // 32
    if f"{stem}.packed" in tensors:
        points = tensors.get(f"{stem}.points")
        zeros = None if points is None else split(points.reshape(rows, -1), bits)[:, :groups]
        return (
            split(tensors[f"{stem}.packed"].reshape(rows, -1), bits),
            tensors[f"{stem}.steps"].reshape(rows, -1),
            zeros,
        )
    codes, scales = split(tensors[f"{stem}.codes"].reshape(rows, -1), 4), tensors[f"{stem}.scales"].reshape(rows, -1)
    points = tensors.get(f"{stem}.zeros")
    if bits == 3:
        return codes - 4, scales, None if points is None else split(points.reshape(rows, -1), 4)[:, :groups] - 4
    high, low = codes[:, :width], codes[:, width:]
    steps = scales[:, groups:]
    np.testing.assert_array_equal(scales[:, :groups], 16 * steps)
    offsets = tensors.get(f"{stem}.offsets")
    return 16 * high + low, steps, None if offsets is None else np.rint(128 - offsets.reshape(rows, -1) / steps)


def split(packed: np.ndarray, bits: int) -> np.ndarray:
    """The codes in bytes [rows, n], the lowest bits first."""
    each = np.stack([packed >> (bits * k) & ((1 << bits) - 1) for k in range(8 // bits)], -1)
    return each.reshape(len(packed), -1).astype(int)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("Int8Tensor", "Int4Tensor"), "proj.weight is stored as Int4Tensor; weft reads Int8Tensor, IntxUnpacked"),
        (
            ("block_size", "edges"),
            r"_scale f32 \[64, 4\] and .* do not fit together: qdata .* whole blocks of block_size=None",
        ),
        (("32]", "48]"), r"whole blocks of block_size=\[1, 48\]"),
        (("Int8Tensor", "Float8Tensor"), r"scale f32, one for all blocks of block_size=\[1, 32\]"),
        (("{", "["), "the metadata of model.layers.0.mlp.down_proj.weight"),
        (("int8", "int9"), r"whole blocks of block_size=\[1, 32\]"),
    ],
)
def test_unreadable_torchao_tensors_are_refused(change: tuple[str, str], why: str, tmp_path: Path) -> None:
    def tell(w: Codes) -> str:
        told = checkpoints.torchao_told(w).replace('"reduce_range": false', '"target_dtype": {"_data": "int8"}')
        return told.replace(*change)

    drawn: dict[str, Any] = {"bits": 8, "symmetric": True, "scale": "f32", "tell": tell}
    folder, _, _ = checkpoints.model(tmp_path, TORCHAO, checkpoints.torchao, **drawn)
    with pytest.raises(WeftError, match=why):
        load_source(folder)


def test_torchao_codes_beyond_4_bits_are_detected(tmp_path: Path) -> None:
    def tell(w: Codes) -> str:
        return checkpoints.torchao_told(w).replace('"reduce_range": false', '"target_dtype": {"_data": "int4"}')

    drawn: dict[str, Any] = {"bits": 8, "symmetric": True, "scale": "f32", "tell": tell}
    folder, _, _ = checkpoints.model(tmp_path, TORCHAO, checkpoints.torchao, **drawn)
    with pytest.raises(WeftError, match="has codes of more than 4 bits; the checkpoint is damaged"):
        weft.compile(folder, tmp_path / "out", max_length=32)


PUBLISHED: dict[str, dict[str, Any]] = {  # keys of folders on the hub that are of the weights, or mean nothing
    "gptq-4": {
        **{
            "damp_percent": 0.01,
            "lm_head": False,
            "true_sequential": True,
            "static_groups": False,
            "pack_dtype": "int32",
        },
        **{"meta": {"quantizer": ["gptqmodel:1.0"], "mse": 0.0}, "use_exllama": True, "dataset": "c4", "batch_size": 1},
    },
    "awq": {
        "backend": "autoawq",
        "do_fuse": False,
        "modules_to_not_convert": ["lm_head"],
        "exllama_config": {"version": 2},
    },
    "ct-4": {"global_compression_ratio": 1.9, "kv_cache_scheme": None, "sparsity_config": {}, "version": "0.9"},
    "torchao-4": {"include_input_output_embeddings": True, "modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_unread_quantization_keys_are_named(case: str, tmp_path: Path) -> None:
    how, pack, drawn = CASES[case]
    how = copy.deepcopy(how) | PUBLISHED[case]
    assert load_source(checkpoints.model(tmp_path, how, pack, **drawn)[0]).left_out == []
    how["rotation"] = "hadamard"
    named = ["rotation"]
    for group in how.get("config_groups", {}).values():
        group["weights"]["rotation"] = "hadamard"
        group["input_activations"] = {"num_bits": 8, "dynamic": True}
        named += ["config_groups.group_0.weights.rotation", "config_groups.group_0.input_activations"]
    found = load_source(checkpoints.model(tmp_path / "more", how, pack, **drawn)[0]).left_out
    assert {part.name for part in found} == {f"quantization_config.{name}" for name in named}
