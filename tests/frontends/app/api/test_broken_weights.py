"""Weights that are not finite, or that a dtype cannot hold, are refused by every writer, which leaves no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from weft.ir import WeftError

NAME = r"(model\.)?(layers|blk)\.0\.(mlp\.down_proj|ffn\.down|ffn_down)\.weight"
WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{target} {dtype}": ("compile", {"target": target, "dtype": dtype})
       for target in ("ort-cpu", "onnx", "torch", "transformers") for dtype in ("f32", "f16")},
    **{f"ort-cpu {weights}": ("compile", {"weights": weights}) for weights in ("int4", "int8")},
    "torch fp8": ("compile", {"target": "torch", "passes": "quantize{format=fp8}, default"}),
    **{f"{kind} {dtype}": ("export", {"format": kind, "dtype": dtype})
       for kind in ("hf", "safetensors", "gguf") for dtype in ("f32", "f16", "bf16")},
    "gguf q8_0": ("export", {"format": "gguf", "dtype": "q8_0"}),
    "gguf int4": ("export", {"format": "gguf", "passes": "quantize{method=rtn}"}),
}  # fmt: skip


def broken(save: Any, value: float) -> Path:
    folder = Path(save("llama", intermediate_size=64)[1])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def refusal(writer: str, folder: Path, out: Path) -> str:
    function, options = WRITERS[writer]
    with pytest.raises(WeftError, match=NAME) as caught:
        getattr(weft, function)(folder, out, **options)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.halved
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("writer", WRITERS)
def test_non_finite_weights_are_refused(writer: str, value: float, save: Any, tmp_path: Path) -> None:
    line = refusal(writer, broken(save, value), tmp_path / "out")
    assert "the weights are broken; fetch or save them again" in line or "is not finite: it cannot be quantized" in line


@pytest.mark.parametrize("writer", [name for name in WRITERS if "f16" in name.split() or name == "gguf q8_0"])
def test_weights_beyond_the_range_of_a_dtype_are_refused(writer: str, save: Any, tmp_path: Path) -> None:
    value = 1e8 if "q8_0" in writer else 1e5
    line = refusal(writer, broken(save, value), tmp_path / "out")
    dtype = writer.split()[1]
    assert f"holds {value:g}, beyond the range of {dtype}: choose --dtype bf16 or f32" in line


def test_values_beyond_every_scale_are_refused_with_a_remedy(save: Any, tmp_path: Path) -> None:
    folder = broken(save, 3.4e38)
    assert "the argument keep of quantize leaves it as it is" in refusal("ort-cpu int4", folder, tmp_path / "out")
    assert "choose --dtype f32" in refusal("hf bf16", folder, tmp_path / "out")


def test_module_refuses_broken_weights(save: Any) -> None:
    with pytest.raises(WeftError, match=r"ffn\.down\.weight' holds 100000, beyond the range of f16"):
        weft.torch(broken(save, 1e5), dtype=torch.float16)
