"""Mapping of ONNX operators to equivalent weft ops, for labels, and names of operands of contrib operators.

Only exact equivalents are mapped: a MatMul by a weight is a linear map, a GroupQueryAttention is an attention with
heads. Everything else keeps the name of its operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import quote_value

from ..model.network import Vertex

MICROSOFT = "com.microsoft"

# Names of operands of contrib operators; standard operators have them in their schema.
OPERANDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(operands.split())
    for name, operands in {
        "Attention": "input weights bias mask_index past attention_bias past_sequence_length",
        "MultiHeadAttention": "query key value bias key_padding_mask attention_bias past_key past_value",
        "GroupQueryAttention": "query key value past_key past_value seqlens_k total_sequence_length cos_cache "
        "sin_cache position_ids attention_bias head_sink",
        "PagedAttention": "query key value key_cache value_cache cumulative_sequence_length past_seqlens block_table",
        "RotaryEmbedding": "input position_ids cos_cache sin_cache",
        "SkipLayerNormalization": "input skip gamma beta bias",
        "SkipSimplifiedLayerNormalization": "input skip gamma bias",
        "SimplifiedLayerNormalization": "X scale",
        "EmbedLayerNormalization": "input_ids segment_ids word_embedding position_embedding segment_embedding gamma "
        "beta mask position_ids",
        "MatMulNBits": "A B scales zero_points g_idx bias",
        "GatherBlockQuantized": "data indices scales zero_points",
        "FusedMatMul": "A B",
        "DynamicQuantizeMatMul": "A B b_scale b_zero_point bias",
        "MoE": "input router_probs fc1_experts_weights fc1_experts_bias fc2_experts_weights fc2_experts_bias "
        "fc3_experts_weights fc3_experts_bias",
        "QMoE": "input router_probs fc1_experts_weights fc1_scales fc1_experts_bias fc2_experts_weights fc2_scales "
        "fc2_experts_bias fc3_experts_weights fc3_scales fc3_experts_bias",
        "BiasGelu": "A B",
        "FastGelu": "X bias",
        "CausalConvWithState": "input weight bias past_state",
        "LinearAttention": "query key value past_state decay beta",
    }.items()
}
# Operands that contain packed codes of a few bits.
PACKED = {
    "MatMulNBits": ("B",),
    "GatherBlockQuantized": ("data",),
    "QMoE": tuple(f"fc{i}_experts_weights" for i in (1, 2, 3)),
}

_SAME = {
    "Add": "add", "Sum": "add", "Mul": "mul", "Sub": "sub", "Div": "div",
    "RMSNormalization": "rms_norm", "SimplifiedLayerNormalization": "rms_norm", "LayerNormalization": "layer_norm",
    "SkipLayerNormalization": "add_norm", "SkipSimplifiedLayerNormalization": "add_norm",
    "RotaryEmbedding": "rope", "MatMul": "matmul", "FusedMatMul": "matmul", "Gemm": "matmul", "MatMulInteger": "matmul",
    "Gelu": "gelu", "FastGelu": "gelu", "BiasGelu": "gelu", "Relu": "relu", "Swish": "swish", "Elu": "elu",
    "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus", "Split": "split", "Concat": "concat",
    "CausalConvWithState": "causal_conv", "EmbedLayerNormalization": "embedding",
}  # fmt: skip

# Their results are their first operand in another shape, order or precision: they are drawn with its producer.
VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast", "CastLike", "Expand"}


def find_equivalent(v: Vertex, types: Mapping[str, str]) -> Vertex | None:
    """Return `v` as the equivalent weft op, with weft's attributes and weight shapes where labels need them, or None.
    `types` maps operand names of `v` to types. Raises WeftError if a numeric attribute is invalid."""
    if v.op == "Attention" and "q_num_heads" not in v.attrs and "num_heads" not in v.attrs:
        heads, kv_heads = (_read_heads(types.get(role, "")) for role in ("Q", "K"))
        attrs = {**v.attrs, "q_num_heads": heads, "kv_num_heads": kv_heads}
        return _to_attention(replace(v, attrs=attrs)) if heads and kv_heads else None
    equivalent = _CONVERTERS[v.op](v) if v.op in _CONVERTERS else None
    return replace(v, op=_SAME[v.op]) if equivalent is None and v.op in _SAME else equivalent


def _to_linear(v: Vertex) -> Vertex | None:
    """Convert a product with a two-dimensional weight to a linear map, whose weight is [out, in]; None for others."""
    shape = v.weights[0].dims if v.weights and "A" in v.roles else ()
    if len(shape) != 2:
        return None
    return _with_weight_shape(v, shape if v.attrs.get("transB", "0") != "0" else shape[::-1])


def _to_packed_linear(v: Vertex) -> Vertex | None:
    return _with_weight_shape(v, (v.attrs["N"], v.attrs["K"])) if v.weights and {"N", "K"} <= v.attrs.keys() else None


def _with_weight_shape(v: Vertex, shape: tuple[Any, ...]) -> Vertex:
    weight = replace(v.weights[0], shape=f"[{', '.join(map(str, shape))}]")
    return replace(v, op="linear", weights=(weight, *v.weights[1:]))


def _to_embedding(v: Vertex) -> Vertex | None:
    """Convert a lookup of rows in a table of weights to an embedding; None for other gathers."""
    table = v.weights[0] if v.weights and "indices" in v.roles else None
    if table is None or len(table.dims) != 2 or v.attrs.get("axis", "0") != "0":
        return None
    return replace(v, op="embedding", weights=(table,))


def _to_attention(v: Vertex) -> Vertex | None:
    heads = v.attrs.get("num_heads") or v.attrs.get("q_num_heads", "")
    attrs = {"heads": heads, "kv_heads": v.attrs.get("kv_num_heads", heads)}
    if not all(map(str.isdecimal, attrs.values())):
        return None
    for ours, theirs in (("window", "local_window_size"), ("softcap", "softcap")):
        attrs |= {ours: v.attrs[theirs]} if _read_number(v, theirs, 0) > 0 else {}
    sinks = replace(v, roles=tuple("sinks" if role == "head_sink" else role for role in v.roles))
    attrs |= {"rotary": "true"} if v.attrs.get("do_rotary", "0") != "0" else {}
    return replace(sinks, op="attention", attrs=attrs)


def _read_number(v: Vertex, name: str, otherwise: float) -> float:
    try:
        return float(v.attrs.get(name, otherwise))
    except ValueError:
        raise WeftError(f"{v.name} ({v.op}): {name} is {quote_value(v.attrs[name])}, not a number") from None


def _read_heads(kind: str) -> str:
    sizes = kind.partition("[")[2].rstrip("]").split(", ")
    return sizes[1] if len(sizes) == 4 and sizes[1].isdigit() else ""


def _to_experts(v: Vertex) -> Vertex | None:
    return replace(v, op="moe", attrs={"active": v.attrs["k"]} if "k" in v.attrs else {})


def _to_swish(v: Vertex) -> Vertex:
    """Convert x · sigmoid(alpha x) to Swish if alpha is 1, else to the sigmoid form of GELU."""
    return replace(v, op="swish" if math.isclose(_read_number(v, "alpha", 1.702), 1) else "gelu")


_CONVERTERS: Mapping[str, Callable[[Vertex], Vertex | None]] = {
    "MatMul": _to_linear, "FusedMatMul": _to_linear, "Gemm": _to_linear, "MatMulInteger": _to_linear,
    "DynamicQuantizeMatMul": _to_linear, "MatMulNBits": _to_packed_linear,
    "Gather": _to_embedding, "GatherBlockQuantized": _to_embedding,
    "Attention": _to_attention, "MultiHeadAttention": _to_attention, "GroupQueryAttention": _to_attention,
    "PagedAttention": _to_attention, "MoE": _to_experts, "QMoE": _to_experts, "QuickGelu": _to_swish,
}  # fmt: skip


def label_gates(vertices: list[Vertex]) -> list[Vertex]:
    """Return `vertices` with an `equivalent` for products that exporters write as separate operations: Swish for
    x · sigmoid(x), a gated unit for an activation times a linear or split."""
    makers = {name: i for i, v in enumerate(vertices) for name in v.makes}
    fused = list(vertices)
    for i, v in enumerate(vertices):
        if v.op != "Mul" or len(v.reads) != 2:
            continue
        for a, b in (v.reads, v.reads[::-1]):
            source, other = (fused[makers[x]] if x in makers else None for x in (a, b))
            if source is None:
                continue
            if source.op == "Sigmoid" and source.reads == (b,):
                fused[i] = replace(v, equivalent=replace(v, op="swish"))
            elif source.weft_op.op in _GATES and other is not None and other.weft_op.op in ("linear", "split"):
                fused[i] = replace(v, equivalent=replace(v, op="glu", attrs={"activation": _GATES[source.weft_op.op]}))
            else:
                continue
            break
    return fused


_GATES = {"swish": "silu", "gelu": "gelu", "relu": "relu"}
