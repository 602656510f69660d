"""Foresee, without a GPU, whether ONNX Runtime's CUDA provider runs all of a model and captures it as a CUDA graph.

The provider takes a node if it has a kernel for its types. It then gives back to the CPU what computes only on shapes,
and the runtime copies values between the two where they meet. CUDA graphs are refused to a model with such a copy, and
replay no CPU node: so values computed on the CPU may come from shapes only, and may go only where a kernel reads host
memory (`GetCpuPreferredNodes` of ONNX Runtime 1.31.1). tests/gpu asks ONNX Runtime itself.
"""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
from onnx_ir.passes.common.shape_inference import infer_shapes

from weft.backends.onnx.onnx_emitter import ONNX_DTYPES

# Types of the inputs of kernels, of which the last repeats; those read from host memory begin with @. Kernels are those
# of `get_all_opkernel_def` of onnxruntime-gpu 1.31.1, host inputs where sessions of that version insert copies.
_TABLE = """
F/I                  | Abs Add Div Mul Sign Sub
F/I @i64             | TopK
bool                 | And Not Or Xor
F F F F/bool F F i64 | Attention
A/f8e4m3             | Cast Identity Shape
A/f8e4m3 @i64        | Reshape
A                    | Concat Flatten Size Transpose
A @i64               | Expand Split Squeeze Trilu Unsqueeze
A @i32/i64           | Slice
A i32/i64            | Gather GatherElements
A i32/i64 A          | ScatterElements
A i64 A              | ScatterND
A A i64              | TensorScatter
f16/f32              | Ceil Einsum Elu Floor LeakyRelu Log LogSoftmax Reciprocal Round Selu
f16/f32 @i64         | ReduceLogSumExp ReduceSumSquare
f16/f32/i32 @i64     | ReduceL2 ReduceProd
f16/f32/I @i64       | ReduceMax ReduceMin
f16/f32/i64/i8/u8    | Clip
f16/f32/i32/i64      | Greater GreaterOrEqual Less LessOrEqual
f16/f32/i32/i64/bool | Equal
f16/f32/i32/i64 @i32/i64 | CumSum
f16/f32/bool @i64 @f16/f32/bool @i32/i64 | Pad
@i64                 | ConstantOfShape
@f32/i32/i64         | Range
i32/i64 @i32/i64 @f16/f32/i64 | OneHot
i8/u8/i4/u4/f8e4m3 f16/f32 i8/u8/i4/u4/f8e4m3 | DequantizeLinear
F                    | Conv Cos Erf Exp Gelu Gemm HardSigmoid HardSwish LayerNormalization MatMul RMSNormalization
F                    | Relu Sigmoid SimplifiedLayerNormalization Sin Softmax Softplus Sqrt Sum Tanh
F/f8e4m3             | IsInf IsNaN
F/bool/i64 i64       | GatherND
F/i32/i64            | Max Min Mod Pow
F/i32/i64/i8         | Neg
F/i32 @i64           | ReduceMean
F/i32/i64 @i64       | ReduceSum Tile
F F F i64            | RotaryEmbedding
bool F/i32/i64/u8    | Where
F                    | ms:BiasGelu ms:CausalConvWithState ms:FastGelu ms:FusedMatMul ms:GatedRMSNorm ms:Gelu
F                    | ms:LinearAttention ms:MoE ms:QuickGelu ms:SkipLayerNormalization
F                    | ms:SkipSimplifiedLayerNormalization
F f32 f32 F          | ms:LinearAttentionGate
F u8 F F/u8 i32 F    | ms:MatMulNBits
F F F F i32 F F F @i32 i32 | ms:MultiHeadAttention
F i64 F F            | ms:RotaryEmbedding
i4/u4/u8/f8e4m3 i32/i64 F i4/u4/u8/f8e4m3 | ms:GatherBlockQuantized
H H H H/i8/u8/f8e4m3 H/i8/u8/f8e4m3 i32 @i32 H H i64 H H f32 f32 H H | ms:GroupQueryAttention
H H Q S H Q S H Q S H Q Q Q H f32 f32 f32 f32 S S | ms:QMoE
"""
_SETS = {"F": "f16/bf16/f32", "H": "f16/bf16", "I": "i32/i64/i8/u8", "A": "f16/bf16/f32/i32/i64/bool/i8/u8"}
_SETS |= {"Q": "u8/f8e4m3", "S": "f16/bf16/f32/f8e4m3"}
_NEVER_ON_CPU = {"f16", "bf16", "f8e4m3", "f8e5m2"}  # types of an input that keep a node on the GPU
_SMALL = 100  # elements of an initializer that may follow a node to the CPU


