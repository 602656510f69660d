"""Rewrites for ONNX Runtime's CUDA provider: f32 where it lacks a bf16 kernel.

Other nodes without a CUDA kernel run on the CPU. ONNX Runtime reports them when it opens a model: it lists the
placement of the nodes, and refuses to capture a CUDA graph (`weft.backends.runtime.ort.session`).
"""

from __future__ import annotations

import onnx_ir as onnx
from onnx_ir.passes.common.shape_inference import infer_shapes

# Operators with CUDA kernels for f32 and none for bf16 (`get_all_opkernel_def` of onnxruntime-gpu 1.31.1).
NO_BF16 = {
    *("Ceil", "Clip", "CumSum", "DequantizeLinear", "Einsum", "Elu", "Equal", "Floor", "Greater", "GreaterOrEqual"),
    *("LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "OneHot", "Pad", "Range", "Reciprocal", "ReduceL2"),
    *("ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "Round", "Selu"),
}
_BF16, _F32 = onnx.DataType.BFLOAT16, onnx.DataType.FLOAT
_SUBGRAPHS = (onnx.AttributeType.GRAPH, onnx.AttributeType.GRAPHS)


def widen_bf16(model: onnx.Model) -> list[str]:
    """Insert casts into `model` in place, so that bf16 nodes without a CUDA kernel for bf16 compute in f32; return a
    message for each of them. ONNX Runtime cannot open a model with such a node: its CPU provider also lacks the
    kernel."""
    # On a copy, because inference adds shapes, which would be written into the file.
    inferred = infer_shapes(model.clone(), check_type=False, strict_mode=False, data_prop=False)
    bf16 = {v.name for n in inferred.graph for v in (*n.inputs, *n.outputs) if v is not None and v.dtype == _BF16}
    lines = []
    # A list, because the loop inserts casts into the graph.
    for node in [node for node in model.graph if node.domain == "" and node.op_type in NO_BF16]:
        inputs, outputs = (
            [i for i, value in enumerate(values) if value is not None and value.name in bf16]
            for values in (node.inputs, node.outputs)
        )
        if inputs:
            _compute_in_f32(model.graph, node, inputs, outputs)
            lines.append(f"{node.name}: {node.op_type} has no bf16 kernel: in f32")
    return lines


def list_uncapturable(model: onnx.Model) -> list[str]:
    """Return a message for each node of `model` with control flow: one such node prevents CUDA graph capture."""
    control = (node for node in model.graph if any(a.type in _SUBGRAPHS for a in node.attributes.values()))
    return [f"{node.op_type} {node.name}: control flow runs on the CPU" for node in control]


def _compute_in_f32(graph: onnx.Graph, node: onnx.Node, inputs: list[int], outputs: list[int]) -> None:
    """Insert casts around `node`, so that its inputs and outputs with these indices, which are bf16, become f32."""
    for i in inputs:
        cast = _new_cast(f"{node.name}.in{i}", node.inputs[i], _F32)
        node.replace_input_with(i, cast.outputs[0])
        graph.insert_before(node, cast)
    for i in outputs:
        value = node.outputs[i]
        cast = _new_cast(f"{node.name}.out{i}", value, _BF16)
        result = cast.outputs[0]
        value.replace_all_uses_with(result, replace_graph_outputs=True)
        # The call above also replaced the cast's input by its own result.
        cast.replace_input_with(0, value)
        # The name identifies a graph output, so it moves to the result of the cast.
        result.name, value.name = value.name, result.name
        value.type = onnx.TensorType(_F32)
        graph.insert_after(node, cast)


def _new_cast(name: str, value: onnx.Value | None, dtype: onnx.DataType) -> onnx.Node:
    assert value is not None
    out = onnx.Value(name=f"{name}.cast", shape=value.shape, type=onnx.TensorType(dtype))
    return onnx.Node("", "Cast", [value], {"to": onnx.AttrInt64("to", int(dtype))}, outputs=[out], name=name)
