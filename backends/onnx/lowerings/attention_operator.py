"""Lowerings of attention to the standard operator Attention, with nodes for masks, biases, latent and rolling caches,
and of the lightning index, which chooses the keys of an attention."""

from __future__ import annotations

from typing import Any

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.ir.types import dtypes

from ...target import Backend
from ..lowering import lowering
from ..onnx_emitter import OnnxEmitter, emit_once
from .attention_mask import (
    count_keys,
    emit_additive_mask,
    emit_consecutive_positions,
    emit_first_position,
    emit_mask,
    is_causal_only,
    is_length_mask,
)
from .dequantized import dequantize_cache, quantize_cache

Out = onnx.Value
_END = 2**63 - 1  # end of a Slice of an axis of any size


def _find_refusal(node: Node, target: Backend) -> str | None:
    if node.attrs["rolling"]:
        mask = node.operand("key_mask")
        if node.operand("bias") is not None or (mask is not None and not is_length_mask(mask)):
            return "a bias or mask by position does not fit the slots of a rolling cache"
        if node.attrs["keep_first"]:
            return "the first keys have their own slots next to the rolling ones"
    return None


# Opset 24 has TensorScatter, which writes caches, and 23 has Attention.
@lowering(ops.attention, when=_find_refusal, opset=lambda node: 24 if node.operand("positions") is not None else 23)
def Attention(e: OnnxEmitter, node: Node) -> list[Out]:
    a = node.attrs
    q, k, sinks = node.required_operand("q"), node.required_operand("k"), node.operand("sinks")
    v, past_k, past_v, positions = (node.operand(n) for n in ("v", "past_k", "past_v", "positions"))
    mask = _emit_attention_mask(e, node)
    # is_causal shows query i the keys up to i: wrong if the keys begin with a cache. Then the mask covers causality.
    is_causal = int(is_causal_only(node) and a["causal"])
    common: dict[str, Any] = {"is_causal": is_causal, "scale": a["scale"], "softcap": a["softcap"]}
    scales, bits = (node.operand("k_scale"), node.operand("v_scale")), a["cache_bits"]
    # 3-D operands [batch, seq, heads·d] need no transposes. Caches and the extra key of sinks need a separate axis of
    # keys, and ONNX Runtime rejects queries and keys of different ranks: all are 4-D below.
    if past_k is None and v is not None and sinks is None and bits is None:
        heads = {"q_num_heads": a["heads"], "kv_num_heads": a["kv_heads"]}
        return [e.op("Attention", e[q], e[k], e[v], mask, **common, **heads)]
    if bits is None:
        kv = [_split_heads(e, x, a["kv_heads"]) for x in (k, v) if x is not None]
    else:
        new = ((x, s) for x, s in zip((k, v), scales, strict=True) if x is not None and s is not None)
        kv = [quantize_cache(e, x, s, a["kv_heads"], bits) for x, s in new]
    present: list[Out] = []
    if past_k is not None:
        past = [x for x in (past_k, past_v) if x is not None]
        if positions is None:
            kv = present = [e.op("Concat", e[old], new, axis=2) for old, new in zip(past, kv, strict=True)]
        elif a["rolling"]:
            kv = [e.op("Concat", e[old], new, axis=2) for old, new in zip(past, kv, strict=True)]
            present = [_update_rolling_cache(e, old, output, node) for old, output in zip(past, kv, strict=True)]
        else:
            start = _emit_first_slot(e, positions)
            fresh = zip(past, kv, strict=True)
            kv = present = e.memo(
                ("cache", past_k, k),  # other attentions may read the same cache
                lambda: [e.op("TensorScatter", e[old], new, start, axis=2) for old, new in fresh],
            )
    if bits is not None:
        codes, dtype = ((x, s) for x, s in zip(kv, scales, strict=False) if s is not None), node.output.type.dtype
        kv = [dequantize_cache(e, x, s, a["kv_heads"], bits, dtype) for x, s in codes]
    if sinks is not None:  # append a key of zeros; its score is the sink
        kv = [e.pad(x, (0, 1), 2, 4, node.output.type.dtype) for x in kv]
    y = e.op("Attention", _split_heads(e, q, a["heads"]), kv[0], kv[-1], mask, **common)
    if v is None:  # full keys served as values: cheaper than slicing the values out of a cache
        y = e.op("Slice", y, e.constant([0]), e.constant([a["value_dim"]]), e.constant([3]))
    output = e.op("Reshape", e.op("Transpose", y, perm=[0, 2, 1, 3]), e.constant([0, 0, node.output.width]))
    return [output, *present]


