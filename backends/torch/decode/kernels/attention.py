"""Attention of a decode step: queries, keys and values in one kernel, and the new token's attention to its cache."""

from __future__ import annotations

import torch

from weft.ir.graph import Node, Value
from weft.passes.analysis.states import sharing

from ...kernels import decode_attention, latent_decode
from ...kernels.shared.launch import DTYPES
from ...ops.calls import Call
from ...ops.elementwise import number
from ...ops.float8_caches import scales
from ...program.positions import rolled
from ...program.statements import CacheSlot, Operand, Var
from .. import patterns
from ..emitter import Refusal, StepEmitter
from ..patterns import SelfAttention
from . import latents
from .latents import Absorbed
from .products import few_rows, packed

CACHE = CacheSlot("cache", "", "")


def attention(e: StepEmitter, node: Node) -> Var | None:
    """The attention of one token per row to what is cached; the model's own text where no kernel takes its scores."""
    if node not in e.cached:
        return None
    if node.attrs.get("cache_bits") is not None:
        e.declined("no kernel reads a cache of whole numbers")
        return None
    together = sharing(node)
    if reason := next((s for n in together if isinstance(s := patterns.slopes(n), str)), None):
        e.declined(reason)
        return None
    slopes = patterns.slopes(node)
    assert not isinstance(slopes, str)
    if together[0] is not node:
        return None if node.operand("v") is None and slopes is not None else _reading(e, node, slopes, together[0])
    if node.operand("v") is None:
        return _latent(e, node) if slopes is None else None
    found = patterns.self_attention(node)
    made = None if isinstance(found, str) else _projected(e, found, slopes)
    return made or _written(e, node, slopes, found if isinstance(found, str) else "weights do not stand side by side")


def index(e: StepEmitter, node: Node) -> Var | None:
    """No choice of keys: the model's own text makes it."""
    e.declined("no kernel chooses keys")
    return None


def _projected(e: StepEmitter, found: SelfAttention, slopes: Value | None) -> Var | None:
    """`norm_qkv`, which writes the cache, then `decode_attention`."""
    packing = packed(e, [h.projection for h in (found.q, found.k, found.v)])
    if packing is None:
        return None
    (weight, bias), source, rope = packing, found.q.projection.source, found.q.rope
    norm = e.norm(source.node)
    q_norm, k_norm = e.norm(found.q.norm), e.norm(found.k.norm)
    scope = e.around(weight, norm, bias, q_norm, k_norm)
    # A statement with a cache that moves out changes how caches nest; `lower_step` checks that, and tries without.
    if scope != e.scope and not e.moves:
        return None
    qkv = Call("norm_qkv").give(source.x, weight)
    cache, positions = qkv.place(_cache(e, found.node, scope)), qkv.place(e.positions)
    qkv.give(f"{cache}.k", f"{cache}.v", positions).named(bias=bias, norm=norm, q_norm=q_norm, k_norm=k_norm)
    if rope is not None:
        cos, sin = _tables(e, rope)
        qkv.named(cos=cos, sin=sin).set("interleaved", rope.attrs["interleaved"], default=False)
    _roll(qkv, found.node)
    of_heads = _scales(e, found.node)
    qkv.named(**of_heads)
    if q_norm is not None:
        qkv.named(tickets=e.tickets(found.node.attrs["heads"] + found.node.attrs["kv_heads"]))
    call = Call("decode_attention", qkv.operands).give(str(qkv), f"{cache}.k", f"{cache}.v", positions)
    call.named(**of_heads)
    _score(e, call, found.node, slopes)
    e.scope = scope
    done = ["norm"] * (norm is not None) + ["projections"] + ["rotation"] * (rope is not None) + ["cache"]
    e.chose("norm_qkv", _heads(found), few_rows, parts=", ".join(done))
    e.chose("decode_attention", _attends(found.node))
    return call.emit(e, ".flatten(2)", name="attended")


def _written(e: StepEmitter, node: Node, slopes: Value | None, reason: str) -> Var:
    """`decode_attention` of queries, keys and values that other statements make."""
    call, a = Call("decode_attention"), node.attrs
    q, k, v = (call.place(e.heads(node.required(n), a["heads" if n == "q" else "kv_heads"])) for n in "qkv")
    cache, positions = call.place(_cache(e, node)), call.place(e.positions)
    of_heads = _scales(e, node)
    named = ", ".join(call.place(scale) for scale in of_heads.values())
    given = f"{cache}, {k}, {v}, {positions}"
    how = f"written_bytes({given}, {named})" if named else f"written({given})"
    call.give(f"{q}.transpose(1, 2)", f"*{how}", positions).named(**of_heads)
    _score(e, call, node, slopes)
    e.declined(f"norm_qkv does not make its operands: {reason}")
    e.chose("decode_attention", _attends(node))
    return call.emit(e, ".flatten(2)", name="attended")


