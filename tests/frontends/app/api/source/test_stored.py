"""weft verify of quantized folders: codes are held against recipes, and fitted ones are not fitted again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

import weft
from weft.frontends.app.api.verify.verification import Verification, verify_folder
from weft.ir import WeftError

from .....passes.library.quantize.checkpoints import USED
from .....sampling import by_turns, others_long
from ....command import done
from ....formats.weft.sealing import seal_again
from ...llamas import write_llama
from ..test_weights import ExactOptions

SOURCE = """
import weft
block = weft.Block(weft.Attention(4, kv_heads=2, rope=weft.RoPE(), window=8), weft.GatedMLP(96), weft.RMSNorm())
tied = weft.Decoder(97, 64, 2, block, tie_embeddings=True, context=64)
untied = weft.Decoder(97, 64, 2, block, context=64)
mixture = weft.Decoder(
    97, 64, 1, weft.Block(weft.Attention(4, rope=weft.RoPE()), weft.MoE(4, 32, 2), weft.RMSNorm()), context=64
)
wide = weft.Decoder(97, 128, 1, weft.Block(weft.Attention(4), weft.GatedMLP(512), weft.RMSNorm()), context=64)
"""
TARGETS = ("ort-cpu", "onnx", "torch")
ROUNDED = [
    *("int8", "int4{method=rtn}", "int3{method=rtn, zeros=false}", "int4{method=kquant}", "int4{method=hqq}"),
    *("fp8", "mxfp4", "nvfp4"),
]


def compiled(
    tmp_path: Path, name: str = "tied", weights: str = "", target: str = "ort-cpu", passes: str = "", **options: Any
) -> Path:
    (tmp_path / "models.py").write_text(SOURCE)
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, USED, (24, 32)))
    given = {"passes": passes} if passes else {"weights": weights or "int4{method=rtn}"}
    given = {key: text.replace("TEXT", f"calibration={tmp_path / 'ids.npy'}") for key, text in given.items()}
    if target == "ort-cpu" and not passes:
        options["arithmetic"] = "f32"
    weft.compile(f"{tmp_path / 'models.py'}:{name}", tmp_path / "out", target=target, **given, **options)
    return tmp_path / "out"


def verified(folder: Path) -> Verification:
    return verify_folder(folder, trust=True, tokens=4, device="cpu")


def change(folder: Path, part: str, at: int, by: int = 1) -> None:
    """Add to one byte of the first stored tensor whose name has `part` in it, and seal the folder again."""
    if (file := folder / "model.safetensors").is_file():
        tensors = load_file(file)
        name = next(name for name in sorted(tensors) if part in name)
        raw = np.ascontiguousarray(tensors[name]).view(np.uint8)
        raw.reshape(-1)[at] += np.uint8(by)
        tensors[name] = raw.view(tensors[name].dtype).reshape(tensors[name].shape)
        save_file(tensors, file, {"format": "pt"})
    else:
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        entries = next(t.external_data for t in graph.initializer if part in t.name and t.external_data)
        offset = next(int(e.value) for e in entries if e.key == "offset")
        raw = np.memmap(folder / "model.onnx.data", np.uint8, "r+")
        raw[offset + at] += np.uint8(by)
        raw.flush()
    seal_again(folder)


@pytest.mark.parametrize(("weights", "name", "target"), by_turns(ROUNDED, ["tied", "mixture"], TARGETS))
def test_codes_rounded_to_the_nearest_are_compared_bit_by_bit(
    name: str, target: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it, ONNX Runtime rounds activations where it fuses the operators of target onnx, which verify allows for.
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    found = verified(compiled(tmp_path, name, weights, target))
    assert found.passed and found.max_relative < 1e-4
    assert target == "onnx" or found.tolerance < 1e-4
    assert found.weights is not None and found.weights.fitted == 0 and found.weights.wrong is None
    assert found.weights.tensors > 10


def verified_without_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verification:
    (folder.parent / "ids.npy").unlink()
    monkeypatch.setattr("weft.passes.library.quantize.quantize.fit_gptq", lambda *_: pytest.fail("codes are fitted"))
    return verified(folder)


@pytest.mark.parametrize("target", others_long(["ort-cpu", "torch"]))
def test_dequantized_values_are_used_where_a_target_stores_them(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains that are folded into a matrix leave none of its codes, and are divided out again."""
    file = write_llama(tmp_path / "llama", 0) / "model.safetensors"
    rng, tensors = np.random.default_rng(2), load_file(file)
    gains = {name: rng.uniform(0.5, 2, len(gain)) for name, gain in tensors.items() if "norm" in name}
    save_file(tensors | {name: gain.astype(np.float32) for name, gain in gains.items()}, file, {"format": "pt"})
    checks = []
    for between in ("", "fold-norm-scale, ", "fold-norm-scale, gqa-to-mha, quantize{bits=8}, "):
        np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, 29, (24, 32)))
        passes = f"quantize{{bits=4, calibration={tmp_path / 'ids.npy'}}}, {between}default"
        weft.compile(file.parent, tmp_path / "out", passes=passes, target=target, max_length=64)
        with monkeypatch.context() as patch:
            found = verified_without_text(tmp_path / "out", patch)
        assert found.passed and found.weights is not None and found.weights.fitted == 3 * 7 + 1
        checks.append(found.weights)
    kept, folded, twice = checks
    assert folded.tensors == twice.tensors < kept.tensors
    assert [check.farthest for check in (folded, twice)] == pytest.approx([kept.farthest] * 2, rel=1e-4)


