"""Lowerings of basic tensor ops that ONNX has under another name or expresses in a few nodes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node
from weft.ir.op import Op
from weft.ir.types import dtypes

from ..lowering import lowering
from ..onnx_emitter import OnnxEmitter, get_storage_type
from .dequantized import pack_codes, unpack_codes

Out = onnx.Value

DIRECT = {  # operators of the same operands
    **{name: name.capitalize() for name in ("add", "sub", "mul", "div", "mod", "pow", "less", "equal", "where")},
    **{name: name.capitalize() for name in ("neg", "abs", "exp", "log", "sqrt", "reciprocal", "floor", "ceil")},
    **{name: name.capitalize() for name in ("round", "sin", "cos", "tanh", "erf", "sigmoid", "softplus", "relu")},
    **{"minimum": "Min", "maximum": "Max", "less_equal": "LessOrEqual", "matmul": "MatMul"},
    **{"logical_and": "And", "logical_or": "Or", "logical_not": "Not"},
}
_AXES = {  # operators that take their axes as an operand
    **{"squeeze": "Squeeze", "unsqueeze": "Unsqueeze"},
    **{name: f"Reduce{name.capitalize()}" for name in ("sum", "mean", "max", "min", "prod")},
}


def _emit_same(e: OnnxEmitter, node: Node, operator: str) -> Out:
    return e.op(operator, *(e[v] for v in node.inputs), axis=node.attrs.get("axis"))


def _emit_over_axes(e: OnnxEmitter, node: Node, operator: str) -> Out:
    keepdims = int(node.attrs["keepdims"]) if "keepdims" in node.attrs else None
    return e.op(operator, e[node.inputs[0]], e.constant(list(node.attrs["axes"])), keepdims=keepdims)


def _register(op: Op, operator: str, emit: Callable[[OnnxEmitter, Node, str], Out]) -> None:
    def lower(e: OnnxEmitter, node: Node) -> Out:
        return emit(e, node, operator)

    # Traces and refusals use the name of the function.
    lower.__name__ = operator
    lowering(op)(lower)


for _name, _onnx in {**DIRECT, "concat": "Concat", "gather": "Gather"}.items():
    _register(getattr(ops, _name), _onnx, _emit_same)
for _name, _onnx in _AXES.items():
    _register(getattr(ops, _name), _onnx, _emit_over_axes)


@lowering(ops.square)
def Mul(e: OnnxEmitter, node: Node) -> Out:
    x = e[node.inputs[0]]
    return e.op("Mul", x, x)


@lowering(ops.rsqrt)
def ReciprocalSqrt(e: OnnxEmitter, node: Node) -> Out:
    return e.op("Reciprocal", e.op("Sqrt", e[node.inputs[0]]))


@lowering(ops.floordiv)
def FloorDiv(e: OnnxEmitter, node: Node) -> Out:
    x, y = (e[v] for v in node.inputs)  # integer Div truncates towards zero
    return e.op("Div", e.op("Sub", x, e.op("Mod", x, y)), y)


@lowering(ops.affine)
def MulAdd(e: OnnxEmitter, node: Node) -> Out:
    x, dtype = e[node.inputs[0]], node.output.type.dtype
    by, plus = node.attrs["by"], node.attrs["plus"]
    if by == 0:  # a product with 0 is NaN where x is not finite
        return e.op("Expand", e.scalar(plus, dtype), e.op("Shape", x))
    if by == 1:
        return e.op("Add", x, e.scalar(plus, dtype))
    scaled = e.op("Mul", x, e.scalar(by, dtype))
    return scaled if plus == 0 else e.op("Add", scaled, e.scalar(plus, dtype))


@lowering(ops.clip)
def Clip(e: OnnxEmitter, node: Node) -> Out:
    x, bounds = e[node.inputs[0]], (node.attrs["low"], node.attrs["high"])
    low, high = (None if bound is None else e.scalar(bound, node.output.type.dtype) for bound in bounds)
    # ONNX Runtime takes the largest finite number for an absent bound, so Clip would change ∞.
    if low is None and high is not None:
        return e.op("Min", x, high)
    return e.op("Max", x, low) if high is None and low is not None else e.op("Clip", x, low, high)


@lowering(ops.cast)
def Cast(e: OnnxEmitter, node: Node) -> Out:
    x, to = node.required_operand("x"), node.attrs["to"]
    if x.type.dtype == dtypes.i4 != to:
        values = unpack_codes(e, e[x], x.type.rank)
        return values if to == dtypes.f32 else e.cast(values, to)
    if to == dtypes.i4 != x.type.dtype:
        return pack_codes(e, e.cast(e[x], dtypes.f32))
    return e.cast(e[x], to)


@lowering(ops.reshape)
def Reshape(e: OnnxEmitter, node: Node) -> Out:
    x = node.required_operand("x")
    return e.op("Reshape", e[x], e.shape(get_storage_type(node.output.type).shape, get_storage_type(x.type).shape))


@lowering(ops.expand)
def Expand(e: OnnxEmitter, node: Node) -> Out:
    return e.op("Expand", e[node.inputs[0]], e.shape(node.attrs["shape"]))


@lowering(ops.transpose)
def Transpose(e: OnnxEmitter, node: Node) -> Out:
    return e.op("Transpose", e[node.inputs[0]], perm=list(node.attrs["axes"]))


@lowering(ops.split)
def Split(e: OnnxEmitter, node: Node) -> list[Out]:
    pieces = list(node.attrs["sizes"])
    return e.many("Split", e[node.inputs[0]], e.constant(pieces), axis=node.attrs["axis"], outputs=len(pieces))


@lowering(ops.slice_)
def Slice(e: OnnxEmitter, node: Node) -> Out:
    a = node.attrs
    bounds = (e.constant([a[k]]) for k in ("start", "stop", "axis", "step"))
    return e.op("Slice", e[node.inputs[0]], *bounds)


@lowering(ops.embedding)
def Embedding(e: OnnxEmitter, node: Node) -> Out:
    ids, table = node.inputs
    return e.op("Gather", e[table], e[ids], axis=0)


@lowering(ops.conv1d)
def Conv(e: OnnxEmitter, node: Node) -> Out:
    x, weight, bias = node.required_operand("x"), node.required_operand("weight"), node.operand("bias")
    channels_first = e.op("Transpose", e[x], perm=[0, 2, 1])
    attrs = {"strides": [node.attrs["stride"]], "pads": list(node.attrs["padding"]), "group": node.attrs["groups"]}
    return e.op("Transpose", e.op("Conv", channels_first, e[weight], e[bias], **attrs), perm=[0, 2, 1])


@lowering(ops.gather_rows)
def GatherND(e: OnnxEmitter, node: Node) -> Out:
    x, indices = (e[v] for v in node.inputs)
    return e.op("GatherND", x, e.op("Unsqueeze", indices, e.constant([-1])), batch_dims=1)


@lowering(ops.scatter_rows)
def ScatterElements(e: OnnxEmitter, node: Node) -> Out:
    x, rows, indices = (node.required_operand(n) for n in ("x", "rows", "indices"))
    axis = node.attrs["axis"]
    other_axes = [a for a in range(1, rows.type.rank) if a != axis]
    positions = e.op("Expand", e.op("Unsqueeze", e[indices], e.constant(other_axes)), e.op("Shape", e[rows]))
    return e.op("ScatterElements", e[x], positions, e[rows], axis=axis)


@lowering(ops.iota)
def Range(e: OnnxEmitter, node: Node) -> Out:
    x = node.required_operand("x")
    axis = node.attrs["axis"] % x.type.rank
    return e.memo(("iota", x, axis), lambda: e.range(e.op("Shape", e[x], start=axis, end=axis + 1)))


@lowering(ops.one_hot)
def OneHot(e: OnnxEmitter, node: Node) -> Out:
    depth, dtype = e.constant(node.attrs["depth"]), node.output.type.dtype
    return e.op("OneHot", e[node.inputs[0]], depth, e.constant([0, 1], dtype.numpy), axis=-1)


@lowering(ops.pad)
def Pad(e: OnnxEmitter, node: Node) -> Out:
    a = node.attrs
    type, amounts = node.output.type, (a["before"], a["after"])
    return e.pad(e[node.required_operand("x")], amounts, a["axis"] % type.rank, type.rank, type.dtype, a["value"])


@lowering(ops.softmax)
def Softmax(e: OnnxEmitter, node: Node) -> Out:
    x, axis = e[node.inputs[0]], node.attrs["axis"]
    dtype = node.output.type.dtype
    # For a row with only −∞, ONNX returns NaN, but weft defines zeros.
    largest = e.op("ReduceMax", x, e.constant([axis]), keepdims=1)
    # Not IsInf: MNN lacks it, and OpenVINO and tract take the largest of only −∞ for the smallest finite number. Not
    # Less: MNN's is wrong where it broadcasts.
    dead = e.op("Greater", e.scalar(-3e4 if dtype == dtypes.f16 else -1e30, dtype), largest)
    return e.op("Where", dead, e.scalar(0, dtype), e.op("Softmax", x, axis=axis))


@lowering(ops.cumsum)
def CumSum(e: OnnxEmitter, node: Node) -> Out:
    axis = e.constant(node.attrs["axis"])
    return e.op("CumSum", e[node.inputs[0]], axis, exclusive=int(node.attrs["exclusive"]))


@lowering(ops.top_k)
def TopK(e: OnnxEmitter, node: Node) -> list[Out]:
    return e.many("TopK", e[node.inputs[0]], e.constant([node.attrs["k"]]), axis=-1, outputs=2)
