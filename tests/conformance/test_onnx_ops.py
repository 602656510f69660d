"""Every case of every op on the ONNX targets of the CPU: ONNX Runtime against the float64 reference."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import OPS, Op, interpret
from weft.ir import ops as _all  # noqa: F401 - fills OPS
from weft.ir.op import Case
from weft.ir.testing import build_node_graph
from weft.ir.types import dtypes
from weft.passes import legalize

WEIGHTS = ("weight", "table", "frequencies")  # operands that models hold as weights


def cases() -> list[object]:
    found = []
    for op in OPS.values():
        for i, case in enumerate(op.cases):
            for target in ("onnx", "ort-cpu"):
                found.append(pytest.param(op, case, target, id=f"{op.name}-{i}-{target}"))
    return found


@pytest.mark.halved
@pytest.mark.parametrize(("op", "case", "target"), cases())
def test_case_equals_reference(op: Op, case: Case, target: str) -> None:
    graph, feeds = build_node_graph(op, case, weights=WEIGHTS)
    feeds = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in feeds.items()}
    want = interpret(graph, feeds)
    place = TARGETS[target]
    legalize(graph, lambda node: list_refusals(node, place))
    model = serialize_model(build_model(graph, place, max_length=1024))
    if target == "onnx":
        proto = onnx.load_from_string(model)
        onnx.checker.check_model(proto, full_check=True)
        assert {node.domain for node in proto.graph.node} <= {""}
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    used = {i.name for i in session.get_inputs()}
    got = session.run(None, {k: v for k, v in feeds.items() if k in used})
    for (name, reference), array in zip(want.items(), got, strict=True):
        assert array.shape == reference.shape, name
        assert str(dtypes.from_numpy(array)) == str(graph.outputs[name].type.dtype), name
        if reference.dtype.kind == "f":
            # Sums of up to a few dozen terms of size one, through at most a few roundings each.
            scale = max(1.0, float(np.abs(reference[np.isfinite(reference)]).max(initial=0)))
            np.testing.assert_allclose(array, reference, rtol=0, atol=64 * dtypes.f32.eps * scale)
        else:
            np.testing.assert_array_equal(array, reference)
