"""Patterns in a graph that a kernel of the decode step computes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.passes.analysis.feed_forward import activation_name
from weft.passes.analysis.rotary import rotation_of, unlike

from ..kernels.shared.activation import ACTIVATIONS
from .gates import ending, maker, single

SKIPPING = {"chunked": "chunk", "dilated": "dilation"}  # patterns that kernels have, and what they call the stride


@dataclass(frozen=True)
class NormOf:
    """`x`, or its norm where `node` is one."""

    x: Value
    node: Node | None = None


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
class Added:
    """scale · norm(x Wᵀ + b), which a residual stream takes up."""

    projection: Projection
    scale: float
    norm: NormOf


@dataclass(frozen=True)
class Mixture:
    """scale · the mixture of experts `node` of `source`, whose weights come from the router `route`; its logits are the
    projection `router`, if they are one that only it reads."""

    node: Node
    source: NormOf
    route: Node
    router: Projection | None
    scale: float = 1.0


def is_norm(node: Node) -> bool:
    """Return whether `node` is a norm over the last axis with weights of its own, or none."""
    return node.op in (ops.rms_norm, ops.layer_norm) and all(v is None or isinstance(v, Param) for v in node.inputs[1:])


def norm_of(value: Value, alone: bool = False) -> NormOf:
    """`value` taken as a norm, if it is one that kernels compute on their way: all that read it are projections, or
    what asks reads it `alone`. That of a recurrence comes with that."""
    node = value.producer
    if node is None or not is_norm(node) or len(value.shape) != 3 or ending(node) is not None:
        return NormOf(value)
    x = node.inputs[0]
    readers = value.users
    fits = alone or (not value.is_output and all(is_projection(r) or _mixes(r, value) for r in readers))
    return NormOf(x, node) if x is not None and fits else NormOf(value)


def _mixes(node: Node, value: Value) -> bool:
    """Return whether `node` is a mixture of experts of `value` that kernels compute."""
    experts = node.op is ops.moe and sum(v is value for v in node.inputs) == 1 and node.operand("x") is value
    return experts and not isinstance(_route(node), str)


def is_projection(node: Node) -> bool:
    """Return whether `node` is a linear map of tokens by weights of its own."""
    weights = node.inputs[1:]
    return (
        node.op is ops.linear
        and len(node.output.shape) == 3
        and all(v is None or isinstance(v, Param) for v in weights)
    )


def projection(value: Value | None) -> Projection | None:
    """`value` taken as a linear map with weights of its own."""
    node = maker(value, ops.linear)
    if node is None or not is_projection(node):
        return None
    weight, bias = node.required("weight"), node.operand("bias")
    assert isinstance(weight, Param) and (bias is None or isinstance(bias, Param))
    return Projection(norm_of(node.required("x")), weight, bias, node.output)


def slopes(node: Node) -> Value | str | None:
    """ALiBi's slopes [heads], by which kernels add distance to the scores of the attention `node`, if it has them; or
    why kernels do not take its scores."""
    if node.op is ops.relative_attention:
        return "its keys and values depend on distances"
    if node.operand("key_mask") is not None:
        return "it has a key mask"
    a = node.attrs
    if a["pattern"] != "dense" and (a["pattern"] not in SKIPPING or a["keep_first"] or node.operand("v") is None):
        return f"its pattern is {a['pattern']}"
    bias = node.operand("bias")
    if bias is None:
        return None
    if maker(bias, ops.lightning_index) is not None:
        return "its queries choose keys"
    if (made := maker(bias, ops.alibi)) is None:
        return "it has a bias that is not ALiBi's"
    own, queries, keys = made.inputs
    whole = isinstance(own, Param) and queries is keys and queries is not None and queries.producer is None
    return own if whole else "its ALiBi does not count positions"


def part(value: Value | None) -> Projection | None:
    """`value` taken as a linear map, or as a part of what one is split into; then its weight is that of the whole."""
    found, node = projection(value), maker(value, ops.split)
    if found is not None or value is None or node is None:
        return found
    whole = projection(node.inputs[0])
    last = node.attrs["axis"] in (-1, len(value.shape) - 1)
    return replace(whole, value=value) if whole is not None and last else None


def together(parts: Sequence[Projection]) -> bool:
    """Return whether `parts` have weights of their own, or are all that one projection is split into, in order."""
    makers = [p.value.producer for p in parts]
    if all(made is not None and made.op is ops.linear for made in makers):
        return True
    return makers[0] is not None and makers[0].outputs == tuple(p.value for p in parts)


def self_attention(node: Node) -> SelfAttention | str:
    """The attention `node` with the projections, norms and rotations before it; or why these are no one kernel."""
    a = node.attrs
    if node.operand("v") is None:
        return "keys and values are one latent"
    q, k, v = (_heads(node.operand(name)) for name in "qkv")
    if q is None or k is None or v is None or v.rope is not None or v.norm is not None:
        return "queries, keys or values are no projections"
    if len({h.projection.source for h in (q, k, v)}) != 1 or not together([h.projection for h in (q, k, v)]):
        return "queries, keys and values are not of the same value"
    if (reason := unlike(q.rope, k.rope)) is not None:
        return reason
    if not _normed_alike(q.norm, k.norm):
        return "queries and keys are normed differently"
    if len({h.projection.bias is None for h in (q, k, v)}) != 1:
        return "some of the projections have a bias"
    width = q.projection.value.width // a["heads"]
    if v.projection.value.width != a["kv_heads"] * width:
        return "values are not as wide as keys"
    return SelfAttention(node, q, k, v)


def _normed_alike(q: Node | None, k: Node | None) -> bool:
    """Return whether the heads of queries and keys have norms of one kind, or none."""
    if q is None or k is None:
        return q is k
    return q.attrs["eps"] == k.attrs["eps"] and (q.operand("weight") is None) == (k.operand("weight") is None)


def _heads(value: Value | None) -> Heads | None:
    rope = rotation_of(value)
    if rope is not None:
        value = rope.inputs[0]
    norm = None
    flat = maker(value, ops.reshape)
    made = None if flat is None else maker(flat.inputs[0], ops.rms_norm)
    if made is not None and is_norm(made):
        apart = maker(made.inputs[0], ops.reshape)
        if apart is None:
            return None
        norm, value = made, apart.inputs[0]
    found = part(value)
    return None if found is None else Heads(found, norm, rope)


def terms(node: Node) -> list[Value] | None:
    """The values of one shape that the addition `node` sums up; those of an addition that only it reads instead."""
    found: list[Value] = []
    for value in node.inputs:
        if value is None or value.shape != node.output.shape or len(value.shape) != 3:
            return None
        inner = maker(value, ops.add)
        more = terms(inner) if inner is not None and single(value) else None
        found += [value] if more is None else more
    return found


def scaled(value: Value) -> tuple[Value, float]:
    """The value that `value` is a multiple of, and by which factor; only it reads that."""
    made = maker(value, ops.affine)
    x = None if made is None or made.attrs["plus"] != 0 else made.inputs[0]
    return (value, 1.0) if made is None or x is None or not single(x) else (x, made.attrs["by"])


def added(value: Value) -> Added | None:
    """`value` taken as what a projection, and a norm of that, add to a residual stream."""
    if not single(value):
        return None
    inner, scale = scaled(value)
    norm = norm_of(inner, alone=True)
    found = projection(norm.x)
    if found is None or found.source.node is not None or not single(found.value):
        return None
    return Added(found, scale, norm)


def mixture(value: Value) -> Mixture | str | None:
    """`value` taken as a mixture of experts that kernels compute; or why they do not, if it is one."""
    inner, scale = scaled(value) if single(value) else (value, 1.0)
    if (node := maker(inner, ops.moe)) is None:
        return None
    route = _route(node)
    if isinstance(route, str):
        return route
    logits = route.required("logits")
    assert isinstance(logits, Value)
    router = projection(logits) if single(logits) else None
    return Mixture(node, norm_of(node.required("x")), route, router, scale)


def _route(node: Node) -> Node | str:
    """The router's choice that weighs the experts of the mixture `node`; or why no kernels compute that."""
    combine = node.operand("combine")
    route = maker(combine, ops.route)
    if combine is None or route is None or not single(combine):
        return "what weighs the experts is no router's choice alone"
    if (node.attrs["active"] or combine.shape[-1]) != route.attrs["k"]:
        return "not as many experts answer as the router chooses"
    if kernel_activation(node.attrs["activation"]) is None:
        return f"the activation is {node.attrs['activation']}"
    return "tokens are not [batch, seq, width]" if len(node.output.shape) != 3 else route


def kernel_activation(name: str | None) -> str | None:
    """Return what kernels call the activation `name`, if they have it."""
    name = {"swish(1.702)": "gelu_quick", "swish(1.0)": "silu"}.get(name or "", name)
    return name if name in ACTIVATIONS else None


def gated(node: Node) -> tuple[Projection, Projection] | str:
    """The gate and up projections of the glu `node`; or why no kernel computes them with it."""
    gate, up = part(node.inputs[0]), part(node.inputs[1])
    if gate is None or up is None or not (single(gate.value) and single(up.value) and together((gate, up))):
        return "gate and up are no projections of their own"
    if kernel_activation(node.attrs["activation"]) is None:
        return f"the activation is {node.attrs['activation']}"
    if gate.source != up.source or (gate.bias is None) != (up.bias is None):
        return "gate and up differ in what they read, or one has a bias"
    return gate, up


def activated(node: Node) -> tuple[Projection, str] | None:
    """The projection under the activation `node`, and the name of that."""
    name, under = kernel_activation(activation_name(node)), projection(node.inputs[0])
    return None if name is None or under is None or not single(under.value) else (under, name)
