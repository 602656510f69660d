"""Lowerings of attention: ONNX Runtime's GroupQueryAttention where its contract fits, else the standard operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value

from ..targets import Target
from .emitter import ONNX_DTYPES, Emitter
from .layers import MS, rope_tables
from .lowering import ORT, lowering

Out = onnx.Value


# -- com.microsoft GroupQueryAttention: cache, rotary positions and packed projections in one kernel


@dataclass(frozen=True)
class _Gqa:
    """What one GroupQueryAttention node covers: the values it reads, and the rotary part if it is absorbed."""

    query: Value
    key: Value | None
    value: Value | None
    rope: Node | None


def _producer(value: Value | None, op: str) -> Node | None:
    node = value.producer if value is not None else None
    return node if node is not None and node.op.name == op else None


def _absorbed_ropes(node: Node) -> tuple[Node, Node] | None:
    """The rotations of q and k, if they turn alike and the kernel can do the same."""
    q, k = (_producer(v, "rope") for v in node.inputs[:2])
    if q is None or k is None or q.inputs[1:] != k.inputs[1:] or q.inputs[1] is not node.operand("positions"):
        return None
    alike = all(q.attrs[a] == k.attrs[a] for a in ("interleaved", "amplitude"))
    alike &= (q.attrs["heads"], k.attrs["heads"]) == (node.attrs["heads"], node.attrs["kv_heads"])
    frequencies = q.inputs[2]
    fits = alike and isinstance(frequencies, Param) and frequencies.width % 8 == 0
    return (q, k) if fits else None


def _cover(node: Node) -> _Gqa:
    q, k, v = (node.operand(n) for n in "qkv")
    rope = None
    if (ropes := _absorbed_ropes(node)) is not None:
        rope, (q, k) = ropes[0], (r.inputs[0] for r in ropes)
    assert q is not None
    packed = _producer(q, "split")
    if packed is not None and packed.outputs == (q, k, v) and packed.inputs[0] is not None:
        return _Gqa(packed.inputs[0], None, None, rope)
    return _Gqa(q, k, v, rope)


def _gqa_refusal(node: Node, target: Target) -> str | None:
    q, k, v = (node.operand(n) for n in "qkv")
    a = node.attrs
    if v is None:
        return "it caches keys and values apart"
    assert q is not None and k is not None
    head = k.width // a["kv_heads"]
    if not a["causal"] or node.operand("past_k") is None:
        return "only causal attention with a cache"
    if node.operand("key_mask") is None:
        return "no mask tells the total length"
    if node.operand("bias") is not None:
        return "a bias has no place in the shared-buffer kernel"
    if a["pattern"] != "dense" or a["rolling"]:
        return f"pattern {a['pattern']}{' with a rolling cache' if a['rolling'] else ''}"
    if v.width != k.width or head % 8:
        return f"head sizes {head} and {v.width // a['kv_heads']}: must be equal and a multiple of 8"
    if target.device == "cuda" and q.type.dtype.name not in ("f16", "bf16"):
        return f"the CUDA kernel computes in f16 and bf16, not {q.type.dtype}"
    return None


def _gqa_reads(node: Node, target: Target) -> Iterable[Value]:
    cover = _cover(node)
    extra = (node.operand(n) for n in ("key_mask", "sinks", "past_k", "past_v"))
    return [v for v in (cover.query, cover.key, cover.value, *extra) if v is not None]


def _lengths(e: Emitter, mask: Value) -> tuple[Out, Out]:
    """GroupQueryAttention's seqlens_k [batch] (last valid index) and total_sequence_length (host scalar), int32."""
    int32 = int(onnx.DataType.INT32)

    def make() -> tuple[Out, Out]:
        valid = e.op("ReduceSum", e[mask], e.constant([1]), keepdims=0, hint="valid")
        last = e.op("Cast", e.op("Sub", valid, e.constant([1])), to=int32, hint="seqlens_k")
        size = e.op("Squeeze", e.op("Shape", e[mask], start=1, end=2), e.constant([0]))
        return last, e.op("Cast", size, to=int32, hint="total_length")

    made: tuple[Out, Out] = e.memo(("lengths", mask), make)
    return made


