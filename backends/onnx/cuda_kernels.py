"""The kernels of ONNX Runtime's CUDA provider that weft's lowerings meet, as a table.

Taken from the kernel registry of onnxruntime-gpu 1.31.1 (`get_all_opkernel_def`) for opset 24. Inputs marked ``@`` are
read from host memory; they were found by opening sessions of that version and looking where it inserts copies.
A line is ``operators | inputs -> outputs | variable: types``; the last input or output marked ``*`` repeats. Types that
no lowering makes (f64, 16-bit and wide unsigned integers) are left out, and so are kernels of control flow: graphs with
subgraphs cannot be captured at all.
"""

from __future__ import annotations

from dataclasses import dataclass

_STANDARD = """
Abs Sign | T -> T | T: F I
Add Div Mul Sub | T T -> T | T: F I
And Or Xor | bool bool -> bool |
Attention | T T V U T V i64 -> T T V T | T: F; V: F; U: F bool
Cast | S -> to | S: A f8e4m3; to: A f8e4m3
Ceil Elu Floor LeakyRelu Log LogSoftmax Reciprocal Round Selu | T -> T | T: f16 f32
Clip | T T T -> T | T: f16 f32 i64 i8 u8
Concat | T* -> T | T: A
ConstantOfShape | @i64 -> value | value: A
Conv Gemm | T T T -> T | T: F
Cos Erf Exp Gelu HardSigmoid HardSwish Relu Sigmoid Sin Softmax Softplus Sqrt Tanh | T -> T | T: F
CumSum | T @N -> T | T: f16 f32 i32 i64; N: i32 i64
DequantizeLinear | S T S -> T | S: i8 u8 f8e4m3 i4 u4; T: f16 f32
Einsum | T* -> T | T: f16 f32
Equal | T T -> bool | T: f16 f32 i32 i64 bool
Expand Squeeze Trilu Unsqueeze | T @i64 -> T | T: A
Flatten Transpose | T -> T | T: A
Gather GatherElements | T N -> T | T: A; N: i32 i64
GatherND | T i64 -> T | T: F i64 bool
Greater GreaterOrEqual Less LessOrEqual | T T -> bool | T: f16 f32 i32 i64
Identity | T -> T | T: A f8e4m3
IsInf IsNaN | T -> bool | T: F f8e4m3
LayerNormalization | T T T -> T f32 f32 | T: F
MatMul | T T -> T | T: F
Max Min | T* -> T | T: F i32 i64
Mod | T T -> T | T: F i32 i64
Neg | T -> T | T: F i32 i64 i8
Not | bool -> bool |
OneHot | N @N @T -> T | N: i32 i64; T: f16 f32 i64
Pad | T @i64 @T @N -> T | T: f16 f32 bool; N: i32 i64
Pow | T N -> T | T: F i32 i64; N: F i32 i64
RMSNormalization | T V -> V | T: F; V: F
Range | @T @T @T -> T | T: f32 i32 i64
ReduceMax ReduceMin | T @i64 -> T | T: f16 f32 I
ReduceMean | T @i64 -> T | T: F i32
ReduceProd ReduceL2 | T @i64 -> T | T: f16 f32 i32
ReduceSum | T @i64 -> T | T: F i32 i64
ReduceLogSumExp ReduceSumSquare | T @i64 -> T | T: f16 f32
Reshape | T @i64 -> T | T: A f8e4m3
RotaryEmbedding | T T T i64 -> T | T: F
ScatterElements | T N T -> T | T: A; N: i32 i64
ScatterND | T i64 T -> T | T: A
Shape | T -> i64 | T: A f8e4m3
SimplifiedLayerNormalization | T V -> V f32 | T: F; V: F
Size | T -> i64 | T: A
Slice | T @N @N @N @N -> T | T: A; N: i32 i64
Split | T @i64 -> T* | T: A
Sum | T* -> T | T: F
TensorScatter | T T i64 -> T | T: A
Tile | T @i64 -> T | T: F i32 i64
TopK | T @i64 -> T i64 | T: F I
Where | bool T T -> T | T: F i32 i64 u8
"""

_MICROSOFT = """
BiasGelu FastGelu FusedMatMul | T T -> T | T: F
CausalConvWithState | T T T T -> T T | T: F
GatedRMSNorm | T T T -> T | T: F
GatherBlockQuantized | Q N T Q -> T | Q: u8 f8e4m3 i4 u4; T: F; N: i32 i64
Gelu QuickGelu | T -> T | T: F
GroupQueryAttention | T T T C C i32 @i32 T T i64 T T f32 f32 T T -> T C C T | T: f16 bf16; C: f16 bf16 i8 u8 f8e4m3
LinearAttention | T T T S T T -> T S | T: F; S: F
LinearAttentionGate | T f32 f32 T -> T T | T: F
MatMulNBits | T u8 T Z i32 T -> T | T: F; Z: F u8
MoE | T* -> T | T: F
MultiHeadAttention | T T T T i32 T T T @i32 i32 -> T T T T | T: F
QMoE | T T Q S T Q S T Q S T Q Q Q T f32 f32 f32 f32 S S -> T | T: f16 bf16; Q: u8 f8e4m3; S: F f8e4m3
RotaryEmbedding | T i64 T T -> T | T: F
SkipLayerNormalization SkipSimplifiedLayerNormalization | T T T* -> T f32 f32 T | T: F
"""

_SETS = {"F": "f16 bf16 f32", "I": "i32 i64 i8 u8", "A": "f16 bf16 f32 i32 i64 bool i8 u8"}


@dataclass(frozen=True)
class Kernel:
    """Input and output types, each a type or a variable of `types`; `host` numbers the inputs read from host memory."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    host: frozenset[int]
    types: dict[str, frozenset[str]]

    def input(self, index: int) -> str:
        """The type or variable of input `index`."""
        return _at(self.inputs, index)

    def output(self, index: int) -> str:
        """The type or variable of output `index`."""
        return _at(self.outputs, index)

    def takes(self, variable: str, dtype: str) -> bool:
        """Return whether the kernel supports `dtype` for the type variable (or fixed type) `variable`."""
        return dtype in self.types.get(variable, {variable})


def _at(names: tuple[str, ...], index: int) -> str:
    return names[min(index, len(names) - 1)].rstrip("*")


def _parse(domain: str, text: str) -> dict[tuple[str, str], Kernel]:
    kernels: dict[tuple[str, str], Kernel] = {}
    for line in text.strip().splitlines():
        names, signature, constraints = line.split("|")
        ins, outs = (side.split() for side in signature.split("->"))
        types = {}
        for constraint in filter(str.strip, constraints.split(";")):
            variable, allowed = constraint.split(":")
            types[variable.strip()] = frozenset(t for name in allowed.split() for t in _SETS.get(name, name).split())
        host = frozenset(i for i, name in enumerate(ins) if name.startswith("@"))
        kernel = Kernel(tuple(name.lstrip("@") for name in ins), tuple(outs), host, types)
        kernels |= {(domain, name): kernel for name in names.split()}
    return kernels


KERNELS = _parse("", _STANDARD) | _parse("com.microsoft", _MICROSOFT)
