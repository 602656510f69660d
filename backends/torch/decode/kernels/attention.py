"""Attention of a decode step: queries, keys and values in one kernel, and the new token's attention to its cache."""

from __future__ import annotations

import torch

from weft.ir.graph import Node, Value

from ...kernels import decode_attention, latent_decode
from ...kernels.shared.launch import DTYPES
from ...ops.elementwise import number
from ...program.positions import rolled
from ...program.statements import CacheSlot, Operand, Var
from .. import patterns
from ..emitter import Refusal, StepEmitter, options
from ..patterns import SelfAttention, Slopes
from . import latents
from .latents import Absorbed
from .products import few_rows

Operands = list[Value | Operand]
CACHE = CacheSlot("cache", "", "")


def attention(e: StepEmitter, node: Node) -> Var | None:
    """The attention of one token per row to what is cached; the model's own text where no kernel takes its scores."""
    if node not in e.cached:
        return None
    slopes = patterns.seen(node)
    if isinstance(slopes, str):
        e.declined(slopes)
        return None
    if node.operand("v") is None:
        return _latent(e, node) if slopes.slopes is None else None
    found = patterns.self_attention(node)
    made = None if isinstance(found, str) else _projected(e, found, slopes)
    return made or _written(e, node, slopes, found if isinstance(found, str) else "weights do not stand side by side")


def _projected(e: StepEmitter, found: SelfAttention, slopes: Slopes) -> Var | None:
    """`norm_qkv`, which writes the cache, then `decode_attention`."""
    parts = (found.q, found.k, found.v)
    biases = [h.projection.bias for h in parts if h.projection.bias is not None]
    weight = e.packed([h.projection.weight for h in parts])
    bias = e.packed(biases) if biases else None
    if weight is None or (biases and bias is None):
        return None
    norm = e.norm(found.q.projection.source)
    head_norms = [None if h.norm is None else e.norm_node(h.norm) for h in parts[:2]]
    scope = e.around(weight, norm, bias, *head_norms)
    if scope != e.scope and not e.moves:
        return None
    operands: Operands = [found.q.projection.source.x, weight, CACHE, e.positions]
    text = options(operands, bias=bias, norm=norm, q_norm=head_norms[0], k_norm=head_norms[1])
    rope = found.q.rope
    if rope is not None:
        cos, sin = _tables(e, rope)
        text += options(operands, cos=cos, sin=sin) + (", interleaved=True" if rope.attrs["interleaved"] else "")
    text += _rolling(found.node)
    if head_norms[0] is not None:
        text += options(operands, tickets=e.tickets(found.node.attrs["heads"] + found.node.attrs["kv_heads"]))
    qkv = f"norm_qkv({{0}}, {{1}}, {{2}}.k, {{2}}.v, {{3}}{text})"
    more = _scores(e, found.node, slopes, operands)
    e.scope = scope
    done = ["norm"] * (norm is not None) + ["projections"] + ["rotation"] * (rope is not None) + ["cache"]
    e.chose("norm_qkv", _heads(found), few_rows(found.q.projection), parts=", ".join(done))
    e.chose("decode_attention", _attends(found.node))
    text = f"decode_attention({qkv}, {{2}}.k, {{2}}.v, {{3}}{more})"
    return e.emit(f"{text}.flatten(1)[:, None]", *operands, name="attended")


def _written(e: StepEmitter, node: Node, slopes: Slopes, reason: str) -> Var:
    """`decode_attention` of queries, keys and values that other statements make."""
    heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
    q, k, v = e.heads(_value(node, "q"), heads), *(e.heads(_value(node, n), kv_heads) for n in "kv")
    operands: Operands = [q, k, v, CACHE, e.positions]
    more = _scores(e, node, slopes, operands)
    e.declined(f"norm_qkv does not make its operands: {reason}")
    e.chose("decode_attention", _attends(node))
    text = f"decode_attention({{0}}[:, :, 0], *written({{3}}, {{1}}, {{2}}, {{4}}), {{4}}{more})"
    return e.emit(f"{text}.flatten(1)[:, None]", *operands, name="attended")