def _reading(e: StepEmitter, node: Node, slopes: Value | None, writer: Node) -> Var:
    """Attention to the cache of another, `writer`, which has written the keys and values of the token."""
    a, cache = node.attrs, e.kept[writer]
    latent, q = node.operand("v") is None, e.heads(node.required("q"), a["heads"])
    call = Call("latent_decode" if latent else "decode_attention")
    if latent:
        rank, width = a["value_dim"], node.required("k").width
        call.give(f"{call.place(q)}[:, :, 0]", f"{call.place(cache)}.k", e.positions, str(rank))
        e.chose("latent_decode", lambda dtype: latent_decode.refusal(rank, width - rank, dtype))
    else:
        kept = call.place(cache)
        call.give(f"{call.place(q)}.transpose(1, 2)", f"{kept}.k", f"{kept}.v", e.positions)
        call.named(**_scales(e, node))
        e.chose("decode_attention", _attends(node))
    _score(e, call, node, slopes)
    return call.emit(e, ".flatten(1)[:, None]" if latent else ".flatten(2)", name="attended")


def _cache(e: StepEmitter, node: Node, scope: str | None = None) -> Operand:
    """The cache of `node`, which stands in `scope`; as a value, where other attentions read it, too."""
    if len(sharing(node)) == 1:
        return CACHE
    outer, e.scope = e.scope, e.scope if scope is None else scope
    e.kept[node] = e.emit("{0}", CACHE, name="kept")
    e.kept[node].type = "Any"
    e.scope = outer
    return e.kept[node]


def _latent(e: StepEmitter, node: Node) -> Var:
    """Attention whose keys are also its values: latent attention with weights absorbed."""
    rank, width = node.attrs["value_dim"], node.required("k").width
    found = latents.absorbed(node)
    call = Call("latent_decode")
    kept = _cache(e, node)
    cache, positions = call.place(kept), call.place(e.positions)
    queries = None if isinstance(found, str) else _against_latents(e, node, found, call, kept)
    if queries is not None:
        call.give(str(queries), f"{cache}.k")
    else:
        e.declined(f"latent_qk does not make its operands: {found if isinstance(found, str) else 'weights lie apart'}")
        q = call.place(e.heads(node.required("q"), node.attrs["heads"]))
        k = call.place(e.heads(node.required("k"), 1))
        call.give(f"{q}[:, :, 0]", f"written_latent({cache}, {k}, {positions})")
    call.give(positions, str(rank))
    _score(e, call, node, None)
    e.chose("latent_decode", lambda dtype: latent_decode.refusal(rank, width - rank, dtype))
    return call.emit(e, ".flatten(1)[:, None]", name="attended")


def _against_latents(e: StepEmitter, node: Node, found: Absorbed, outer: Call, cache: Operand) -> Call | None:
    """`latent_qk`, which writes the `cache`, within the call `outer`; None where its weights are not in this scope."""
    weight, norm = e.weight(found.weight), e.norm(found.norm.node)
    if e.around(weight, norm) != e.scope:
        return None
    call = Call("latent_qk", outer.operands)
    call.give(found.q, found.kv, weight, f"{call.place(cache)}.k", e.positions, *_tables(e, found.rope))
    call.named(norm=norm).set("interleaved", found.rope.attrs["interleaved"], default=False)
    _roll(call, node)
    done = ["absorption"] + ["norm"] * (norm is not None) + ["rotation", "cache"]
    e.chose("latent_qk", latents.refusal(found, node.attrs["heads"]), parts=", ".join(done))
    return call


def _scales(e: StepEmitter, node: Node) -> dict[str, Operand]:
    """Return the keywords for the scales of caches in FP8, if `node` has such."""
    return dict(zip(("k_scale", "v_scale"), scales(e, node) or (), strict=False))


def _score(e: StepEmitter, call: Call, node: Node, slopes: Value | None) -> None:
    """Add the keywords that say which keys are seen and how they are scored."""
    a = node.attrs
    if e.reads_prompts:
        call.named(start=e.start)
    call.set("scale", a["scale"]).set("softcap", a["softcap"])
    call.named(sinks=node.operand("sinks"), slopes=slopes)
    if a["window"] is not None:
        call.set("window", a["window"])
        if not _roll(call, node):
            call.set("keep_first", a["keep_first"], default=0)
    if (name := patterns.SKIPPING.get(a["pattern"])) is not None:
        call.set(name, a["stride"])
    call.named(tickets=e.tickets(a["heads"]))


def _roll(call: Call, node: Node) -> bool:
    """Add the keywords that say that a cache rolls, if it does."""
    room = rolled(node)
    if room is not None:
        call.set("rolling", True).set("keep_first", room[1], default=0)
    return room is not None


def _tables(e: StepEmitter, rope: Node) -> tuple[Var, ...]:
    """cos and sin [batch·seq, pairs] of the angles of the tokens."""
    positions, frequencies = rope.required("positions"), rope.required("frequencies")
    amplitude = rope.attrs["amplitude"]
    text = "rotary({0}, {1})" if amplitude == 1 else f"rotary_scaled({{0}}, {{1}}, {number(amplitude)})"
    text = f"(table.flatten(0, 2) for table in {text})"
    given = e[positions], e[frequencies]
    return e.hoist_many((text, *given), text, *given, names=("cos", "sin"))


def _attends(node: Node) -> Refusal:
    a = node.attrs
    width, value_width = node.required("k").width // a["kv_heads"], node.required("v").width // a["kv_heads"]
    return lambda dtype: decode_attention.refusal(width, value_width, dtype)


def _heads(found: SelfAttention) -> Refusal:
    width = found.v.projection.value.width // found.node.attrs["kv_heads"]

    def refusal(dtype: torch.dtype) -> str | None:
        if width % 2:
            return "an odd number of elements per head"
        return None if dtype in DTYPES else f"caches are {dtype}"

    return refusal
