"""Lowerings of routers and experts: all experts of a layer in one operator, or in batched products over those in use.

ONNX Runtime's MoE computes the chosen experts one after the other. Elsewhere tokens are grouped by expert, padded to
the number of tokens of the busiest one, and multiplied in one batched product. In both cases the number of nodes does
not grow with the number of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes import Concat, Full, Permute, Recipe, Reshape
from weft.ir.types import dtypes, sizes
from weft.ir.types.dtypes import DType

from ...target import Backend
from ..lowering import contrib, lowering, on_cpu
from ..onnx_emitter import OnnxEmitter
from .layers import MS, emit_activation, find_swish_slope

Out = onnx.Value
ROUNDING = 1e-4  # rounding error of a capacity: a capacity this little above an integer is that integer
NEVER = -1e4  # the logarithm of a zero weight: its exponential is zero in every dtype
SPARSE = 4  # from this many experts per active one on, gathering the weights of those in use beats running all

# -- routers


@lowering(ops.route)
def TopKRouter(e: OnnxEmitter, node: Node) -> Out:
    logits, a, dtype = node.operand("logits"), node.attrs, node.output.type.dtype
    scores = e.op("Sigmoid", e[logits]) if a["scoring"] == "sigmoid" else e.op("Softmax", e[logits], axis=-1)
    bias = node.operand("bias")
    ranked = scores if bias is None else e.op("Add", scores, e[bias])
    if a["groups"] > 1:
        ranked = _mask_groups(e, node, ranked)
    weights, experts = e.many("TopK", ranked, e.constant([a["k"]]), axis=-1, outputs=2)
    # The bias affects the choice of experts, not their weights (DeepSeek-V3).
    if bias is not None:
        weights = e.op("GatherElements", scores, experts, axis=-1)
    if a["renormalize"]:
        weights = e.op("Div", weights, e.op("ReduceSum", weights, e.constant([-1]), keepdims=1))
    if a["scale"] != 1:
        weights = e.op("Mul", weights, e.scalar(a["scale"], dtype))
    return _scatter(e, weights, experts, scores, dtype, axis=-1)


def _mask_groups(e: OnnxEmitter, node: Node, ranked: Out) -> Out:
    """Return `ranked` [..., experts] with −∞ for experts outside of the best groups of the router `node`."""
    a, shape, dtype = node.attrs, node.output.shape, node.output.type.dtype
    pads, last = [0] * (len(shape) - 1), e.constant([-1])
    members = e.op("Reshape", ranked, e.constant([*pads, a["groups"], -1]))
    best = e.many("TopK", members, e.constant([1 if a["group_score"] == "max" else 2]), axis=-1, outputs=2)[0]
    scores = e.op("ReduceSum", best, last, keepdims=0)
    opened, groups = e.many("TopK", scores, e.constant([a["top_groups"]]), axis=-1, outputs=2)
    nothing = e.scalar(0, dtype)
    closed = e.op("Add", e.op("Mul", scores, nothing), e.scalar(-math.inf, dtype))
    barrier = e.op("ScatterElements", closed, groups, e.op("Mul", opened, nothing), axis=-1)
    limited = e.op("Add", members, e.op("Unsqueeze", barrier, last))
    return e.op("Reshape", limited, e.constant([*pads, -1]))


def _scatter(e: OnnxEmitter, values: Out, indices: Out, like: Out, dtype: DType, axis: int) -> Out:
    """Return a tensor of the shape of `like` with `values` at `indices` along `axis`, and 0 elsewhere."""
    return e.op("ScatterElements", e.op("Mul", like, e.scalar(0, dtype)), indices, values, axis=axis)


@lowering(ops.expert_choice)
def TopKTokens(e: OnnxEmitter, node: Node) -> Out:
    logits, a, dtype = node.required_operand("logits"), node.attrs, node.output.type.dtype
    x, tokens = e[logits], e.size(logits.shape[-2])
    if a["batched"]:
        x, tokens = e.op("Reshape", x, e.constant([-1, logits.width])), e.size(sizes.multiply_sizes(logits.shape[:-1]))
    if a["capacity"] is None:
        share = e.op("Mul", e.cast(tokens, dtypes.f32), e.constant(a["factor"] / logits.width, np.float32))
        capacity = e.cast(e.op("Ceil", e.op("Sub", share, e.constant(ROUNDING, np.float32))), dtypes.i64)
    else:
        capacity = e.constant([a["capacity"]])
    scores = e.op("Softmax", x, axis=-1)
    best, tokens_of_expert = e.many("TopK", scores, e.op("Min", capacity, tokens), axis=-2, outputs=2)
    combine = _scatter(e, best, tokens_of_expert, scores, dtype, axis=-2)
    return reshape_like(e, combine, logits) if a["batched"] else combine


# -- experts in ONNX Runtime's own operator

_KERNEL = {"relu": "relu", "gelu_tanh": "gelu", "silu": "silu", "identity": "identity"}

# Fixed by onnxruntime's pull request 32659 of September 2026, which is not known to be in a release.
BF16_ROUTER_BUG = "the CUDA kernel for experts in ONNX Runtime reads bf16 logits of a router as f32"


def has_bf16_router_bug(node: Node, target: Backend) -> bool:
    """Return whether `node` is a mixture whose logits ONNX Runtime's kernel would misread: on CUDA in bf16."""
    return node.op is ops.moe and target.device == "cuda" and node.output.type.dtype == dtypes.bf16