def test_prepacked_codes_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiled(tmp_path, "wide", "int4{TEXT}", prepack=True)
    found = verified_without_text(folder, monkeypatch)
    assert found.passed and found.weights is not None and found.weights.fitted == 7 + 1


def test_matrices_that_change_after_they_were_fitted_are_refused(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "untied", passes="quantize{bits=4, TEXT}, rotate-heads, default")
    with pytest.raises(WeftError, match=r"out: .* of layers\.0\.attn.* cannot be restored: mat_mul has no inverse"):
        verified(folder)


@pytest.mark.parametrize(
    ("target", "part"),
    others_long([("ort-cpu", "layers.1.ffn.down"), ("torch", "layers.1.ffn.down"), ("torch", "ffn_norm.weight")]),
)
def test_scaled_channels_are_compared_bit_by_bit(target: str, part: str, tmp_path: Path) -> None:
    """Factors are found again on the text that the model's own tokenizer reads; no code of `int8` is fitted."""
    source = write_llama(tmp_path / "llama", 0)
    weft.compile(source, tmp_path / "out", weights="int8", target=target, max_length=64)
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert "scale-channels{bits=8}, quantize{bits=8}" in manifest["pipeline"]
    found = verified(tmp_path / "out")
    assert found.passed and found.weights is not None and found.weights.fitted == 0
    change(tmp_path / "out", part, 5)
    found = verified(tmp_path / "out")
    assert found.weights is not None and found.weights.wrong is not None
    assert part in found.weights.wrong and "byte 5 is" in found.weights.wrong


@pytest.mark.parametrize(
    ("part", "target"), by_turns(["layers.1.ffn.down", "embed", "layers.0.attn.o"], ["ort-cpu", "torch"])
)
def test_one_changed_code_is_found(part: str, target: str, tmp_path: Path) -> None:
    """By the checksums, and where those are made anew by the recipe; a step of one code in 8 bits changes no token."""
    folder = compiled(tmp_path, weights="int8", target=target)
    sealed = (folder / "weft.json").read_bytes()
    change(folder, part, 5)
    resealed = (folder / "weft.json").read_bytes()
    (folder / "weft.json").write_bytes(sealed)
    with pytest.raises(WeftError, match=r"model\.(onnx\.data|safetensors)"):
        verified(folder)
    (folder / "weft.json").write_bytes(resealed)
    found = verified(folder)
    assert found.weights is not None and found.weights.wrong is not None and not found.passed
    assert part in found.weights.wrong and "byte 5 is" in found.weights.wrong


def test_other_weights_of_fitted_folders_are_compared(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "untied", "int4{TEXT}", "torch")
    change(folder, "embed", 7)
    found = verified(folder)
    assert found.weights is not None and found.weights.wrong is not None and "embed" in found.weights.wrong


def test_verify_prints_the_tensors_compared(tmp_path: Path) -> None:
    folder = compiled(tmp_path, weights="int4{TEXT}")
    shown = done("verify", folder, "--trust", "--tokens", 2).stdout
    assert "16 matrices, taken from the folder; the largest relative distance from the original 0." in shown
    assert "equal their recipes" in shown
