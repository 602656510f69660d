"""Folders of compressed-tensors in floats of 4 bits (nvfp4, mxfp4), packed here by the published formats: they are the
models of the numbers that these stand for, and `--keep-blocks` and the pass quantize keep the codes bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from weft.frontends import load_source
from weft.frontends.app.api.inspect.counting import inspect
from weft.ir import WeftError
from weft.ir.recipes.blocks import AsStored
from weft.passes import run_passes

from .families import LENGTH, ROWS, VOCAB, error
from .test_quantized_folders import rewritten, tensors

HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array([*HALF, *(-v for v in HALF)])
IDS = np.random.default_rng(1).integers(3, VOCAB, LENGTH).tolist()
FAMILIES = {
    "dense": ("qwen3-gqa", {"intermediate_size": 96}),
    "mixture": ("qwen3-moe", {"moe_intermediate_size": 32}),
}
GROUP = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class Matrix:
    """Codes [out, in], bytes of scales [out, groups], and what scales are divided by."""

    codes: np.ndarray
    scales: np.ndarray
    divisor: float

    @property
    def numbers(self) -> np.ndarray:
        """The numbers that they stand for, float64 [out, in]."""
        if self.divisor:
            scales = torch.from_numpy(self.scales).view(torch.float8_e4m3fn).double().numpy() / self.divisor
        else:
            scales = 2.0 ** (self.scales.astype(np.float64) - 127)
        return E2M1[self.codes] * scales.repeat(self.codes.shape[1] // scales.shape[1], 1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that compressed-tensors stores, by the last part of their names."""
        stored = {
            "weight_packed": torch.from_numpy((self.codes[:, ::2] | self.codes[:, 1::2] << 4).astype(np.uint8)),
            "weight_scale": torch.from_numpy(self.scales),
        }
        if self.divisor:
            stored["weight_scale"] = stored["weight_scale"].view(torch.float8_e4m3fn)
            stored["weight_global_scale"] = torch.tensor([self.divisor], dtype=torch.float32)
        return stored