def _find_kernel_refusal(node: Node, target: Backend) -> str | None:
    return BF16_ROUTER_BUG if has_bf16_router_bug(node, target) else find_activation_refusal(node)


def find_activation_refusal(node: Node) -> str | None:
    """Return None if ONNX Runtime's MoE and QMoE can compute the activation of `node`, else the reason (str) why not.
    With a gate they interleave the rows of gate and up, so these and their biases must be parameters."""
    name, gate, up = node.attrs["activation"], node.operand("gate"), node.operand("up")
    if gate is None:
        return None if name in _KERNEL else f"the kernel has no {name}"
    if find_swish_slope(name) is None:
        return f"the kernel has no gate by {name}"
    packed = (up, gate, node.operand("up_bias"), node.operand("gate_bias"))
    return None if all(v is None or isinstance(v, Param) for v in packed) else "gate and up are computed at run time"


def _find_absorbable_router(node: Node) -> Node | None:
    """Return the router of the mixture `node` if the kernel MoE can absorb it (softmax and top-k, without bias and
    groups), else None. Of experts with equal scores the kernel prefers the last, the operator TopK the first."""
    producer = node.required_operand("combine").producer
    if producer is None or producer.op is not ops.route or producer.operand("bias") is not None:
        return None
    return producer if producer.attrs["scoring"] == "softmax" and producer.attrs["groups"] == 1 else None


def _list_kernel_reads(node: Node, target: Backend) -> Iterable[Value]:
    router = _find_absorbable_router(node)
    absorbed = None if router is None else node.operand("combine")
    logits = [] if router is None else [router.operand("logits")]
    return (v for v in [*logits, *node.inputs] if v is not None and v is not absorbed)


def reshape_like(e: OnnxEmitter, y: Out, x: Value) -> Out:
    """Return `y` reshaped to the shape of the IR value `x`."""
    return e.op("Reshape", y, e.memo(("shape", x), lambda: e.op("Shape", e[x])))


def interleave_rows(e: OnnxEmitter, gate: Value | None, up: Value | None, like: Value, name: str) -> Out | None:
    """Return an initializer called "{like}.{name}" with the rows gate 0, up 0, gate 1, … of each expert. If gate or up
    is None, its rows are 0; if both are, return None."""
    weights = up if gate is None else gate
    if weights is None:
        return None
    experts, hidden, *rest = weights.shape

    def rows(v: Value | None) -> Recipe:
        split = (experts, hidden, 1, *rest)
        return Reshape(v.recipe, split) if isinstance(v, Param) else Full(0.0, split)

    recipe = Reshape(Concat((rows(gate), rows(up)), 2), (experts, 2 * hidden, *rest))
    return e.weight(f"{like.name}.{name}", recipe, weights.type.dtype)


