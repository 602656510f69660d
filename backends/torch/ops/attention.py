"""Softmax attention: its heads, its KV cache, and the torch operators that compute it."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.passes.analysis.states import find_caches

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.stateful_nodes import emit_query_positions, emit_written_positions, find_rolling_capacity
from ..program.statements import CacheSlot, Operand, Var
from .calls import FunctionCall
from .compact_caches import add_scales, emit_rounded_keys, find_scales
from .elementwise import format_number
from .masks import (
    ARANGE,
    DISTANCE,
    emit_cached_positions,
    emit_distance,
    emit_key_mask,
    emit_mask,
    emit_visibility,
    has_position_mask,
    is_dense,
    is_shared,
)


@lowering(ops.rope)
def _rope(e: Emitter, node: Node) -> None:
    x, positions, frequencies = (node.required_operand(n) for n in ("x", "positions", "frequencies"))
    heads, amplitude = node.attrs["heads"], node.attrs["amplitude"]
    text = "rotary({0}, {1})" if amplitude == 1 else f"rotary_scaled({{0}}, {{1}}, {format_number(amplitude)})"
    at, per_position = e[positions], e[frequencies]
    if is_shared(positions) and is_shared(frequencies):
        cos, sin = e.hoist_tuple((text, at, per_position), text, at, per_position, names=("cos", "sin"))
    else:
        cos, sin = e.emit_tuple(text, at, per_position, names=("cos", "sin"))
    function = "rotate_pairs" if node.attrs["interleaved"] else "rotate"
    split = e.split_heads(x, e.attr(node, "heads"), find_role(node.output))
    rotated = e.emit(f"{function}({{0}}, {{1}}, {{2}})", split, cos, sin, name=split.name, replaces=0)
    e.record_heads(node.output, heads, rotated)


def find_role(value: Value) -> str:
    """Return the operand name (q, k or v) by which attentions read `value`; "" if none does, or their names differ."""
    roles = {reader.op.operands[i].name for reader, i in value.uses if reader.op.name.endswith("attention")}
    return roles.pop() if len(roles) == 1 else ""


def _refuse_own_cache(node: Node) -> str | None:
    return "it has a cache of its own" if node.operand("past_k") is not None else None


@lowering(ops.attention, when=_refuse_own_cache)
def _attention(e: Emitter, node: Node) -> None:
    heads, width, kv_heads = node.attrs["heads"], node.required_operand("q").width, e.attr(node, "kv_heads")
    q = e.split_heads(node.required_operand("q"), e.attr(node, "heads"), "q")
    k = e.split_heads(node.required_operand("k"), kv_heads, "k")
    latent = node.attrs["value_dim"]
    v = None if latent else e.split_heads(node.required_operand("v"), kv_heads, "v")
    by_position = node not in e.cross_attentions and has_position_mask(node)
    mask, causal = (emit_visibility(e, node), "") if by_position else emit_mask(e, node)
    if node in e.cached:
        k, v = e.emit_keys_once(node, lambda: _emit_cache_update(e, node, k, v, mask))
    elif node.attrs["cache_bits"] is not None:
        k, v = emit_rounded_keys(e, node, k, v)
    elif node in e.cross_attentions and v is not None:
        k, v, mask = _emit_cross_cache(e, k, v, mask)
    if v is None:
        v = e.emit(f"{{0}}[..., :{latent}]", k, name="v")
    scale = None if node.attrs["scale"] in (None, 1 / math.sqrt(width // heads)) else e.attr(node, "scale")
    if by_position:
        assert isinstance(mask, Var)
        x = _emit_position_attention(e, node, (q, k, v), mask, scale)
    else:
        x = _emit_attention(e, node, (q, k, v), mask, causal, scale)
    e.record_heads(node.output, heads, x)


def _emit_attention(
    e: Emitter, node: Node, qkv: tuple[Var, Var, Var], mask: Operand | None, causal: str, scale: float | None
) -> Var:
    """Emit and return softmax(scale · q kᵀ + bias) v, masked: by SDPA, or by the snippet `attention` with softcap or
    sinks. `causal` is the source of SDPA's argument is_causal, "" to leave it out. A `scale` of None is 1/√width."""
    a, bias, sinks = node.attrs, node.operand("bias"), node.operand("sinks")
    if a["softcap"] is not None or sinks is not None:
        scale = scale if scale is not None else 1 / math.sqrt(node.required_operand("q").width // a["heads"])
        call = FunctionCall("attention").add(*qkv, format_number(scale)).add_named(mask=mask, bias=bias, sinks=sinks)
        return call.set("softcap", e.attr(node, "softcap")).emit(e, name="x")
    call = FunctionCall("F.scaled_dot_product_attention").add(*qkv)
    if bias is None:
        call.add_named(attn_mask=mask)
    else:
        # A bias in another dtype than q's gives garbage (f64 with f32, PyTorch 2.13 on CPUs) or an error (CUDA).
        scores = call.placeholder(bias if mask is None else _emit_masked_bias(e, bias, mask))
        call.add(f"attn_mask={scores}.to({call.placeholder(qkv[0])}.dtype)")
    if causal:
        call.add(causal if mask is None else causal.replace("{mask}", call.placeholder(mask)))
    return call.set("scale", scale).set("enable_gqa", a["heads"] != a["kv_heads"], default=False).emit(e, name="x")


def _emit_position_attention(e: Emitter, node: Node, qkv: tuple[Var, Var, Var], seen: Var, scale: float | None) -> Var:
    """Emit and return softmax(scale · q kᵀ) v over the visible keys; `seen` is a `KeyVisibility`. The statement calls
    the snippet `attend`, which chooses between a window kernel, flex_attention and masked attention."""
    a, call = node.attrs, FunctionCall("attend").add(*qkv, seen).set("scale", scale)
    if is_dense(node) and a["window"] is not None:
        call.set("window", e.attr(node, "window")).set("keep_first", e.attr(node, "keep_first"), default=0)
    return call.set("softcap", e.attr(node, "softcap")).add_named(sinks=node.operand("sinks")).emit(e, name="x")


def _emit_masked_bias(e: Emitter, bias: Value, mask: Operand) -> Var:
    """Emit and return `bias` with −∞ where `mask` is False; unchanged where the mask is None at run time. If the mask
    is hoisted, layers with the same bias share the result: it is hoisted as well if the bias is, else emitted once in
    the scope of the bias."""
    text, scores = "{0}.masked_fill(~{1}, -math.inf)", e[bias]
    if isinstance(mask, Var) and mask.type != "Tensor":
        text = f"{{0}} if {{1}} is None else {text}"
    shared = isinstance(mask, Var) and e.is_hoisted(mask)
    if shared and isinstance(scores, Var) and e.is_hoisted(scores):
        return e.hoist((text, scores, mask), text, scores, mask, name="bias")
    if not shared or bias.producer is None or bias.producer.scope == e.scope:
        return e.emit(text, scores, mask, name="bias", replaces=0)
    return e.emit_once((text, scores, mask), bias.producer.scope, text, scores, mask, name="bias")


# -- caches


def _emit_cache_update(e: Emitter, node: Node, k: Var, v: Var | None, mask: Operand | None) -> tuple[Var, Var | None]:
    """Emit the write of new keys and values to the cache of `node`; return the (keys, values) that `mask` covers.
    Without a cache at run time these are `k` and `v`, rounded if the cache would store integers. All are [batch,
    kv_heads, keys, width]; values are None if `v` is."""
    kv_heads = find_caches(node)[0].type.shape[1]
    assert isinstance(kv_heads, int)
    widths = [node.required_operand("k").width // kv_heads]
    if v is not None:
        widths.append(node.required_operand("v").width // kv_heads)
    length, rest, kind, positions = "length", "", "KVCache" if v is not None else "KeyCache", emit_query_positions(e)
    if (room := find_rolling_capacity(node)) is not None:
        slots, keep = room
        length, kind, positions = f"min({slots}, length)", f"Rolling{kind}", emit_written_positions(e)
        rest = f", {keep}" if keep else ""
    bits = node.attrs.get("cache_bits")
    scaled = add_scales(e, node) if bits is None else tuple(find_scales(e, node))
    like = "{like}" if scaled is None else "{like}.new_empty(0, dtype=torch.uint8)"
    if bits is not None:
        dtype, codes = ("torch.int8", 1) if bits == 8 else ("torch.uint8", 2)  # codes per stored element
        like, widths = f"{{like}}.new_empty(0, dtype={dtype})", [width // codes for width in widths]
    slot = CacheSlot("cache", f"{kind}(batch, {kv_heads}, {length}, {', '.join(map(str, widths))}, {like}{rest})", kind)
    assert mask is not None
    # A mask and the `keys` of a KeyVisibility both have the keys on their last axis.
    keys = ".keys" if isinstance(mask, Var) and mask.type == "KeyVisibility" else ""
    call = FunctionCall("{0}.update", [slot]) if scaled is None else FunctionCall("update_float8").add(slot)
    if bits is not None:
        call.function = "update_quantized_keys" if v is None else "update_quantized"
    call.add(*([k] if v is None else [k, v]), positions)
    call.add(f"{call.placeholder(mask)}{keys}", *(scaled or ()), *([] if bits is None else [str(bits)]))
    unchanged = (
        "" if bits is not None else "{1} if {0} is None else " if v is None else "({1}, {2}) if {0} is None else "
    )
    if v is None:
        return e.emit(f"{unchanged}{call}", *call.operands, name="k", replaces=1), None
    outputs = e.emit_tuple(f"{unchanged}{call}", *call.operands, names=("k", "v"))
    return outputs[0], outputs[1]


def _emit_cross_cache(e: Emitter, k: Var, v: Var, mask: Operand | None) -> tuple[Var, Var, Operand | None]:
    """Emit and return the keys, values and mask of a cross-attention, through its cache. At run time they are computed
    and stored if there is an encoder output; without one they are read from the cache."""
    text_k, operands_k = e.inline(k, 2)
    text_v, operands_v = e.inline(v, 2 + len(operands_k))
    encoded = next(o for o in operands_k if isinstance(o, Var))
    encoded.name, encoded.type = "encoded", "Tensor | None"
    operands: list[Operand] = [CacheSlot("cross", "CrossCache()", "CrossCache"), encoded, *operands_k, *operands_v]
    tensors, names = f"{text_k}, {text_v}", ["k", "v"]
    if mask is not None:
        tensors, names = f"{tensors}, {{{len(operands)}}}", [*names, "shown"]
        operands.append(mask)
    text = f"cache_source({{0}}, None if {{1}} is None else ({tensors}))"
    outputs = e.emit_tuple(text, *operands, names=tuple(names))
    return outputs[0], outputs[1], outputs[2] if mask is not None else None


@lowering(ops.relative_attention, when=_refuse_own_cache)
def _relative_attention(e: Emitter, node: Node) -> None:
    heads = node.attrs["heads"]
    q, k, v = (e.split_heads(node.required_operand(n), heads) for n in ("q", "k", "v"))
    if node in e.cached:
        mask, _ = emit_mask(e, node)
        assert mask is not None
        k, cached_v = _emit_cache_update(e, node, k, v, mask)
        v = cached_v or v
        distances = emit_distance(e, emit_query_positions(e), emit_cached_positions(e, node))
    else:
        queries, keys = (e.emit(ARANGE, node.required_operand(n), name="at") for n in ("q", "k"))
        distances = e.emit(DISTANCE, queries, keys, name="distance")
        seen = "{0}[:, None] <= 0" if node.attrs["causal"] else "torch.ones_like({0}[:, None], dtype=torch.bool)"
        mask = e.emit(seen, distances, name="mask")
        if (key_mask := node.operand("key_mask")) is not None:
            mask = e.emit("{0} & {1}", mask, emit_key_mask(e, key_mask), name="mask", replaces=0)
    call = FunctionCall("relative_attention").add(q, k, v, *map(node.operand, ("key_table", "value_table")))
    e.record_heads(node.output, heads, call.add(distances, mask).emit(e, name="x"))


@lowering(ops.lightning_index, when=_refuse_own_cache)
def _lightning_index(e: Emitter, node: Node) -> Var:
    q = e.split_heads(node.required_operand("q"), node.attrs["heads"], "q")
    k = e.split_heads(node.required_operand("k"), 1, "k")
    mask, _ = emit_mask(e, node)
    if node in e.cached:
        k, _ = _emit_cache_update(e, node, k, None, mask)
    call = FunctionCall("lightning_index").add(q, k, node.required_operand("weights"), str(node.attrs["top_k"]))
    return call.add_named(seen=mask).emit(e, name="chosen")


@lowering(ops.block_sparse_attention)
def _block_sparse_attention(e: Emitter, node: Node) -> None:
    heads, kv_heads, mask = node.attrs["heads"], node.attrs["kv_heads"], node.operand("key_mask")
    call = FunctionCall("block_sparse_attention").add(e.split_heads(node.required_operand("q"), heads, "q"))
    call.add(*(e.split_heads(node.required_operand(name), kv_heads, name) for name in "kv"))
    if mask is not None:
        call.add(emit_key_mask(e, mask))
    for name, attr in node.op.attrs.items():
        if name not in ("heads", "kv_heads"):
            call.set(name, node.attrs[name], attr.default)
    e.record_heads(node.output, heads, call.emit(e, name="x"))
