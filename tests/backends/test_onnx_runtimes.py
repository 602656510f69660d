"""The records of runtimes: what they restrict, and what a folder for each uses."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import weft
from weft.backends.onnx_runtimes import BLOCKS, RUNTIMES
from weft.backends.target import TARGETS
from weft.ir import WeftError
from weft.passes import run_passes

from ..engines.runtime_matrix import PAGE, list_records

GPT = weft.Decoder(40, 32, 1, weft.Block(weft.Attention(4), weft.MLP(48, "gelu"), weft.LayerNorm()))
MAMBA = weft.Decoder(40, 32, 1, weft.Block(weft.Mamba(64), None))


def list_operators(folder: Path) -> tuple[int, set[str]]:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    return model.opset_import[0].version, {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("name", RUNTIMES)
def test_folder_has_only_what_the_runtime_has(name: str, tmp_path: Path) -> None:
    runtime = RUNTIMES[name]
    weft.compile(GPT, tmp_path, target="onnx", runtime=name, weights="int8{method=rtn}", max_length=16)
    opset, operators = list_operators(tmp_path)
    assert opset <= runtime.opset and not operators & {*runtime.lacks, "TensorScatter"}
    assert ("DequantizeLinear" in operators) == (BLOCKS not in runtime.lacks and runtime.opset >= 21)


def test_missing_operator_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"target onnx for mnn has no Scan, which layers\.0\.attn\.Scan needs"):
        weft.compile(MAMBA, tmp_path / "out", target="onnx", runtime="mnn", max_length=16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "tract", "opset": 20}, "--opset 20 is unknown: tract has 17 to 19"),
        ({"opset": 25}, "--opset 25 is unknown: onnx has 17 to 24"),
        ({"runtime": "mnn", "dtype": "f16"}, "target onnx for mnn does not support f16; it supports f32"),
        ({"opset": 21, "dtype": "bf16"}, "bf16 needs opset 22, but the model is for opset 21"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=message):
        weft.compile(GPT, tmp_path / "out", target="onnx", max_length=16, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "opset"), [("opset17", 17), ("tract", 19), ("openvino-opset20", 20)])
def test_legalize_takes_the_restrictions_as_a_form(form: str, opset: int) -> None:
    graph = run_passes(GPT.graph(), f"kv-cache, concat-caches, legalize{{target=onnx, form={form}}}")
    assert {node.op.name for node in graph.nodes}.isdisjoint({"attention"}) == (opset < 23)
    with pytest.raises(WeftError, match="has only one form of a graph, not 'opset'"):
        TARGETS["onnx"].takes(graph, "opset")


def test_option_has_the_names_of_the_records() -> None:
    assert TARGETS["onnx"].options.list_all()["runtime"].choices == tuple(RUNTIMES)


def test_page_lists_the_records() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "\n".join(list_records()) in text