@lowering(ops.attention, targets=ORT, when=_gqa_refusal, reads=_gqa_reads)
def GroupQueryAttention(e: Emitter, node: Node) -> list[Out]:
    a, cover = node.attrs, _cover(node)
    mask = node.operand("key_mask")
    assert mask is not None
    cos = sin = None
    if cover.rope is not None:
        frequencies = cover.rope.inputs[2]
        assert frequencies is not None
        cos, sin = rope_tables(e, frequencies, cover.rope.attrs["amplitude"], cover.query)
    last, total = _lengths(e, mask)
    made: list[Out] = e.op(
        "GroupQueryAttention",
        e[cover.query],
        e[cover.key],
        e[cover.value],
        e[node.operand("past_k")],
        e[node.operand("past_v")],
        last,
        total,
        cos,
        sin,
        None,
        None,
        e[node.operand("sinks")],
        domain=MS,
        outputs=3,
        num_heads=a["heads"],
        kv_num_heads=a["kv_heads"],
        scale=a["scale"],
        softcap=a["softcap"],
        local_window_size=-1 if a["window"] is None else a["window"],
        do_rotary=int(cover.rope is not None),
        rotary_interleaved=int(cover.rope is not None and cover.rope.attrs["interleaved"]),
    )
    return made


# -- ai.onnx Attention


def _standard_refusal(node: Node, target: Target) -> str | None:
    if node.attrs["rolling"]:
        return "a rolling cache needs the positions of its slots"
    if node.operand("sinks") is not None:
        return "the standard operator has no sinks"
    if node.operand("bias") is not None and node.operand("past_k") is not None:
        return "a bias by position does not fit the slots of a cache"
    return None


def _mask(e: Emitter, node: Node) -> Out | None:
    """The boolean mask [batch or 1, 1, seq, keys] of what is_causal does not say; None if nothing is left."""
    a = node.attrs
    cached = node.operand("past_k") is not None
    key_mask = node.operand("key_mask")
    plain = not cached and a["window"] is None and a["pattern"] == "dense"
    key = ("mask", cached, node.operand("positions"), key_mask, plain or a["causal"], a["window"], a["pattern"])
    keys = node.operand("past_k") if cached else node.inputs[1]
    return e.memo((*key, a["stride"], a["summary"], keys), lambda: _build_mask(e, node, plain, keys))


def _build_mask(e: Emitter, node: Node, plain: bool, keys: Value | None) -> Out | None:
    cached, key_mask, positions = node.operand("past_k"), node.operand("key_mask"), node.operand("positions")
    parts: list[Any] = []
    if key_mask is not None and cached is None:
        # With a cache, causality by position already hides the slots that hold nothing.
        keys_seen = e.op("Unsqueeze", e.op("Cast", e[key_mask], to=int(ONNX_DTYPES["bool"])), e.constant([1, 2]))
        if plain:  # ONNX Runtime does not broadcast the query axis of a mask
            queries = e.op("Shape", e[node.inputs[0]], start=1, end=2)
            ones = e.constant([1])
            keys_seen = e.op("Expand", keys_seen, e.op("Concat", ones, ones, queries, ones, axis=0))
        parts.append(keys_seen)
    if not plain:
        assert keys is not None
        key_at = _range(e, e[keys], 2 if cached else 1)
        if positions is not None:
            query_at = e.op("Unsqueeze", e[positions], e.constant([1, 3]))
        else:
            query_at = e.op("Unsqueeze", _range(e, e[node.inputs[0]], 1), e.constant([1]))
        parts += _pattern(e, node, query_at, key_at)
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = e.op("And", mask, part)
    known: Out = mask
    return known


def _range(e: Emitter, value: Out | None, axis: int) -> Any:
    size = e.op("Squeeze", e.op("Shape", value, start=axis, end=axis + 1), e.constant([0]))
    return e.op("Range", e.constant(0), size, e.constant(1))