def _emit_routing(e: OnnxEmitter, node: Node) -> tuple[Out | None, int, Out | None]:
    """Return the routing for the kernel MoE: (logits [tokens, experts], k experts per token, the factor by which to
    multiply the kernel's result: [..., 1], a scalar, or None for 1). The kernel always has to normalize the k weights,
    because its code without normalization overwrites its input if ONNX Runtime lets input and output share memory."""
    router, combine = _find_absorbable_router(node), node.required_operand("combine")
    dtype, experts = combine.type.dtype, combine.width
    logits: Out | None
    factor: Out | None = None
    if router is None:
        # The kernel's softmax undoes the logarithm and divides by the sum; the factor multiplies by it again.
        weights = e[combine]
        logits = e.op("Max", e.op("Log", weights), e.scalar(NEVER, dtype))
        factor = e.op("ReduceSum", weights, e.constant([-1]), keepdims=1)
        k = node.attrs["active"] or experts
    else:
        logits, k, scale = e[router.operand("logits")], router.attrs["k"], router.attrs["scale"]
        if not router.attrs["renormalize"]:
            best = e.many("TopK", e.op("Softmax", logits, axis=-1), e.constant([k]), axis=-1, outputs=2)[0]
            factor = e.op("ReduceSum", best, e.constant([-1]), keepdims=1)
        if scale != 1:
            scaling = e.scalar(scale, dtype)
            factor = scaling if factor is None else e.op("Mul", factor, scaling)
    if combine.type.rank != 2:
        logits = e.op("Reshape", logits, e.constant([-1, experts]))
    return logits, k, factor


def list_activation_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of ONNX Runtime's MoE and QMoE for the activation of the experts of `node`."""
    a = node.attrs
    if node.operand("gate") is None:
        return {"activation_type": _KERNEL[a["activation"]]}
    # Rows of gate and up are interleaved: the CPU kernels support neither another layout nor a third weight (fc3).
    fused = {"activation_type": "swiglu", "swiglu_fusion": 1, "swiglu_limit": a["limit"]}
    return fused | {"activation_alpha": find_swish_slope(a["activation"]), "activation_beta": a["shift"]}


@lowering(ops.moe, targets=contrib, when=_find_kernel_refusal, reads=_list_kernel_reads)
def MoE(e: OnnxEmitter, node: Node) -> Out:
    x = node.required_operand("x")
    up, down, gate, up_bias, down_bias, gate_bias = (node.operand(o.name) for o in node.op.operands[2:])
    if isinstance(gate, Param):
        first = interleave_rows(e, gate, up, gate, "interleaved")
        first_bias = interleave_rows(e, gate_bias, up_bias, gate, "interleaved.bias")
    else:
        first, first_bias = e[up], e[up_bias]
    logits, k, factor = _emit_routing(e, node)
    # The operator takes only [tokens, width] and [batch, seq, width].
    fits = x.type.rank in (2, 3)
    rows = e[x] if fits else e.op("Reshape", e[x], e.constant([-1, x.width]))
    operands = (rows, logits, first, first_bias, e[down], e[down_bias])
    y: Out = e.op("MoE", *operands, domain=MS, k=k, normalize_routing_weights=1, **list_activation_attributes(node))
    y = y if fits else reshape_like(e, y, x)
    return y if factor is None else e.op("Mul", y, factor)


# -- experts in batched products


def _emit_expert_activation(e: OnnxEmitter, node: Node, up: Out, gate: Out | None) -> Out:
    """Emit the hidden features of the experts of `node`: act(up), or with `gate` act(gate) ⊙ (up + shift). With `gate`,
    a limit L of the node first bounds gate to at most L and up to −L … L."""
    a, dtype = node.attrs, node.output.type.dtype
    if gate is None:
        return emit_activation(e, up, a["activation"], dtype)
    if a["limit"] is not None:
        high, low = e.scalar(a["limit"], dtype), e.scalar(-a["limit"], dtype)
        gate, up = e.op("Min", gate, high), e.op("Clip", up, low, high)
    if a["shift"]:
        up = e.op("Add", up, e.scalar(a["shift"], dtype))
    return e.op("Mul", emit_activation(e, gate, a["activation"], dtype), up)


def gather_experts(e: OnnxEmitter, value: Out, chosen: Out | None) -> Out:
    """Return `value` [experts, ...] at the expert indices `chosen`, [used, ...]; unchanged if `chosen` is None."""
    return value if chosen is None else e.op("Gather", value, chosen, axis=0)


def _multiply_experts(e: OnnxEmitter, rows: Out, weight: Value, chosen: Out | None) -> Out:
    """Return [used, n, out], `rows` [used, n, in] times the transposed matrices of `weight` [experts, out, in] at the
    expert indices `chosen` [used] (None: all experts)."""
    if e.target.contrib:
        return e.op("FusedMatMul", rows, gather_experts(e, e[weight], chosen), domain=MS, transB=1)
    if isinstance(weight, Param):
        transposed = e.weight(weight.name + ".T", Permute(weight.recipe, (0, 2, 1)), weight.type.dtype)
        return e.op("MatMul", rows, gather_experts(e, transposed, chosen))
    return e.op("MatMul", rows, e.op("Transpose", gather_experts(e, e[weight], chosen), perm=[0, 2, 1]))


