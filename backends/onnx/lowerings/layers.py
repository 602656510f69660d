"""Lowerings of linear layers, norms, activations and RoPE."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes import Permute
from weft.ir.recipes.frequencies import RopeTable
from weft.ir.types.dtypes import DType
from weft.passes.analysis.feed_forward import find_activation_name

from ...target import Backend
from ..lowering import contrib, lowering
from ..onnx_emitter import OnnxEmitter

MS = "com.microsoft"
Out = onnx.Value


def multiply_weight(e: OnnxEmitter, x: Out | None, weight: Value) -> Out:
    """Emit x Wᵀ for W = `weight` [out, in], a parameter or a computed value."""
    if e.target.contrib and not e.target.decodes:  # WebGPU has no FusedMatMul
        # FusedMatMul reads the checkpoint's layout: no transposed copy, and a tied embedding stays one initializer.
        return e.op("FusedMatMul", x, e[weight], domain=MS, transB=1)
    if isinstance(weight, Param) and len(weight.uses) == 1:
        transposed = e.weight(weight.name + ".T", Permute(weight.recipe, (1, 0)), weight.type.dtype)
    else:
        # A second, transposed copy of a shared weight (a tied embedding) would double it on disk.
        transposed = e.memo(("transposed", weight), lambda: e.op("Transpose", e[weight], perm=[1, 0]))
    return e.op("MatMul", x, transposed)


@lowering(ops.linear)
def MatMul(e: OnnxEmitter, node: Node) -> Out:
    return add_bias(e, multiply_weight(e, e[node.inputs[0]], node.required_operand("weight")), node)


def add_bias(e: OnnxEmitter, y: Out, node: Node) -> Out:
    """Return y plus the bias of `node`; y itself if it has none."""
    bias = node.operand("bias")
    return y if bias is None else e.op("Add", y, e[bias])


def _emit_vector(e: OnnxEmitter, node: Node, name: str, fill: float) -> Out:
    """Return the operand `name` of a norm, or a constant `fill`, because ONNX operators require it."""
    x, vector = node.required_operand("x"), node.operand(name)
    return e.constant(np.full(x.width, fill), x.type.dtype.numpy) if vector is None else e[vector]


def _choose_rms_operator(e: OnnxEmitter) -> str:
    # On CUDA, ONNX Runtime fuses per-head norms into attention only if they use its own operator.
    return "SimplifiedLayerNormalization" if e.target.contrib else "RMSNormalization"


@lowering(ops.rms_norm, opset=23)
def RMSNorm(e: OnnxEmitter, node: Node) -> Out:
    scale = _emit_vector(e, node, "weight", 1.0)
    return e.op(_choose_rms_operator(e), e[node.inputs[0]], scale, axis=-1, epsilon=node.attrs["eps"])


@lowering(ops.layer_norm)
def LayerNormalization(e: OnnxEmitter, node: Node) -> Out:
    scale, bias = _emit_vector(e, node, "weight", 1.0), e[node.operand("bias")]
    return e.op("LayerNormalization", e[node.inputs[0]], scale, bias, axis=-1, epsilon=node.attrs["eps"])


def find_norm_refusal(node: Node, target: Backend) -> str | None:
    """Return None, or a reason (str) if the norm_linear `node` also applies an activation, which needs another node."""
    activation = node.attrs["activation"]
    return None if activation == "identity" else f"it ends in {activation}"


def find_norm_opset(node: Node) -> int:
    """Return the opset that the norm of the norm_linear `node` needs: 23 for an RMS norm, else 0."""
    return 23 if node.attrs["kind"] == "rms" else 0


def make_norm_key(node: Node) -> object:
    """Return a hashable key that is equal for norm_linear nodes with the same normed input."""
    x, kind = node.required_operand("x"), node.attrs["kind"]
    return x if kind == "none" else (x, node.operand("norm_weight"), node.operand("norm_bias"), kind, node.attrs["eps"])


@lowering(ops.norm_linear, when=find_norm_refusal, opset=find_norm_opset)
def NormMatMul(e: OnnxEmitter, node: Node) -> Out:
    return add_bias(e, multiply_weight(e, apply_norm(e, node), node.required_operand("weight")), node)


def apply_norm(e: OnnxEmitter, node: Node) -> Out:
    """Return the normed x of the norm_linear `node` (x itself if its kind is "none"), emitted once for all nodes with
    the same norm of the same x."""
    x, kind, bias = e[node.required_operand("x")], node.attrs["kind"], node.operand("norm_bias")
    if kind == "none":
        return x

    def emit_norm() -> Out:
        operands = [x, _emit_vector(e, node, "norm_weight", 1.0), *([e[bias]] if bias else [])]
        name = "LayerNormalization" if kind == "layer" else _choose_rms_operator(e)
        return e.op(name, *operands, axis=-1, epsilon=node.attrs["eps"])

    return e.memo(("normed", make_norm_key(node)), emit_norm)


# ONNX Runtime itself fuses an addition with a LayerNorm, but never with an RMS norm.
@lowering(ops.add_norm, targets=contrib)
def SkipNormalization(e: OnnxEmitter, node: Node) -> list[Out | None]:
    x, y = e[node.inputs[0]], e[node.inputs[1]]
    scale, total = _emit_vector(e, node, "weight", 1.0), node.outputs[1]
    wants_sum = bool(total.uses) or total.is_output
    name, operands = "SkipSimplifiedLayerNormalization", [x, y, scale]
    if node.attrs["kind"] == "layer":
        name, operands = "SkipLayerNormalization", [*operands, _emit_vector(e, node, "bias", 0.0)]
    eps = node.attrs["eps"]  # always set: the default of these operators is 1e-12
    results = e.many(name, *operands, domain=MS, epsilon=eps, outputs=[True, False, False, wants_sum])
    return [results[0], results[3]]


def _find_gelu_refusal(node: Node, target: Backend) -> str | None:
    return "ONNX has no gelu by a sigmoid" if node.attrs["approximate"] == "sigmoid" and not target.contrib else None


@lowering(ops.gelu, when=_find_gelu_refusal)
def Gelu(e: OnnxEmitter, node: Node) -> Out:
    return emit_activation(e, e[node.required_operand("x")], find_activation_name(node) or "", node.output.type.dtype)


@lowering(ops.swish)
def Swish(e: OnnxEmitter, node: Node) -> Out:
    return emit_activation(e, e[node.required_operand("x")], find_activation_name(node) or "", node.output.type.dtype)


_STANDARD = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "elu": "Elu"}
BODIES = ("elu", "relu2")  # activations that are expanded into their bodies, except in experts


def emit_activation(e: OnnxEmitter, x: Out, name: str, dtype: DType) -> Out:
    """Emit act(x) for the activation called `name` (a key of `ACTIVATIONS`, or "swish(β)"), x in `dtype`."""
    if name in ("gelu", "gelu_tanh"):
        if e.target.opset >= 20:
            return e.op("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")
        return _emit_old_gelu(e, x, name, dtype)
    beta = find_swish_slope(name)
    if name == "identity":
        return x
    if name == "relu2":
        rising = e.op("Relu", x)
        return e.op("Mul", rising, rising)
    if beta is None:
        return e.op(_STANDARD[name], x)
    if e.target.contrib:
        return e.op("QuickGelu", x, domain=MS, alpha=beta)
    inner = x if beta == 1 else e.op("Mul", x, e.scalar(beta, dtype))
    return e.op("Mul", x, e.op("Sigmoid", inner))


def _emit_old_gelu(e: OnnxEmitter, x: Out, name: str, dtype: DType) -> Out:
    """Emit gelu(x) = x · (1 + erf(x / √2)) / 2, or its approximation by tanh, in operators of opset 17."""
    if name == "gelu":
        bent = e.op("Erf", e.op("Mul", x, e.scalar(math.sqrt(0.5), dtype)))
    else:
        cubic = e.op("Mul", e.op("Mul", e.op("Mul", x, x), x), e.scalar(0.044715, dtype))
        bent = e.op("Tanh", e.op("Mul", e.op("Add", x, cubic), e.scalar(math.sqrt(2 / math.pi), dtype)))
    return e.op("Mul", e.op("Mul", x, e.scalar(0.5, dtype)), e.op("Add", bent, e.scalar(1, dtype)))


def find_swish_slope(name: str) -> float | None:
    """Return β of the activation called `name` if it is x·σ(βx); None for other activations."""
    if name.startswith("swish("):
        return float(name[6:-1])
    return {"silu": 1.0, "gelu_quick": 1.702}.get(name)


def _find_glu_refusal(node: Node, target: Backend) -> str | None:
    if node.attrs["limit"] is not None:
        return "it has a limit, which ONNX has no operator for"
    name = node.attrs["activation"]
    lacks = name in BODIES or (name == "gelu_quick" and not target.contrib)
    return f"no ONNX operator for {name}" if lacks else None


@lowering(ops.glu, when=_find_glu_refusal)
def GatedUnit(e: OnnxEmitter, node: Node) -> Out:
    gate, up = e[node.required_operand("gate")], e[node.required_operand("up")]
    return e.op("Mul", emit_activation(e, gate, node.attrs["activation"], node.output.type.dtype), up)


def emit_rope_tables(e: OnnxEmitter, rope: Node, like: Value) -> list[Out]:
    """Return [cos, sin], the tables [max_length, pairs] of the RoPE node `rope`, in the dtype of `like`."""
    frequencies, amplitude = rope.required_operand("frequencies"), rope.attrs["amplitude"]
    assert isinstance(frequencies, Param)
    tables = {fn: RopeTable(frequencies.recipe, e.max_length, fn, amplitude) for fn in ("cos", "sin")}
    return [e.weight(f"rope.{fn}", table, like.type.dtype) for fn, table in tables.items()]


def _find_rope_refusal(node: Node, target: Backend) -> str | None:
    frequencies = node.inputs[2]
    return None if isinstance(frequencies, Param) else "the frequencies are computed at run time"


@lowering(ops.rope, when=_find_rope_refusal, opset=23)
def RotaryEmbedding(e: OnnxEmitter, node: Node) -> Out:
    x, heads = node.required_operand("x"), node.attrs["heads"]
    rotated = 2 * node.required_operand("frequencies").width
    return e.op(
        "RotaryEmbedding",
        e[x],
        *emit_rope_tables(e, node, x),
        e[node.required_operand("positions")],
        num_heads=heads,
        interleaved=int(node.attrs["interleaved"]),
        # 0 means the full head.
        rotary_embedding_dim=rotated if rotated < x.width // heads else 0,
    )
