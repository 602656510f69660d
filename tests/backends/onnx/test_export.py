"""The ONNX backend: selection of lowerings, traces, streamed weights, configs."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest

import weft
from weft import MLP, Attention, Block, Encoder
from weft.backends.onnx import export
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.recipes import Normal
from weft.ir.recipes import recipe as recipe_module
from weft.ir.recipes.blocks import Quantize
from weft.ir.types import dtypes

from .small_decoder import decoder


def test_unknown_targets_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="did you mean ort-cpu"):
        TARGETS.lookup("ort_cpu")
    with pytest.raises(WeftError, match="does not support bf16"):
        weft.compile(decoder(), tmp_path / "out", target="ort-cpu", dtype="bf16")
    with pytest.raises(WeftError, match=r"unknown dtype 'f12'; known are f32, f16$"):
        weft.compile(decoder(), tmp_path / "out", dtype="f12")
    with pytest.raises(WeftError, match="max-length"):
        weft.compile(decoder(), tmp_path / "out", max_length=0)
    assert list(tmp_path.iterdir()) == []


def test_streamed_weights_are_aligned_and_equal_their_recipe(tmp_path: Path) -> None:
    graph = Graph("big")
    x = graph.add_input("x", TensorType(dtypes.f32, (1, 2048)))
    recipe = Normal((700, 2048), 0.02, "w")  # three blocks
    weight = graph.add_param("w", TensorType(dtypes.f32, (700, 2048)), recipe)
    graph.add_output("y", ops.linear(x, weight))
    steps: list[int] = []
    export.write_models({export.MODEL: export.build_model(graph, TARGETS["ort-cpu"], 8)}, tmp_path, steps.append)
    assert len(steps) == 3
    assert sum(steps) == (tmp_path / "model.onnx.data").stat().st_size == 700 * 2048 * 4
    stored = np.fromfile(tmp_path / "model.onnx.data", np.float32).reshape(700, 2048)
    np.testing.assert_array_equal(stored, recipe.evaluate(graph.reader))
    weft.compile(decoder(dim=256), tmp_path / "aligned")
    for tensor in onnx.load(tmp_path / "aligned" / "model.onnx", load_external_data=False).graph.initializer:
        facts = {e.key: e.value for e in tensor.external_data}
        if facts:
            align = export.PAGE if int(facts["length"]) >= 16 * export.PAGE else 64
            assert int(facts["offset"]) % align == 0


@pytest.mark.parametrize(("target", "writes"), [("ort-cpu", 3 * 3), ("onnx", 11 + 1 + 2)])
def test_quantized_weights_equal_their_recipes(
    target: str, writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ort-cpu in blocks of all parts; for onnx transposed, as 4-bit integers in blocks of an odd number."""
    monkeypatch.setattr(recipe_module, "SWEEP_ELEMENTS", 99 * 2001)
    graph = Graph("big")
    x = graph.add_input("x", TensorType(dtypes.f32, (1, 999)))
    recipe = Quantize(Normal((2001, 999), 0.02, "w"), 4, 32)  # rows end within a group
    weight = graph.add_param("w", TensorType(dtypes.f32, (2001, 999)), recipe)
    graph.add_output("y", ops.linear(x, weight))
    built = export.build_model(graph, TARGETS.lookup(target), 8)
    steps: list[int] = []
    export.write_models({export.MODEL: built}, tmp_path, steps.append)
    assert len(steps) == writes and sum(steps) == export.count_weight_bytes([built])
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    for name, tensor in export.list_stored_tensors([built]).items():
        whole = tensor.recipe.evaluate(graph.reader)
        np.testing.assert_array_equal(stored[name].astype(whole.dtype), whole, name)


def test_full_disk_is_reported_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    with pytest.raises(WeftError, match="disk is full"):
        weft.compile(decoder(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weft.compile(decoder(), tmp_path / "out")
    before = (tmp_path / "out" / "model.onnx").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "_read_weight", fail)
    with pytest.raises(WeftError, match="disk is full"):
        weft.compile(decoder(heads=2), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.onnx").read_bytes() == before


def test_bf16_encoder_returns_f32(tmp_path: Path) -> None:
    encoder = Encoder(vocab=96, dim=64, layers=1, block=Block(Attention(heads=4, causal=False), MLP(80)), context=32)
    weft.compile(encoder, tmp_path / "out", target="ort-cuda", dtype="bf16")
    (output,) = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