def drawn(form: str, rows: int, width: int, rng: np.random.Generator) -> Matrix:
    codes = rng.integers(0, 16, (rows, width)).astype(np.uint8)
    shape = (rows, width // GROUP[form])
    if form == "mxfp4":
        return Matrix(codes, rng.integers(121, 125, shape).astype(np.uint8), 0)
    # All bytes but those of NaN and of negative scales: subnormal ones are among them.
    return Matrix(codes, rng.integers(0, 127, shape).astype(np.uint8), float(np.float32(rng.uniform(1000, 2000))))


def scheme(form: str) -> dict[str, Any]:
    kind = "torch.float8_e4m3fn" if form == "nvfp4" else "torch.uint8"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": GROUP[form], "scale_dtype": kind}
    weights["strategy"] = "tensor_group" if form == "nvfp4" else "group"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{form}-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def folders(family: str, form: str, folder: Path) -> tuple[Path, Path, Mapping[str, Matrix]]:
    """A tiny model, its projections in floats of 4 bits; in the numbers that these stand for; and the matrices."""
    name, changes = FAMILIES[family]
    ROWS[name].__class__(ROWS[name].model, ROWS[name].config | changes).save(folder / "hf")
    stored, rng = tensors(folder / "hf"), np.random.default_rng(4)
    plain, matrices = dict(stored), dict[str, Matrix]()
    for key in [k for k in stored if k.endswith("_proj.weight")]:
        matrix = matrices[key] = drawn(form, *stored.pop(key).shape, rng)
        stored |= {f"{key.removesuffix('weight')}{part}": tensor for part, tensor in matrix.tensors().items()}
        plain[key] = torch.from_numpy(matrix.numbers.astype(np.float32))
    quantized = rewritten(folder / "hf", folder / form, stored, quantization_config=scheme(form))
    return quantized, rewritten(folder / "hf", folder / "plain", plain), matrices


def logits(source: Path, out: Path, **options: Any) -> np.ndarray:
    """The logits of IDS that a compiled folder computes; everything in the source is read."""
    passes = "default" if options.get("target") == "torch" else "default, -last-token-logits"
    report = weft.compile(source, out, passes=passes, max_length=LENGTH, **options)
    assert (report.model.unread, report.model.ignored) == ([], [])
    return weft.load(out, trust=True).logits(IDS)


@pytest.mark.parametrize("form", GROUP)
@pytest.mark.parametrize("family", FAMILIES)
def test_float4_weights_equal_their_dequantized_codes(family: str, form: str, tmp_path: Path) -> None:
    folder, plain, matrices = folders(family, form, tmp_path)
    assert len(matrices) > 10
    model = load_source(folder)
    assert form in inspect(model).parameters_by_storage
    reader = model.graph.reader
    for key, matrix in matrices.items():
        rows = len(matrix.codes)
        for start, stop in ((0, rows), (3, rows - 1)):
            found = reader.read(key, start, stop)
            # 1 / divisor, its product with a scale, and that with a code are rounded to f32.
            np.testing.assert_allclose(found, matrix.numbers[start:stop], rtol=3 * 2.0**-24, atol=0)
    found = logits(folder, tmp_path / "out")
    assert error(found[None], logits(plain, tmp_path / "wide")[None]) < 3e-5


@pytest.mark.parametrize("form", GROUP)
def test_kept_codes_give_the_same_logits(form: str, tmp_path: Path) -> None:
    folder, plain, matrices = folders("dense", form, tmp_path)
    found = logits(folder, tmp_path / "kept", keep_blocks="all", target="torch")
    assert error(found[None], logits(plain, tmp_path / "wide")[None]) < 3e-5
    facts = json.loads((tmp_path / "kept" / "weft.json").read_text())
    assert facts["blocks"] == {form: len(matrices)}
    weights = load_file(tmp_path / "kept" / "model.safetensors")
    own = {k: t for k, t in weights.items() if k.startswith("layers.0.mlp.up.") or k.startswith("layers.0.ffn.up.")}
    matrix = matrices["model.layers.0.mlp.up_proj.weight"]
    (scales,) = (t for k, t in own.items() if k.endswith(".scales"))
    np.testing.assert_array_equal(scales.T.numpy(), matrix.scales)
    with pytest.raises(WeftError, match=f"--keep-blocks all has no effect.* {form}: its codes are floats"):
        weft.compile(folder, tmp_path / "out", keep_blocks="all")


@pytest.mark.parametrize("form", GROUP)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_keeps_codes(family: str, form: str, tmp_path: Path) -> None:
    folder, _, _ = folders(family, form, tmp_path)
    before = load_source(folder).graph
    after = run_passes(before, f"quantize{{format={form}}}", verify=True)
    kept = [name for name, param in after.params.items() if param.recipe.has(AsStored)]
    assert len(kept) >= 10
    for name in kept:
        want, found = (g.params[name].recipe.evaluate(g.reader) for g in (before, after))
        np.testing.assert_array_equal(found, want)
    other = run_passes(before, f"quantize{{format={'mxfp4' if form == 'nvfp4' else 'nvfp4'}}}")
    assert not any(param.recipe.has(AsStored) for param in other.params.values())


Change = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.mark.parametrize(
    ("form", "part", "change", "message"),
    [
        ("mxfp4", "weight_scale", lambda t: t | 255, "a scale in .* is not finite"),
        ("nvfp4", "weight_scale", lambda t: (t.view(torch.uint8) | 127).view(t.dtype), "a scale in .* is not finite"),
        ("nvfp4", "weight_global_scale", lambda t: 0 * t, "a scale in .*global_scale' is not finite"),
        (
            "nvfp4",
            "weight_global_scale",
            lambda t: None,
            "there is no '.*weight_global_scale' next to '.*weight_packed'",
        ),
        (
            "nvfp4",
            "weight_global_scale",
            lambda t: t.expand(2),
            r"f32 \[2\] do not fit together: codes must be u8 \[out, in",
        ),
        ("mxfp4", "weight_scale", lambda t: t[:, 1:], r"weight_scale u8 \[\d+, 1\] do not fit together"),
        ("mxfp4", "weight_packed", lambda t: t[:, 1:], r"weight_packed u8 \[\d+, 31\] and .* do not fit together"),
    ],
)
def test_unreadable_float4_folders_are_refused(
    form: str, part: str, change: Change, message: str, tmp_path: Path
) -> None:
    folder, _, _ = folders("dense", form, tmp_path)
    key, stored = f"model.layers.0.self_attn.q_proj.{part}", load_file(folder / "model.safetensors")
    value = change(stored.pop(key))
    if value is not None:
        stored[key] = value.contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeftError, match=message):
        weft.compile(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
