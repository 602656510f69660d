"""Attention and what belongs to it: rotary positions, masks, caches."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Node, Value

from ..lowering import lowering
from ..positions import key_positions, query_positions
from ..program import Emitter, Operand, Slot, Var
from .dense import operand
from .elementwise import number
from .shared import is_shared


@lowering(ops.rope)
def _rope(e: Emitter, node: Node) -> None:
    x, positions, frequencies = (operand(node, n) for n in ("x", "positions", "frequencies"))
    heads, amplitude = node.attrs["heads"], node.attrs["amplitude"]
    text = "rotary({0}, {1})" if amplitude == 1 else f"rotary_scaled({{0}}, {{1}}, {number(amplitude)})"
    at, per_position = e[positions], e[frequencies]
    if is_shared(positions) and is_shared(frequencies):
        cos, sin = e.hoist_many((text, at, per_position), text, at, per_position, names=("cos", "sin"))
    else:
        cos, sin = e.many(text, at, per_position, names=("cos", "sin"))
    turn = "rotate_pairs" if node.attrs["interleaved"] else "rotate"
    made = e.emit(f"{turn}({{0}}, {{1}}, {{2}})", e.heads(x, heads), cos, sin, replaces=0)
    e.set_heads(node.output, heads, made)


@lowering(ops.attention, when=lambda n: "it has a cache of its own" if n.operand("past_k") is not None else None)
def _attention(e: Emitter, node: Node) -> None:
    heads, kv_heads, width = node.attrs["heads"], node.attrs["kv_heads"], operand(node, "q").width
    q, k = e.heads(operand(node, "q"), heads), e.heads(operand(node, "k"), kv_heads)
    latent = node.attrs["value_dim"]
    v = None if latent else e.heads(operand(node, "v"), kv_heads)
    mask, causal = _mask(e, node)
    if node in e.cached:
        k, v = _cached(e, node, k, v, mask)
    if v is None:
        v = e.emit(f"{{0}}[..., :{latent}]", k, name="v")
    scale = node.attrs["scale"]
    default = 1 / math.sqrt(width // heads)
    made = _attend(e, node, (q, k, v), mask, causal, None if scale is None or scale == default else scale)
    e.set_heads(node.output, heads, made)


def _attend(
    e: Emitter, node: Node, qkv: tuple[Var, Var, Var], mask: Operand | None, causal: str, scale: float | None
) -> Var:
    """softmax(scale · q kᵀ + bias + mask) v as an operator of torch, or step by step where it has none."""
    bias, sinks, softcap = node.operand("bias"), node.operand("sinks"), node.attrs["softcap"]
    heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
    shape = (
        "[" + ", ".join(map(str, (node.output.shape[0], heads, node.output.shape[1], node.output.width // heads))) + "]"
    )
    operands: list[Value | Operand] = [*qkv]
    options: list[str] = []

    def option(name: str, value: Value | Operand | None) -> None:
        if value is not None:
            options.append(f"{name}={{{len(operands)}}}")
            operands.append(value)

    if softcap is None and sinks is None:
        if bias is not None and mask is not None:
            mask = e.emit("{0}.masked_fill(~{1}, -math.inf)", bias, mask, name="bias")
        option("attn_mask", mask if mask is not None else bias)
        if causal:
            options.append(causal.replace("{mask}", "{3}"))
        if scale is not None:
            options.append(f"scale={number(scale)}")
        if heads != kv_heads:
            options.append("enable_gqa=True")
        text = f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}{''.join(', ' + o for o in options)})"
        return e.emit(text, *operands, name="x", comment=shape)
    option("mask", mask)
    option("bias", bias)
    option("sinks", sinks)
    if softcap is not None:
        options.append(f"softcap={number(softcap)}")
    size = scale if scale is not None else 1 / math.sqrt(operand(node, "q").width // heads)
    text = f"attention({{0}}, {{1}}, {{2}}, {number(size)}{''.join(', ' + o for o in options)})"
    return e.emit(text, *operands, name="x", comment=shape)


def _cached(e: Emitter, node: Node, k: Var, v: Var | None, mask: Operand | None) -> tuple[Var, Var | None]:
    """All keys and values that the mask tells of: those of the call, and those in the cache if there is one."""
    kv_heads = node.attrs["kv_heads"]
    width = operand(node, "k").width // kv_heads
    positions = query_positions(e)
    assert mask is not None
    if v is None:
        slot = Slot("cache", f"KeyCache(batch, {kv_heads}, length, {width}, {{like}})", "KeyCache")
        text = "{1} if {0} is None else {0}.update({1}, {2}, {3})"
        return e.emit(text, slot, k, positions, mask, name="k", replaces=1), None
    value_width = operand(node, "v").width // kv_heads
    slot = Slot("cache", f"KVCache(batch, {kv_heads}, length, {width}, {value_width}, {{like}})", "KVCache")
    text = "({1}, {2}) if {0} is None else {0}.update({1}, {2}, {3}, {4})"
    made = e.many(text, slot, k, v, positions, mask, names=("k", "v"))
    return made[0], made[1]


def _mask(e: Emitter, node: Node) -> tuple[Operand | None, str]:
    """What a query sees as a boolean tensor [batch or 1, 1, seq, keys], or nothing; and how torch is told of causality.

    A cached attention without window has no mask in the first call of a text: there the keys are those of the call.
    """
    causal, key_mask = node.attrs["causal"], node.operand("key_mask")
    explicit = (
        node.operand("bias") is not None or node.attrs["softcap"] is not None or node.operand("sinks") is not None
    )
    plain = node.attrs["window"] is None and node.attrs["pattern"] == "dense"
    if node in e.cached:
        assert e.start is not None
        queries, keys = query_positions(e), key_positions(e)
        if plain and not explicit:
            text = "None if {0} == 0 else {1}[:, None, :, None] >= {2}[:, None, None, :]"
            return e.hoist("mask", text, e.start, queries, keys, name="mask"), "is_causal={mask} is None"
        return _seen(e, node, queries, keys), ""
    if causal and plain and not explicit and key_mask is None:
        return None, "is_causal=True"
    mask: Operand | None = None
    if causal or not plain:
        q, k = operand(node, "q"), operand(node, "k")
        at = e.emit("torch.arange({0}.shape[1], device={0}.device)[None]", q, name="queries")
        mask = _seen(e, node, at, e.emit("torch.arange({0}.shape[1], device={0}.device)[None]", k, name="keys"))
    if key_mask is not None:
        shown = e.hoist(("shown", e[key_mask]), "{0}[:, None, None, :] != 0", key_mask, name="shown")
        mask = shown if mask is None else e.emit("{0} & {1}", mask, shown, name="mask")
    return mask, ""


def _seen(e: Emitter, node: Node, queries: Operand, keys: Operand) -> Var:
    """The conditions of the attributes, [batch or 1, 1, seq, keys]."""
    a = node.attrs
    shared = node in e.cached
    make = (lambda text, *o, name: e.hoist((text, *o), text, *o, name=name)) if shared else e.emit
    q = make("{0}[:, None, :, None]", queries, name="queries")
    k = make("{0}[:, None, None, :]", keys, name="keys")
    near = []
    if a["window"] is not None:
        distance = "{0} - {1}" if a["causal"] else "({0} - {1}).abs()"
        near.append(f"({distance} < {a['window']})")
    stride = a["stride"]
    if a["pattern"] == "dilated":
        near.append(f"(({{0}} - {{1}}) % {stride} == 0)")
    elif a["pattern"] == "strided":
        near.append(f"((({{0}} - {{1}}).abs() < {stride}) | (({{0}} - {{1}}) % {stride} == 0))")
    elif a["pattern"] == "chunked":
        near.append(f"({{0}} // {stride} == {{1}} // {stride})")
    elif a["pattern"] == "fixed":
        near.append(f"(({{0}} // {stride} == {{1}} // {stride}) | ({{1}} % {stride} >= {stride - a['summary']}))")
    if a["keep_first"] and near:
        near = [f"({' & '.join(near)} | ({{1}} < {a['keep_first']}))"]
    text = " & ".join([*near, "({0} >= {1})"] if a["causal"] else near)
    name = "near" if near else "mask"
    made: Var = make(text, q, k, name=name)
    return made