def _pattern(e: Emitter, node: Node, query_at: Any, key_at: Any) -> list[Any]:
    """Conditions on positions, as `ops.softmax_attention.allowed` defines them; ranks broadcast to [.., seq, keys]."""
    a = node.attrs
    distance = e.op("Sub", query_at, key_at)
    size = distance if a["causal"] else e.op("Abs", distance)
    stride = e.constant(a["stride"])

    def below(limit: int) -> Any:
        return e.op("Less", size, e.constant(limit))

    def divisible() -> Any:
        return e.op("Equal", e.op("Mod", distance, stride), e.constant(0))

    def same_block() -> Any:
        return e.op("Equal", *(e.op("Sub", at, e.op("Mod", at, stride)) for at in (query_at, key_at)))

    parts = [e.op("GreaterOrEqual", distance, e.constant(0))] if a["causal"] else []
    if a["window"] is not None:
        parts.append(below(a["window"]))
    if a["pattern"] == "dilated":
        parts.append(divisible())
    elif a["pattern"] == "strided":
        parts.append(e.op("Or", below(a["stride"]), divisible()))
    elif a["pattern"] == "fixed":
        tail = e.op("GreaterOrEqual", e.op("Mod", key_at, stride), e.constant(a["stride"] - a["summary"]))
        parts.append(e.op("Or", same_block(), tail))
    elif a["pattern"] == "chunked":
        parts.append(same_block())
    if not parts:
        parts.append(e.op("GreaterOrEqual", size, e.constant(0)))
    return parts


def _heads_first(e: Emitter, value: Value | None, heads: int) -> Any:
    """[batch, seq, heads·d] as [batch, heads, seq, d]."""
    assert value is not None
    apart = e.op("Reshape", e[value], e.constant([0, 0, heads, value.width // heads]))
    return e.op("Transpose", apart, perm=[0, 2, 1, 3])


@lowering(ops.attention, when=_standard_refusal)
def Attention(e: Emitter, node: Node) -> list[Out]:
    a = node.attrs
    q, k, v = (node.operand(n) for n in "qkv")
    bias, past_k, past_v = (node.operand(n) for n in ("bias", "past_k", "past_v"))
    mask = _mask(e, node)
    plain = past_k is None and a["window"] is None and a["pattern"] == "dense"
    if bias is not None:
        dtype = bias.type.dtype
        low = e.scalar(float("-inf"), dtype)
        mask = e[bias] if mask is None else e.op("Where", mask, e[bias], low)
    common: dict[str, Any] = {
        "is_causal": int(plain and a["causal"]),
        "scale": a["scale"],
        "softcap": a["softcap"],
    }
    if past_k is None and v is not None:
        heads = {"q_num_heads": a["heads"], "kv_num_heads": a["kv_heads"]}
        return [e.op("Attention", e[q], e[k], e[v], mask, **common, **heads)]
    kv = [_heads_first(e, x, a["kv_heads"]) for x in (k, v) if x is not None]
    present: list[Out] = []
    if past_k is not None:
        start = _first_position(e, node.operand("positions"))
        kv = present = [
            e.op("TensorScatter", e[past], new, start, axis=2) for past, new in zip((past_k, past_v), kv, strict=False)
        ]
    y = e.op("Attention", _heads_first(e, q, a["heads"]), kv[0], kv[-1], mask, **common)
    if v is None:  # whole keys served as values: cheaper than cutting the values out of a cache
        y = e.op("Slice", y, e.constant([0]), e.constant([a["value_dim"]]), e.constant([3]))
    joined = e.op("Reshape", e.op("Transpose", y, perm=[0, 2, 1, 3]), e.constant([0, 0, node.output.width]))
    return [joined, *present]


def _first_position(e: Emitter, positions: Value | None) -> Any:
    """Where each row's keys of this call go: positions[:, 0], [batch]."""
    return e.memo(("first", positions), lambda: e.op("Gather", e[positions], e.constant(0), axis=1))