def _latent(e: StepEmitter, node: Node) -> Var:
    """Attention whose keys are also its values: latent attention with weights absorbed."""
    rank, width = node.attrs["value_dim"], _value(node, "k").width
    found = latents.absorbed(node)
    operands: list[Value | Operand] = [CACHE, e.positions]
    queries = None if isinstance(found, str) else _against_latents(e, node, found, operands)
    if queries is None:
        e.declined(f"latent_qk does not make its operands: {found if isinstance(found, str) else 'weights lie apart'}")
        operands += [e.heads(_value(node, "q"), node.attrs["heads"]), e.heads(_value(node, "k"), 1)]
        queries = "{2}[:, :, 0], written_latent({0}, {3}, {1})"
    more = _scores(e, node, Slopes(None), operands)
    e.chose("latent_decode", lambda dtype: latent_decode.refusal(rank, width - rank, dtype))
    text = f"latent_decode({queries}, {{1}}, {rank}{more})"
    return e.emit(f"{text}.flatten(1)[:, None]", *operands, name="attended")


def _against_latents(e: StepEmitter, node: Node, found: Absorbed, operands: list[Value | Operand]) -> str | None:
    """The text of `latent_qk`, which writes the cache, and of that; None where its weights are not in this scope."""
    weight, norm = e.weight(found.weight), e.norm(found.norm)
    if e.around(weight, norm) != e.scope:
        return None
    first = len(operands)
    operands += [found.q, found.kv, weight, *_tables(e, found.rope)]
    q, kv, up, cos, sin = (f"{{{i}}}" for i in range(first, len(operands)))
    text = options(operands, norm=norm) + (", interleaved=True" if found.rope.attrs["interleaved"] else "")
    done = ["absorption"] + ["norm"] * (norm is not None) + ["rotation", "cache"]
    e.chose("latent_qk", latents.refusal(found, node.attrs["heads"]), parts=", ".join(done))
    return f"latent_qk({q}, {kv}, {up}, {{0}}.k, {{1}}, {cos}, {sin}{text}{_rolling(node)}), {{0}}.k"


def _scores(e: StepEmitter, node: Node, slopes: Slopes, operands: Operands) -> str:
    """The keywords that say which keys are seen and how they are scored; their values join `operands`."""
    a = node.attrs
    text = "".join(f", {n}={number(a[n])}" for n in ("scale", "softcap") if a[n] is not None)
    text += options(operands, sinks=node.operand("sinks"), slopes=slopes.slopes)
    if a["window"] is not None:
        keep = f", keep_first={a['keep_first']}" if a["keep_first"] else ""
        text += f", window={a['window']}{_rolling(node) or keep}"
    if (name := patterns.SKIPPING.get(a["pattern"])) is not None:
        text += f", {name}={a['stride']}"
    return text + options(operands, tickets=e.tickets(a["heads"]))


def _rolling(node: Node) -> str:
    """The keywords that say that a cache rolls."""
    room = rolled(node)
    return "" if room is None else ", rolling=True" + (f", keep_first={room[1]}" if room[1] else "")


def _tables(e: StepEmitter, rope: Node) -> tuple[Var, ...]:
    """cos and sin [batch, pairs] of the angles of the token of each row."""
    positions, frequencies = _value(rope, "positions"), _value(rope, "frequencies")
    amplitude = rope.attrs["amplitude"]
    text = "rotary({0}, {1})" if amplitude == 1 else f"rotary_scaled({{0}}, {{1}}, {number(amplitude)})"
    text = f"(table[:, 0, 0] for table in {text})"
    given = e[positions], e[frequencies]
    return e.hoist_many((text, *given), text, *given, names=("cos", "sin"))


def _attends(node: Node) -> Refusal:
    a = node.attrs
    width, value_width = _value(node, "k").width // a["kv_heads"], _value(node, "v").width // a["kv_heads"]
    return lambda dtype: decode_attention.refusal(width, value_width, dtype)


def _heads(found: SelfAttention) -> Refusal:
    width = found.v.projection.value.width // found.node.attrs["kv_heads"]

    def refusal(dtype: torch.dtype) -> str | None:
        if width % 2:
            return "an odd number of elements per head"
        return None if dtype in DTYPES else f"caches are {dtype}"

    return refusal


def _value(node: Node, name: str) -> Value:
    value = node.operand(name)
    assert value is not None
    return value