@lowering(ops.lightning_index, opset=lambda node: 24 if node.operand("positions") is not None else 0)
def LightningIndex(e: OnnxEmitter, node: Node) -> list[Out]:
    q, k, weights, dtype = *(node.required_operand(n) for n in ("q", "k", "weights")), node.output.type.dtype
    past, positions, heads = node.operand("past_k"), node.operand("positions"), node.attrs["heads"]
    keys, present = e.op("Unsqueeze", e[k], e.constant([1])), list[Out]()
    if past is not None:
        if positions is None:
            keys = e.op("Concat", e[past], keys, axis=2)
        else:
            keys = e.op("TensorScatter", e[past], keys, _emit_first_slot(e, positions), axis=2)
        present = [keys]
    # Flatten tokens and heads, so that one product gives all scores: [batch, 1, seq·heads, keys].
    rows = e.op("Reshape", e[q], e.constant([0, 1, -1, k.width]))
    transposed, by_token = e.op("Transpose", keys, perm=[0, 1, 3, 2]), e.op("Unsqueeze", e[weights], e.constant([2]))
    if dtype.bits < 32:  # in 16 bits too many scores are equal
        rows, transposed, by_token = (e.cast(x, dtypes.f32) for x in (rows, transposed, by_token))
    by_head = e.op("Reshape", e.op("Relu", e.op("MatMul", rows, transposed)), e.constant([0, -1, heads, 0]))
    scores = e.op("Transpose", e.op("MatMul", by_token, by_head), perm=[0, 2, 1, 3])
    is_masked = node.attrs["causal"] or node.operand("key_mask") is not None
    mask = emit_mask(e, node, include_causal=True) if is_masked else None
    if mask is not None:
        hidden = e.scalar(float("-inf"), dtypes.f32 if dtype.bits < 32 else dtype)
        scores = e.op("Where", mask, scores, hidden)
    count = e.op("Min", e.constant([node.attrs["top_k"]]), e.op("Shape", scores, start=3, end=4))
    _, places = e.many("TopK", scores, count, axis=-1, sorted=0, outputs=2)  # the first wins a tie
    hidden = e.scalar(float("-inf"), dtype)
    zeros, all_hidden = (
        e.op("Expand", x, e.op("Shape", y)) for x, y in ((e.scalar(0.0, dtype), places), (hidden, scores))
    )
    bias = e.op("ScatterElements", all_hidden, places, zeros, axis=3)
    return [bias if mask is None else e.op("Where", mask, bias, hidden), *present]


@emit_once
def _emit_first_slot(e: OnnxEmitter, positions: Value) -> Out:
    """Return the first cache slot that each batch row writes, [batch]."""
    return e.op("Squeeze", emit_first_position(e, positions), e.constant([1]))


def _split_heads(e: OnnxEmitter, value: Value, heads: int) -> Out:
    """Return `value` [batch, seq, heads·d] as [batch, heads, seq, d]."""
    by_head = e.op("Reshape", e[value], e.constant([0, 0, heads, value.width // heads]))
    return e.op("Transpose", by_head, perm=[0, 2, 1, 3])


def _emit_attention_mask(e: OnnxEmitter, node: Node) -> Out | None:
    """Return the mask, bias and sinks of `node` combined to one operand of Attention: a boolean mask, or with a bias or
    sinks a tensor that is added to the scores; None if there are none."""
    sinks, dtype, keys = node.operand("sinks"), node.output.type.dtype, count_keys(node)
    if node.operand("bias") is None and sinks is None:
        return emit_mask(e, node)
    added = emit_additive_mask(e, node, e.scalar(float("-inf"), dtype))
    if sinks is None:
        return added
    column = e.op("Reshape", e[sinks], e.constant([1, node.attrs["heads"], 1, 1]))
    column = e.pad(column, (e.size(keys), 0), 3, 4, dtype)
    # A sink is the score of one more key. That key is zero, so its product is 0, also after the softcap.
    return e.op("Add", e.pad(added, (0, 1), 3, 4, dtype), column)


def _update_rolling_cache(e: OnnxEmitter, past: Value, joined: Out, node: Node) -> Out:
    """Return the rolling cache `past` with the new keys (or values) written. `joined` [batch, kv_heads, capacity + seq,
    width] has the slots of `past`, then the new keys. The keys to write are read from `joined` and not from `past`,
    whose memory the result may share. Each batch row writes min(seq, capacity) keys, the last of which belongs to its
    last valid token. A row that ends in padding rewrites some of its old keys unchanged."""
    positions, mask = node.required_operand("positions"), node.operand("key_mask")
    _, kv_heads, capacity, width = past.shape
    width = width // 2 if past.type.dtype.bits == 4 else width  # two codes per byte
    source, start = _emit_rolling_indices(e, positions, mask, capacity)
    places = e.memo(
        ("rolled places", positions, mask, capacity, kv_heads, width),
        lambda: e.op("Expand", e.op("Unsqueeze", source, e.constant([1, 3])), e.constant([1, kv_heads, 1, width])),
    )
    rows = e.op("GatherElements", joined, places, axis=2)
    return e.op("TensorScatter", e[past], rows, start, axis=2, mode="circular")


@emit_once
def _emit_rolling_indices(e: OnnxEmitter, positions: Value, mask: Value | None, capacity: int) -> tuple[Out, Out]:
    """Return (source [batch, count], first [batch]). `source` has the indices of the keys to write, in the
    concatenation of slots and new keys; row r writes them to slots from `first[r]` on."""
    first = emit_first_position(e, positions)
    call_positions = emit_consecutive_positions(e, positions)
    at = e.op("Slice", call_positions, e.constant([-capacity]), e.constant([_END]), e.constant([1]))
    if mask is not None:
        last = e.op("Sub", e.op("ReduceSum", e[mask], e.constant([1]), keepdims=1), e.constant(1))
        excess = e.op("Sub", e.op("Gather", call_positions, e.constant([-1]), axis=1), last)
        at = e.op("Sub", at, excess)
    # Mod takes the sign of the divisor (ONNX, fmod=0): a position below 0 also has a slot and rewrites it unchanged.
    slot = e.op("Mod", at, e.constant(capacity))
    new = e.op("Add", e.op("Sub", at, first), e.constant(capacity))
    # In `joined` the slots come first: a position before the call is read from its slot, others after the slots.
    source = e.op("Where", e.op("Less", at, first), slot, new)
    return source, e.op("Squeeze", e.op("Gather", slot, e.constant([0]), axis=1), e.constant([1]))
