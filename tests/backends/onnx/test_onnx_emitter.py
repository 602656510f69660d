"""Emission of ONNX graphs: symbolic sizes, names of outputs, and operators that an opset lacks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from weft.backends.onnx import export
from weft.backends.onnx.lowering import list_refusals
from weft.backends.runtime.ort.session import FROM_END, declare_literal
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Full, Literal
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, legalize
from weft.passes.core.equivalence import EquivalenceCheck

from ...passes.zoo import ZOO


def test_symbolic_sizes_are_computed_where_reshape_cannot_copy_them() -> None:
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    graph = Graph("shapes")
    x = graph.add_input("x", TensorType(dtypes.f32, (batch, seq, 4)))
    graph.add_output("joined", ops.reshape(x, shape=(2 * batch, seq, 2)))
    graph.add_output("wide", ops.expand(ops.reshape(x, shape=(1, batch * seq * 4)), shape=(seq + 1, 4 * batch * seq)))
    model = export.serialize_model(export.build_model(graph, TARGETS["onnx"], 8))
    feed = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    joined, wide = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": feed})
    np.testing.assert_array_equal(joined, feed.reshape(4, 3, 2))
    np.testing.assert_array_equal(wide, np.broadcast_to(feed.reshape(1, -1), (4, 24)))


def test_inputs_and_parameters_may_be_outputs() -> None:
    graph = Graph("through")
    x = graph.add_input("x", TensorType(dtypes.f32, (3,)))
    graph.add_output("same", x)
    graph.add_output("again", x)
    graph.add_output("fixed", graph.add_param("p", TensorType(dtypes.f32, (2,)), Full(1.5, (2,))))
    graph.add_output("doubled", ops.add(x, x, name="doubled"))
    model = export.serialize_model(export.build_model(graph, TARGETS["onnx"], 8))
    got = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": np.ones(3, np.float32)})
    assert [a.tolist() for a in got] == [[1, 1, 1], [1, 1, 1], [1.5, 1.5], [2, 2, 2]]


@pytest.mark.parametrize("opset", [17, 19, 21, 23])
@pytest.mark.parametrize("name", ["family/llama-gqa-tied", "family/gemma2", "family/bert", "cached/family mistral-gqa"])
def test_operators_that_an_older_opset_lacks_are_expanded(name: str, opset: int) -> None:
    graph = ZOO[name]()
    old = replace(TARGETS["onnx"], name="older", opset=opset, ir_version=10)
    legalize(graph, partial(list_refusals, target=old), Trace())
    model = onnx.load_from_string(export.serialize_model(export.build_model(graph, old, 16)))
    onnx.checker.check_model(model, full_check=True)
    assert [opset - 3 <= o.version <= opset for o in model.opset_import] == [True]
    feeds = EquivalenceCheck().make_inputs(graph)
    want = interpret(graph, feeds)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    kinds = {i.name: i.type for i in session.get_inputs()}
    given = {n: a.astype(np.float32 if "float" in kinds[n] else np.int64) for n, a in feeds.items()}
    for output, value in zip(session.get_outputs(), session.run(None, given), strict=True):
        np.testing.assert_allclose(value, want[output.name], rtol=1e-3, atol=1e-4 * np.abs(want[output.name]).max())


def test_dtype_missing_from_the_opset_raises() -> None:
    graph = Graph("sine")
    graph.add_output("y", ops.sin(graph.add_input("x", TensorType(dtypes.bf16, (2, 3)))))
    with pytest.raises(WeftError, match="bf16 needs opset 22, but the model is for opset 21"):
        export.build_model(graph, replace(TARGETS["onnx"], opset=21), 8)


def test_model_states_the_oldest_opset_with_its_operators() -> None:
    graph = Graph("gelu")
    y = ops.gelu(graph.add_input("x", TensorType(dtypes.f32, (2, 3))), approximate="none")
    graph.add_output("y", y)
    versions = {}
    for opset in (24, 19):
        model = export.build_model(graph, replace(TARGETS["onnx"], opset=opset), 8).model
        versions[opset] = model.graph.opset_imports[""], {node.op_type for node in model.graph} >= {"Gelu"}
    assert versions == {24: (20, True), 19: (17, False)}


@pytest.mark.parametrize(
    ("target", "shape", "optional"),
    [
        ("ort-cpu", (1, 1, 4), True),  # axis 1 is copied
        ("ort-cpu", (4, 1), False),  # one token is a constant of the shape
        ("onnx", (1, 1, 4), False),
    ],
)
def test_replaceable_literals_may_be_declared_as_inputs_of_any_length(
    target: str, shape: tuple[int, ...], optional: bool
) -> None:
    graph = Graph("rows")
    x = graph.add_input("x", TensorType(dtypes.f32, (1, 3, 4)))
    at = graph.add_param(FROM_END, TensorType(dtypes.i64, (1, 1)), Literal((2,), (1, 1), replaceable=True))
    graph.add_output("y", ops.gelu(ops.reshape(ops.gather_rows(x, at), shape=shape)))
    model = export.serialize_model(export.build_model(graph, TARGETS[target], 8))
    declared = declare_literal(model)
    assert (declared is not None) == optional
    session = ort.InferenceSession(declared or model, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_overridable_initializers()] == [FROM_END] * optional
    feed, rows = {"x": np.arange(12, dtype=np.float32).reshape(1, 3, 4)}, np.array([[1, 0]])
    whole = session.run(None, {"x": feed["x"]})[0]
    np.testing.assert_allclose(whole.reshape(4), feed["x"][0, 2], rtol=1e-6)  # gelu of large numbers
    if optional:
        np.testing.assert_allclose(session.run(None, {**feed, FROM_END: rows})[0][0, 0], feed["x"][0, 1], rtol=1e-3)


def test_scalar_gets_axes() -> None:
    graph = Graph("scalar")
    x = graph.add_input("x", TensorType(dtypes.f32, ()))
    graph.add_output("y", ops.reshape(x, shape=(1, 1)))
    session = ort.InferenceSession(export.serialize_model(export.build_model(graph, TARGETS["ort-cpu"], 8)))
    assert session.run(None, {"x": np.array(3, np.float32)})[0].tolist() == [[3]]
