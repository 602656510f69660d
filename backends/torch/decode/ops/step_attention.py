"""Attention of a decode step: the QKV projection in one kernel, and attention of the new token to the cached keys."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.passes.analysis.states import find_cache_sharers
from weft.passes.analysis.tokens.scores import explain_unsupported_scores

from ...kernels import decode_attention, latent_decode, latent_qk
from ...kernels.shared.launch import DTYPES
from ...ops.calls import FunctionCall
from ...ops.compact_caches import make_scale_refs
from ...program.stateful_nodes import find_rolling_capacity
from ...program.statements import CacheSlot, Operand, Var
from ..step_emitter import Refusal, StepEmitter, step_lowering
from .step_linear import refuse_gemv

CACHE = CacheSlot("cache", "", "")
STRIDE_ARGUMENTS = {"chunked": "chunk", "dilated": "dilation"}  # patterns of kernels: their argument for the stride


def _refuse_projection(e: StepEmitter, node: Node) -> str | None:
    """Return None, or the reason (str) why no kernel can compute the projection `node` and write to the cache."""
    together = find_cache_sharers(next(iter(node.outputs[0].users)))
    if why := next((why for n in together if (why := _refuse_scores(n)) is not None), None):
        return f"an attention to its keys has no kernel: {why}"
    if node.op is ops.latent_qk:
        return None if e.find_node_scope(node, "weight") == node.scope else "its weights are in other modules"
    scope = e.find_node_scope(node, "weight", "bias", "q_norm", "k_norm")
    if scope != node.scope and not e.can_move_state(together[0], scope):
        return "its weights are in other modules, and its cache cannot move to them"
    packed = e.get_weight(node.operand("weight")) is not None
    return None if packed else "its weights cannot be packed into one tensor"


@step_lowering(ops.norm_qkv, ops.latent_qk, when=_refuse_projection)
def defer_projection(e: StepEmitter, node: Node) -> tuple[Var, ...]:
    """Return placeholders for the outputs of the projection; the attention that reads them emits the kernel call."""
    return e.make_placeholders(node)


@step_lowering(ops.lightning_index)
def refuse_index(e: StepEmitter, node: Node) -> None:
    """Record that no kernel computes a lightning index; the node falls back to the lowering of the model."""
    e.record_fallback("no kernel chooses keys")


@step_lowering(ops.attention, ops.relative_attention)
def emit_attention(e: StepEmitter, node: Node) -> Var | None:
    """Emit attention of the new token to its cache and return the result; None if there is no cache or no kernel."""
    if node not in e.cached:
        return None
    together, latent = find_cache_sharers(node), node.op is ops.attention and node.operand("v") is None
    if reason := next((why for n in together if (why := _refuse_scores(n)) is not None), None):
        e.record_fallback(reason)
        return None
    slopes, projection = _find_slopes(node), node.required_operand("q").producer
    if latent and slopes is not None:
        return None
    if together[0] is not node:
        return _emit_shared(e, node, slopes, together[0])
    if latent:
        return _emit_latent(e, node, projection if projection is not None and projection.op is ops.latent_qk else None)
    if projection is not None and projection.op is ops.norm_qkv:
        return _emit_projected(e, node, projection, slopes)
    return _emit_separate(e, node, slopes)


def _refuse_scores(node: Node) -> str | None:
    a = node.attrs
    if node.op is ops.relative_attention:
        return "its keys and values depend on distances"
    if a["cache_bits"] is not None:
        return "no kernel reads a cache of integers"
    if node.operand("key_mask") is not None:
        return "it has a key mask"
    return explain_unsupported_scores(node.operand("bias"), a["pattern"], a["keep_first"], node.operand("v") is None)


def _find_slopes(node: Node) -> Value | None:
    """Return the ALiBi slopes [heads] of an attention that `_refuse_scores` accepts; None without ALiBi."""
    bias = node.operand("bias")
    return None if bias is None or bias.producer is None else bias.producer.inputs[0]


def _emit_projected(e: StepEmitter, node: Node, qkv: Node, slopes: Value | None) -> Var:
    """Emit and return `decode_attention` of the queries from `norm_qkv`, whose call also writes the cache."""
    weight, bias, norm = (e.get_weight(qkv.operand("weight")), e.get_weight(qkv.operand("bias")), e.find_norm(qkv))
    eps, normed = qkv.attrs["head_eps"], qkv.attrs["head_norm"]
    q_norm, k_norm = (e.make_norm("rms", eps, qkv.operand(n)) if normed else None for n in ("q_norm", "k_norm"))
    scope = e.find_scope(weight, norm, bias, q_norm, k_norm)
    inner = FunctionCall("norm_qkv").add(qkv.required_operand("x"), weight)
    cache, positions = inner.placeholder(_find_cache_operand(e, node, scope)), inner.placeholder(e.positions)
    inner.add(f"{cache}.k", f"{cache}.v", positions).add_named(bias=bias, norm=norm, q_norm=q_norm, k_norm=k_norm)
    inner.add_named(cos=qkv.operand("cosines"), sin=qkv.operand("sines"))
    inner.set("interleaved", qkv.attrs["interleaved"], default=False)
    _add_rolling(inner, node)
    of_heads = _make_scale_arguments(e, node)
    inner.add_named(**of_heads)
    if q_norm is not None:
        inner.add_named(tickets=e.emit_tickets(node.attrs["heads"] + node.attrs["kv_heads"]))
    call = FunctionCall("decode_attention", inner.operands).add(str(inner), f"{cache}.k", f"{cache}.v", positions)
    call.add_named(**of_heads)
    _add_scoring(e, call, node, slopes)
    e.scope = scope
    e.record_kernel("norm_qkv", _make_width_refusal(node), refuse_gemv, node=qkv)
    e.record_kernel("decode_attention", _make_attention_refusal(node))
    return call.emit(e, ".flatten(2)", name="attended")


def _emit_separate(e: StepEmitter, node: Node, slopes: Value | None) -> Var:
    """Emit and return `decode_attention` of computed queries, keys and values; the statement also fills the cache."""
    call, a = FunctionCall("decode_attention"), node.attrs
    heads = {"q": a["heads"], "k": a["kv_heads"], "v": a["kv_heads"]}
    q, k, v = (call.placeholder(e.split_heads(node.required_operand(n), count)) for n, count in heads.items())
    cache, positions = call.placeholder(_find_cache_operand(e, node)), call.placeholder(e.positions)
    of_heads = _make_scale_arguments(e, node)
    scales = ", ".join(call.placeholder(scale) for scale in of_heads.values())
    arguments = f"{cache}, {k}, {v}, {positions}"
    update = f"update_cache_float8({arguments}, {scales})" if scales else f"update_cache({arguments})"
    call.add(f"{q}.transpose(1, 2)", f"*{update}", positions).add_named(**of_heads)
    _add_scoring(e, call, node, slopes)
    e.record_kernel("decode_attention", _make_attention_refusal(node))
    return call.emit(e, ".flatten(2)", name="attended")


def _emit_shared(e: StepEmitter, node: Node, slopes: Value | None, writer: Node) -> Var:
    """Emit and return attention to the cache of the attention `writer`, which has stored the new keys and values."""
    a, cache = node.attrs, e.shared_caches[writer]
    latent, q = node.operand("v") is None, e.split_heads(node.required_operand("q"), a["heads"])
    call = FunctionCall("latent_decode" if latent else "decode_attention")
    if latent:
        call.add(f"{call.placeholder(q)}[:, :, 0]", f"{call.placeholder(cache)}.k", e.positions, str(a["value_dim"]))
        e.record_kernel("latent_decode", _make_latent_refusal(node))
    else:
        slot = call.placeholder(cache)
        call.add(f"{call.placeholder(q)}.transpose(1, 2)", f"{slot}.k", f"{slot}.v", e.positions)
        call.add_named(**_make_scale_arguments(e, node))
        e.record_kernel("decode_attention", _make_attention_refusal(node))
    _add_scoring(e, call, node, slopes)
    return call.emit(e, ".flatten(1)[:, None]" if latent else ".flatten(2)", name="attended")


def _find_cache_operand(e: StepEmitter, node: Node, scope: str | None = None) -> Operand:
    """Return the cache of `node`; one that several read is a variable in `scope`, recorded in `shared_caches`."""
    if len(find_cache_sharers(node)) == 1:
        return CACHE
    outer, e.scope = e.scope, e.scope if scope is None else scope
    e.shared_caches[node] = e.emit("{0}", CACHE, name="kept")
    e.shared_caches[node].type = "Any"
    e.scope = outer
    return e.shared_caches[node]


def _emit_latent(e: StepEmitter, node: Node, absorbed: Node | None) -> Var:
    """Emit `latent_decode`, whose values are part of its keys; `absorbed`: the node that computes them, or None."""
    call = FunctionCall("latent_decode")
    slot = _find_cache_operand(e, node)
    cache, positions = call.placeholder(slot), call.placeholder(e.positions)
    if absorbed is not None:
        call.add(str(_make_latent_call(e, node, absorbed, call, slot)), f"{cache}.k")
    else:
        q = call.placeholder(e.split_heads(node.required_operand("q"), node.attrs["heads"]))
        k = call.placeholder(e.split_heads(node.required_operand("k"), 1))
        call.add(f"{q}[:, :, 0]", f"update_latent_cache({cache}, {k}, {positions})")
    call.add(positions, str(node.attrs["value_dim"]))
    _add_scoring(e, call, node, None)
    e.record_kernel("latent_decode", _make_latent_refusal(node))
    return call.emit(e, ".flatten(1)[:, None]", name="attended")


def _make_latent_call(e: StepEmitter, node: Node, absorbed: Node, outer: FunctionCall, cache: Operand) -> FunctionCall:
    """Return and record the call of `latent_qk` for `absorbed`, an argument of `outer`, which writes to `cache`."""
    call = FunctionCall("latent_qk", outer.operands)
    q, latent, weight, cos, sin = (absorbed.required_operand(n) for n in ("q", "latent", "weight", "cosines", "sines"))
    call.add(q, latent, e.get_weight(weight)).add(f"{call.placeholder(cache)}.k", e.positions, cos, sin)
    call.add_named(norm=e.find_norm(absorbed)).set("interleaved", absorbed.attrs["interleaved"], default=False)
    _add_rolling(call, node)
    (rows, rank), heads = weight.type.concrete({}), node.attrs["heads"]
    rope = latent.width - rank
    refusals = refuse_gemv, lambda dtype: latent_qk.refusal(rank, rows // heads, rope, dtype)
    e.record_kernel("latent_qk", *refusals, node=absorbed)
    return call


def _make_scale_arguments(e: StepEmitter, node: Node) -> dict[str, Operand]:
    """Return the keyword arguments k_scale and v_scale of a cache in FP8; {} for other caches."""
    return dict(zip(("k_scale", "v_scale"), make_scale_refs(e, node) or (), strict=False))


def _add_scoring(e: StepEmitter, call: FunctionCall, node: Node, slopes: Value | None) -> None:
    """Add the keyword arguments to `call` that determine visible keys and scores. They are start, scale, softcap,
    sinks, slopes, window, keep_first, rolling, chunk or dilation, and tickets."""
    a = node.attrs
    if e.reads_prompts:
        call.add_named(start=e.start)
    call.set("scale", a["scale"]).set("softcap", a["softcap"])
    call.add_named(sinks=node.operand("sinks"), slopes=slopes)
    if a["window"] is not None:
        call.set("window", a["window"])
        if not _add_rolling(call, node):
            call.set("keep_first", a["keep_first"], default=0)
    if (name := STRIDE_ARGUMENTS.get(a["pattern"])) is not None:
        call.set(name, a["stride"])
    call.add_named(tickets=e.emit_tickets(a["heads"]))


def _add_rolling(call: FunctionCall, node: Node) -> bool:
    """Return whether the cache of `node` rolls; if so, add the keyword arguments rolling and keep_first to `call`."""
    room = find_rolling_capacity(node)
    if room is not None:
        call.set("rolling", True).set("keep_first", room[1], default=0)
    return room is not None


def _make_latent_refusal(node: Node) -> Refusal:
    rank, width = node.attrs["value_dim"], node.required_operand("k").width
    return lambda dtype: latent_decode.refusal(rank, width - rank, dtype)


def _make_attention_refusal(node: Node) -> Refusal:
    a = node.attrs
    width, value_width = (node.required_operand(n).width // a["kv_heads"] for n in "kv")
    return lambda dtype: decode_attention.refusal(width, value_width, dtype)


def _make_width_refusal(node: Node) -> Refusal:
    width = node.required_operand("v").width // node.attrs["kv_heads"]

    def refuse(dtype: torch.dtype) -> str | None:
        if width % 2:
            return "an odd number of elements per head"
        return None if dtype in DTYPES else f"caches are {dtype}"

    return refuse
