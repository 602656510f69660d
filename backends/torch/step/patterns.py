"""What a kernel of the decode step computes at once, recognized in the graph."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Node, Param, Value

from ..kernels.activation import ACTIVATIONS


@dataclass(frozen=True)
class NormOf:
    """`x`, or its norm where `node` is one."""

    x: Value
    node: Node | None = None

    @property
    def weights(self) -> tuple[Param, ...]:
        return () if self.node is None else tuple(w for w in self.node.inputs[1:] if isinstance(w, Param))


@dataclass(frozen=True)
class Projection:
    """norm(x) Wᵀ + b; `value` is the result."""

    source: NormOf
    weight: Param
    bias: Param | None
    value: Value


@dataclass(frozen=True)
class Heads:
    """The queries or keys of an attention: a projection, normed head by head by `norm`, turned by `rope`."""

    projection: Projection
    norm: Node | None
    rope: Node | None


@dataclass(frozen=True)
class SelfAttention:
    """All that `norm_qkv` and `decode_attention` compute of the attention `node`."""

    node: Node
    q: Heads
    k: Heads
    v: Heads


@dataclass(frozen=True)
class Residual:
    """`stream` + scale · norm(x Wᵀ + b)."""

    stream: Value
    projection: Projection
    scale: float
    norm: NormOf


def norm_of(value: Value) -> NormOf:
    """`value` taken as a norm, if it is one that kernels compute on their way."""
    node = value.producer
    if node is None or node.op not in (ops.rms_norm, ops.layer_norm):
        return NormOf(value)
    x = node.inputs[0]
    found = NormOf(x, node) if x is not None else NormOf(value)
    given = sum(v is not None for v in node.inputs) - 1
    return found if given == len(found.weights) and x is not None and len(x.shape) == 3 else NormOf(value)


def projection(value: Value | None) -> Projection | None:
    """`value` taken as a linear map with weights of its own."""
    node = None if value is None else value.producer
    if node is None or node.op is not ops.linear or len(node.output.shape) != 3:
        return None
    x, weight, bias = node.operand("x"), node.operand("weight"), node.operand("bias")
    if x is None or not isinstance(weight, Param) or not (bias is None or isinstance(bias, Param)):
        return None
    return Projection(norm_of(x), weight, bias, node.output)


def self_attention(node: Node) -> SelfAttention | str:
    """The attention `node` with the projections, norms and rotations before it; or why they are no one kernel."""
    a = node.attrs
    if node.operand("bias") is not None:
        return "it has a bias"
    if node.operand("key_mask") is not None or node.operand("v") is None:
        return "it has a key mask" if node.operand("key_mask") is not None else "keys and values are one latent"
    if a["pattern"] != "dense":
        return f"its pattern is {a['pattern']}"
    q, k, v = (_heads(node.operand(name)) for name in "qkv")
    if q is None or k is None or v is None or v.rope is not None or v.norm is not None:
        return "queries, keys or values are no projections"
    if len({h.projection.source for h in (q, k, v)}) != 1:
        return "queries, keys and values are not of the same value"
    if not _alike(q.rope, k.rope):
        return "queries and keys are turned differently"
    if (q.norm is None) != (k.norm is None) or (q.norm and k.norm and q.norm.attrs["eps"] != k.norm.attrs["eps"]):
        return "queries and keys are normed differently"
    if len({h.projection.bias is None for h in (q, k, v)}) != 1:
        return "some of the projections have a bias"
    width = q.projection.weight.shape[0] // a["heads"]
    if v.projection.weight.shape[0] != a["kv_heads"] * width:
        return "values are not as wide as keys"
    return SelfAttention(node, q, k, v)


def _alike(q: Node | None, k: Node | None) -> bool:
    """Whether queries and keys are turned by the same angles, or both are not."""
    if q is None or k is None:
        return q is k
    named = ("interleaved", "amplitude")
    return q.inputs[1:] == k.inputs[1:] and all(q.attrs[n] == k.attrs[n] for n in named)


def _heads(value: Value | None) -> Heads | None:
    node = None if value is None else value.producer
    rope = node if node is not None and node.op is ops.rope else None
    if rope is not None:
        value = rope.inputs[0]
    norm = None
    if value is not None and (flat := value.producer) is not None and flat.op is ops.reshape:
        inner = flat.inputs[0]
        made = None if inner is None else inner.producer
        if made is not None and made.op is ops.rms_norm and isinstance(made.operand("weight"), Param):
            apart = made.inputs[0].producer if made.inputs[0] is not None else None
            if apart is None or apart.op is not ops.reshape:
                return None
            norm, value = made, apart.inputs[0]
    found = projection(value)
    return None if found is None else Heads(found, norm, rope)


def residual(node: Node) -> Residual | None:
    """The addition `node` taken as a residual stream and what a projection adds to it."""
    for i in (1, 0):
        stream, value = node.inputs[1 - i], node.inputs[i]
        if stream is None or value is None or stream.shape != value.shape or len(value.uses) != 1:
            continue
        scale, made = 1.0, value.producer
        if made is not None and made.op is ops.affine and made.attrs["plus"] == 0 and len(made.output.uses) == 1:
            scale, value = made.attrs["by"], made.inputs[0]
        assert value is not None
        norm = norm_of(value)
        found = projection(norm.x if norm.node is not None else value)
        if found is not None and found.source.node is None and len(found.value.uses) == 1:
            return Residual(stream, found, scale, norm)
    return None


def gated(node: Node) -> tuple[Projection, Projection] | None:
    """The gate and up projections of the glu `node`."""
    gate, up = projection(node.inputs[0]), projection(node.inputs[1])
    a = node.attrs
    if gate is None or up is None or a["limit"] is not None or a["shift"] or a["activation"] not in ACTIVATIONS:
        return None
    alike = gate.source == up.source and (gate.bias is None) == (up.bias is None)
    return (gate, up) if alike else None


def activated(node: Node) -> tuple[Projection, str] | None:
    """The projection under the activation `node`, and the name of that."""
    name = {"relu": "relu", "relu2": "relu2", "tanh": "tanh", "sigmoid": "sigmoid"}.get(node.op.name)
    if node.op is ops.gelu:
        name = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_quick"}[node.attrs["approximate"]]
    if node.op is ops.swish and node.attrs["beta"] == 1:
        name = "silu"
    found = projection(node.inputs[0])
    return None if name is None or found is None or len(found.value.uses) != 1 else (found, name)