def _emit_largest_count(e: OnnxEmitter, counts: Out) -> Out:
    """Return the largest of `counts` i32 [n], or 1 if that is larger, as a tensor i64 [1]."""
    return e.op("Max", e.cast(e.op("ReduceMax", counts, e.constant([0]), keepdims=1), dtypes.i64), e.constant([1]))


@lowering(ops.moe, targets=on_cpu)
def GroupedExperts(e: OnnxEmitter, node: Node) -> Out:
    return emit_grouped(e, node, _multiply_experts)


def emit_grouped(e: OnnxEmitter, node: Node, product: Callable[[OnnxEmitter, Out, Value, Out | None], Out]) -> Out:
    """Emit the mixture `node` as batched products over the experts in use, or over all if many are active; return its
    output. `product` is a function (e, rows [used, n, in], weight, expert indices or None) to [used, n, out]."""
    x, combine = node.required_operand("x"), node.required_operand("combine")
    up, down, gate, up_bias, down_bias, gate_bias = (node.operand(o.name) for o in node.op.operands[2:])
    experts, active = combine.width, node.attrs["active"]
    constant_1 = e.constant([1])

    # weights [experts, tokens]; used: 1 where a weight is not zero, in i32, since tract takes i64 of a bool for sizes.
    flat = e[combine] if combine.type.rank == 2 else e.op("Reshape", e[combine], e.constant([-1, experts]))
    weights = e.op("Transpose", flat, perm=[1, 0])
    used = e.cast(e.op("Not", e.op("Equal", weights, e.scalar(0, combine.type.dtype))), dtypes.i32)
    i32_1, chosen = e.constant([1], np.int32), None
    if active is not None and experts >= SPARSE * active:
        busy = e.op("Min", e.op("ReduceSum", used, constant_1, keepdims=0), i32_1)
        count = e.op("Max", e.op("ReduceSum", busy, e.constant([0]), keepdims=1), i32_1)
        chosen = e.many("TopK", busy, e.cast(count, dtypes.i64), axis=0, outputs=2)[1]
        weights, used = (e.op("Gather", v, chosen, axis=0) for v in (weights, used))

    # The tokens of each expert in order, [experts, n]; padding is another token with a weight of zero. Keys are unique,
    # because OpenVINO and MNN order equal ones at will.
    n = _emit_largest_count(e, e.op("ReduceSum", used, constant_1, keepdims=0))
    indices = e.cast(e.range(e.op("Shape", used, start=1, end=2)), dtypes.i32)
    keys = e.op("Sub", e.op("Mul", used, e.constant(1 << 24, np.int32)), indices)
    tokens = e.many("TopK", keys, n, axis=1, outputs=2)[1]
    states = e[x] if x.type.rank == 2 else e.op("Reshape", e[x], e.constant([-1, x.width]))
    rows = e.op("Gather", states, tokens, axis=0)

    def project(rows: Out, weight: Value, bias: Value | None) -> Out:
        y = product(e, rows, weight, chosen)
        return y if bias is None else e.op("Add", y, e.op("Unsqueeze", gather_experts(e, e[bias], chosen), constant_1))

    opened = None if gate is None else project(rows, gate, gate_bias)
    assert up is not None and down is not None
    hidden = _emit_expert_activation(e, node, project(rows, up, up_bias), opened)
    results = e.op("Reshape", project(hidden, down, down_bias), e.constant([-1, x.width]))

    # Back to tokens: the rows in `results` of a token's k experts, [tokens, k].
    # The tokens of each expert are in order, so this count is the token's row in its expert.
    before = e.cast(e.op("CumSum", used, e.constant(1), exclusive=1), dtypes.i64)
    # Clamped for experts that a token does not use: any row will do, its weight is zero.
    row_in_expert = e.op("Transpose", e.op("Min", before, e.op("Sub", n, constant_1)), perm=[1, 0])
    k = _emit_largest_count(e, e.op("ReduceSum", used, e.constant([0]), keepdims=0))
    weight, expert_indices = e.many("TopK", e.op("Transpose", weights, perm=[1, 0]), k, axis=-1, outputs=2)
    at = e.op("Add", e.op("Mul", expert_indices, n), e.op("GatherElements", row_in_expert, expert_indices, axis=1))
    mixed = e.op("MatMul", e.op("Unsqueeze", weight, constant_1), e.op("Gather", results, at, axis=0))
    return reshape_like(e, mixed, x)
