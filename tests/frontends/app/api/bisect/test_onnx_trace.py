"""Traces of ONNX models: every node as in the file, nodes that run again, ONNX Runtime's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import weft
from weft.frontends.app.api.bisect.onnx_trace import optimize, trace_onnx
from weft.ir import WeftError
from weft.ir.interpreter import interpret

IDS = [3, 1, 4, 1, 5, 9]


def save(path: Path, inputs: list[Any], outputs: list[Any], *nodes: Any) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), path)


def test_all_values_and_positions_are_those_of_the_source(tiny: Path, compiled_tiny: Path) -> None:
    trace = trace_onnx([compiled_tiny / "model.onnx"], IDS, [])
    graph = weft.load_source(tiny).graph
    want = interpret(graph, {"input_ids": np.array([IDS]), "position_ids": np.arange(6)[None]})["logits"]
    got = trace.values[trace.outputs["logits"]]
    assert got.shape == want.shape and trace.dtype == "f32"
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert {"layers.0.attn.q", "layers.2.ffn.down"} <= trace.values.keys()


def test_a_node_runs_again_with_other_attributes_and_operands(compiled_tiny: Path) -> None:
    trace = trace_onnx([compiled_tiny / "model.onnx"], IDS, [])
    attention = trace.makers["layers.1.attn.attention"]
    operands = [trace.load(name) for name in attention.reads]
    same = attention.run(operands, attention.attrs)[0]
    np.testing.assert_array_equal(same, trace.values["layers.1.attn.attention"])
    assert np.abs(attention.run(operands, {**attention.attrs, "scale": 5.0})[0] - same).max() > 1e-3
    operands[2] = 2 * operands[2]
    np.testing.assert_allclose(attention.run(operands, attention.attrs)[0], 2 * same, rtol=1e-6)


def test_second_model_reads_the_first_and_renames_equal_names(tmp_path: Path) -> None:
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "seq"])
    shared, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "seq"]) for name in ("shared", "out"))
    cast = helper.make_node("Cast", ["input_ids"], ["inner"], "/a/Cast", to=1)
    save(tmp_path / "first.onnx", [ids], [shared], cast, helper.make_node("Neg", ["inner"], ["shared"]))
    nodes = helper.make_node("Abs", ["shared"], ["inner"]), helper.make_node("Sqrt", ["inner"], ["out"])
    save(tmp_path / "second.onnx", [shared], [out], *nodes)
    trace = trace_onnx([tmp_path / "first.onnx", tmp_path / "second.onnx"], [4, 9], [])
    assert trace.values["out"].tolist() == [[2, 3]] and trace.values["inner"].tolist() == [[4, 9]]
    assert trace.makers["out"].reads == ("second.inner",) and trace.makers["second.inner"].reads == ("shared",)
    assert trace.labels == {"a": "inner"}


def test_scalars_are_compared_and_ids_have_the_declared_type(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("input_ids", TensorProto.INT32, [1, "seq"])
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "seq"])
    for name, value in (("a", 8.0), ("b", 1.0)):
        scale = helper.make_node("Constant", [], ["d"], value_float=value)
        root, cast = helper.make_node("Sqrt", ["d"], ["s"]), helper.make_node("Cast", ["input_ids"], ["x"], to=1)
        save(tmp_path / f"{name}.onnx", [x], [y], scale, root, cast, helper.make_node("Div", ["x", "s"], ["logits"]))
    found = weft.bisect(tmp_path / "a.onnx", tmp_path / "b.onnx", ids=IDS)
    assert found.differs and found.difference is not None and found.difference.cause is not None


def test_optimizer_writes_a_model_with_fused_nodes(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "seq"])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [1, "seq"])
    nodes = helper.make_node("Identity", ["input_ids"], ["a"]), helper.make_node("Neg", ["a"], ["y"])
    save(tmp_path / "model.onnx", [x], [y], *nodes)
    (tmp_path / "out").mkdir()
    files = optimize([tmp_path / "model.onnx"], tmp_path / "out")
    assert [o.op for o in trace_onnx([tmp_path / "model.onnx"], [1], []).operations] == ["Identity", "Neg"]
    assert [o.op for o in trace_onnx(files, [1], []).operations] == ["Neg"]
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    with pytest.raises(WeftError, match=r"broken\.onnx: ONNX Runtime cannot optimize it"):
        optimize([tmp_path / "broken.onnx"], tmp_path / "out")
