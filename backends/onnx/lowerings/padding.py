"""Support for padding anywhere among new tokens: a decoder graph expects it last, so the tokens of each row are sorted.

Libraries pad prompts on the left (transformers) or on the right (onnxruntime-genai), as described by attention_mask.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import onnx_ir as onnx

from weft.ir.graph import Node, Value
from weft.ir.op import Growth
from weft.ir.types import dtypes, sizes
from weft.passes.analysis.tokens.tokenwise import Tokens, find_token_axes, find_token_operands, has_token_axes

from ..onnx_emitter import Emit, Emitted, OnnxEmitter
from .attention_mask import emit_first_position


def lower_with_padding(e: OnnxEmitter, chosen: Mapping[Node, Emit]) -> None:
    """Emit the graph of `e` by the `chosen` lowerings. With a cache and inputs attention_mask and position_ids, padding
    may be anywhere among the new tokens: the last seq columns of attention_mask [batch, total] are 0 there. For this,
    per-token inputs are sorted, valid tokens first, and per-token outputs are put back into the original order. If
    padding would enter a state, or overwrite a token in a rolling cache, the logits of the batch row are NaN."""
    graph, tokens = e.graph, find_token_axes(e.graph)
    if tokens is None or not e.states or not {"attention_mask", "position_ids"} <= graph.inputs.keys():
        e.lower(chosen)
        return
    seq, mask = e.size(tokens[1]), e[graph.inputs["attention_mask"]]
    logits, limit = graph.outputs.get("logits"), _emit_padding_limit(e)
    if e.appends:
        e.lower(chosen)  # slots are masked one by one, so padding may stay where it is
        if logits is not None and limit is not None:
            valid = e.op("ReduceSum", _slice_call(e, mask, seq), e.constant([1]))
            _hide_logits(e, logits, e.op("Less", valid, seq))
        return
    call_mask = _slice_call(e, mask, seq)
    # Sort keys 2^24 − i for valid tokens and −i for padding are distinct, so the sort is stable.
    indices = e.range(seq)
    keys = e.op("Sub", e.op("Mul", call_mask, e.constant(1 << 24)), indices)
    order = e.many("TopK", keys, seq, axis=1, outputs=2)[1]
    for value in graph.inputs.values():
        if has_token_axes(value, tokens):
            x = e[value]
            ids = value.type.rank == 2
            e.values[value] = e.op("GatherElements", x, order, axis=1) if ids else _gather_rows(e, x, order)
    positions = graph.inputs["position_ids"]
    if e.target.opset < 24:  # bodies of expanded ops write padding to its positions, and read the mask by position
        first = e.op("Gather", e[positions], e.constant([0]), axis=1)
        e.values[positions] = e.op("Add", first, indices)
        slots = e.range(e.op("Shape", mask, start=1, end=2))
        lengths = e.op("Less", slots, e.op("ReduceSum", mask, e.constant([1])))
        e.values[graph.inputs["attention_mask"]] = e.cast(lengths, dtypes.i64)
    heads = {v: _find_output_head(v, tokens, chosen) for v in graph.outputs.values() if has_token_axes(v, tokens)}
    inverse_order = e.many("TopK", order, seq, axis=1, largest=0, outputs=2)[1] if heads else order
    restored = {node: _restore_order(chosen[node], x, inverse_order) for node, x in filter(None, heads.values())}
    e.lower({**chosen, **restored})
    for value, head in heads.items():
        if head is None:
            e.output_values[value] = _gather_rows(e, e[value], inverse_order)
    if logits is not None and limit is not None:
        first = emit_first_position(e, positions)
        valid = e.op("Sub", e.op("ReduceSum", mask, e.constant([1])), first)
        last = e.op("Gather", indices, e.constant([-1]))  # seq − 1 on the device: `seq` itself is on the host
        is_lost = e.op("And", e.op("LessOrEqual", valid, last), e.op("GreaterOrEqual", e.op("Add", first, last), limit))
        _hide_logits(e, logits, is_lost)


def _slice_call(e: OnnxEmitter, mask: onnx.Value, seq: onnx.Value) -> onnx.Value:
    return e.op("Slice", mask, e.op("Neg", seq), e.constant([np.iinfo(np.int64).max]), e.constant([1]))


def _hide_logits(e: OnnxEmitter, logits: Value, rows: onnx.Value) -> None:
    """Replace the output `logits` by NaN in the batch rows where `rows` [batch, 1] is True."""
    nan = e.cast(e.constant(np.nan, np.float32), logits.type.dtype)
    masked = e.op("Where", e.op("Unsqueeze", rows, e.constant([2])), nan, e.output_values.get(logits, e[logits]))
    e.output_values[logits] = masked


def _gather_rows(e: OnnxEmitter, x: onnx.Value, order: onnx.Value) -> onnx.Value:
    """Return the tokens of `x` [batch, seq, ...] in the order of the indices `order` [batch, seq]."""
    return e.op("GatherND", x, e.op("Unsqueeze", order, e.constant([-1])), batch_dims=1)


def _find_output_head(value: Value, tokens: Tokens, chosen: Mapping[Node, Emit]) -> tuple[Node, Value] | None:
    """Return (first node, its per-token operand) of the chain of token-wise nodes, each with one reader, that ends in
    the output `value`; None if there is none. Reordering this operand is cheaper than reordering the logits."""
    head: tuple[Node, Value] | None = None
    readers = 0
    while (node := value.producer) is not None and len(value.users) == readers and len(node.outputs) == 1:
        rows = find_token_operands(node, tokens) or ()
        if node not in chosen or len(rows) != 1 or (x := node.inputs[rows[0]]) is None or len(x.users) != 1:
            break
        head, value, readers = (node, x), x, 1
    return head


def _restore_order(emit: Emit, x: Value, order: onnx.Value) -> Emit:
    """Return a lowering like `emit` that reorders the tokens of its operand `x` by the indices `order` [batch, seq], or
    those of its results if it absorbed the producer of `x`."""

    def emit_restored(e: OnnxEmitter, node: Node) -> Emitted:
        if x not in e.values:
            result = emit(e, node)
            return [_gather_rows(e, r, order) for r in ([result] if isinstance(result, onnx.Value) else result) if r]
        before, e.values[x] = e.values[x], _gather_rows(e, e.values[x], order)
        emitted = emit(e, node)
        e.values[x] = before
        return emitted

    return emit_restored


def _emit_padding_limit(e: OnnxEmitter) -> onnx.Value | None:
    """Return the number of tokens of a batch row, a tensor [1], up to which padding is harmless: the slots of the
    smallest rolling cache, or 0 with a recurrent state. Return None if padding is always harmless."""
    limits = [
        0 if spec.growth is Growth.CONSTANT else e.graph.inputs[name].shape[2]
        for spec, name, _ in e.states
        if not spec.growth.can_rewind
    ]
    return e.size(functools.reduce(sizes.minimum, limits)) if limits else None