def _types(text: str) -> frozenset[str]:
    return frozenset(t for name in text.removeprefix("@").split("/") for t in _SETS.get(name, name).split("/"))


KERNELS = {
    name.replace("ms:", "com.microsoft:"): [(kind[0] == "@", _types(kind)) for kind in inputs.split()]
    for inputs, names in (line.split("|") for line in _TABLE.strip().splitlines())
    for name in names.split()
}
_NAMES = {number: name for name, number in ONNX_DTYPES.items()}


def cuda_problems(model: ir.Model | onnx.ModelProto) -> list[str]:
    """List reasons why the CUDA provider would not run all of `model` on the GPU, or not capture it; a sentence each.

    Foreseen are nodes without a kernel for their types, control flow, copies between host and device, and values read
    by the CPU, which a replayed graph would not see change. Shape arithmetic into host inputs is no problem.
    """
    model = model.clone() if isinstance(model, ir.Model) else ir.serde.deserialize_model(model)
    graph = infer_shapes(model, check_type=False, strict_mode=False, data_prop=False).graph
    placement, problems = _Placement(graph), list[str]()
    for node in graph:
        name = f"{node.op_type} {node.name or node.outputs[0].name}"
        problems += [f"{name}: {problem}" for problem in placement.place(node)]
    return problems


class _Placement:
    """Places of values: `host`, computed on the CPU; `fixed`, initializers and values that are folded from them."""

    def __init__(self, graph: ir.Graph) -> None:
        self.inputs, self.fixed = set(graph.inputs), set(graph.initializers.values())
        self.host: set[ir.Value] = set()

    def place(self, node: ir.Node) -> list[str]:
        """Place `node`, whose inputs are placed; return its problems."""
        kernel = KERNELS.get(f"{node.domain}:{node.op_type}" if node.domain else node.op_type)
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            return ["control flow runs on the CPU"]
        if kernel is None:
            return ["the CUDA provider is not known to have this operator"]
        operands = [(*kernel[min(i, len(kernel) - 1)], v) for i, v in enumerate(node.inputs) if v is not None]
        lacking = sorted({_dtype(v) for _, types, v in operands if v.dtype is not None and _dtype(v) not in types})
        if lacking:
            return [f"there is no CUDA kernel for {', '.join(lacking)}"]
        if _is_static(node) or all(v in self.fixed for _, _, v in operands):
            self.fixed.update(node.outputs)  # constants are folded before nodes get a device
        elif node.op_type in ("Shape", "Size"):
            self.host.update(node.outputs)
        elif any(v in self.host for _, _, v in operands) and all(self._follows(v, host) for host, _, v in operands):
            self.host.update(node.outputs)
            stale = "it runs on the CPU, so a CUDA graph would not see input {} change"
            return [stale.format(v.name) for _, _, v in operands if v in self.inputs]
        else:
            return [problem for host, _, v in operands if v not in self.fixed and (problem := self._crossing(v, host))]
        return []

    def _follows(self, value: ir.Value, host: bool) -> bool:
        """Return whether a node that reads `value`, from `host` memory if it is on the GPU, may run on the CPU."""
        if _dtype(value) in _NEVER_ON_CPU:
            return False
        free = value in self.inputs or (value in self.fixed and _elements(value) <= _SMALL)
        return free or (value in self.host and not host)

    def _crossing(self, value: ir.Value, host: bool) -> str:
        """Return why a kernel on the GPU cannot read `value`, from `host` memory or not; "" if it can."""
        if host and value in self.inputs:
            return f"input {value.name} is read on the CPU, so a CUDA graph would not see it change"
        if host and value not in self.host:
            return f"{value.name} is computed on the GPU but needed on the CPU"
        if not host and value in self.host:
            return f"{value.name} is computed from shapes on the CPU but needed on the GPU"
        return ""


def _dtype(value: ir.Value) -> str:
    return "" if value.dtype is None else _NAMES.get(value.dtype, str(value.dtype))


def _is_static(node: ir.Node) -> bool:
    operand = node.inputs[0] if node.op_type == "Shape" else None
    return operand is not None and operand.shape is not None and operand.shape.is_static()


def _elements(value: ir.Value) -> int:
    """Return the number of elements of an initializer; one folded from others is assumed to be small."""
    return 1 if value.shape is None else math.prod(size if isinstance(size, int) else 1 for size in value.shape)
