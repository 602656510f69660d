"""Padding anywhere in a call: a decoder's graph takes it after each row's tokens only, so rows are put in that order.

Libraries pad prompts on the left (transformers) or on the right (onnxruntime-genai), and say so in attention_mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as onnx

from weft.ir.graph import Node, Value
from weft.ir.op import Growth
from weft.ir.types import sizes
from weft.passes.analysis.states import has_cache, taken_states
from weft.passes.analysis.tokens.tokenwise import Tokens, carries, token_axes, tokenwise

from ..emitter import ONNX_DTYPES, Emitted, Emitter
from .masks import first_position

Emit = Callable[[Emitter, Node], Emitted]


def lower(e: Emitter, chosen: Mapping[Node, Emit]) -> None:
    """Emit the graph of `e`, each node as `chosen` says, such that with a cache it obeys any mask of zeros and ones.

    The last seq columns of the input attention_mask [batch, total] are those of the call. The inputs per token are
    sorted by them, valid tokens first, and the outputs per token are brought back into the order of the call. Where
    padding would enter a state, or take the slot of a token in a rolling cache, the row's logits are NaN.
    """
    graph, tokens = e.graph, token_axes(e.graph)
    if tokens is None or not has_cache(graph) or not {"attention_mask", "position_ids"} <= graph.inputs.keys():
        e.lower(chosen)
        return
    seq, mask = e.size(tokens[1]), e[graph.inputs["attention_mask"]]
    called = e.op("Slice", mask, e.op("Neg", seq), e.constant([np.iinfo(np.int64).max]), e.constant([1]))
    # Keys that differ, 2^40 − i for valid tokens and −i for padding, keep both in the order of the call.
    places = e.range(seq)
    keys = e.op("Sub", e.op("Mul", called, e.constant(1 << 40)), places)
    order = e.many("TopK", keys, seq, axis=1, outputs=2)[1]
    for value in graph.inputs.values():
        if carries(value, tokens):
            x = e[value]
            ids = value.type.rank == 2
            e.values[value] = e.op("GatherElements", x, order, axis=1) if ids else _rows(e, x, order)
    outputs = [value for value in graph.outputs.values() if carries(value, tokens)]
    place = e.many("TopK", order, seq, axis=1, largest=0, outputs=2)[1] if outputs else order
    heads = dict(head for value in outputs if (head := _head(value, tokens, chosen)))
    e.lower({**chosen, **{node: _restoring(chosen[node], x, place) for node, x in heads.items()}})
    for value in outputs:
        if _head(value, tokens, chosen) is None:
            e.final[value] = _rows(e, e[value], place)
    if (logits := graph.outputs.get("logits")) is not None and (limit := _limit(e)) is not None:
        first = first_position(e, graph.inputs["position_ids"])
        valid = e.op("Sub", e.op("ReduceSum", mask, e.constant([1])), first)
        last = e.op("Gather", places, e.constant([-1]))  # seq − 1, where the graph runs: seq itself is on the host
        lost = e.op("And", e.op("LessOrEqual", valid, last), e.op("GreaterOrEqual", e.op("Add", first, last), limit))
        nan = e.op("Cast", e.constant(np.nan, np.float32), to=int(ONNX_DTYPES[logits.type.dtype.name]))
        e.final[logits] = e.op("Where", e.op("Unsqueeze", lost, e.constant([2])), nan, e.final.get(logits, e[logits]))


def _rows(e: Emitter, x: onnx.Value, order: onnx.Value) -> onnx.Value:
    """`x` [batch, seq, ...] in `order` [batch, seq]."""
    return e.op("GatherND", x, e.op("Unsqueeze", order, e.constant([-1])), batch_dims=1)


def _head(value: Value, tokens: Tokens, chosen: Mapping[Node, Emit]) -> tuple[Node, Value] | None:
    """The first of the nodes at the end that make `value` token by token, and the tokens it reads: they are smaller
    than logits, so sooner brought into another order."""
    head: tuple[Node, Value] | None = None
    readers = 0
    while (node := value.producer) is not None and len(value.users) == readers and len(node.outputs) == 1:
        rows = tokenwise(node, tokens) or ()
        if node not in chosen or len(rows) != 1 or (x := node.inputs[rows[0]]) is None or len(x.users) != 1:
            break
        head, value, readers = (node, x), x, 1
    return head


def _restoring(emit: Emit, x: Value, place: onnx.Value) -> Emit:
    """Let `emit` read `x` in the order `place`, or where it has absorbed what makes `x` give its result in it."""

    def restored(e: Emitter, node: Node) -> Emitted:
        if x not in e.values:
            result = emit(e, node)
            return [_rows(e, r, place) for r in ([result] if isinstance(result, onnx.Value) else result) if r]
        before, e.values[x] = e.values[x], _rows(e, e.values[x], place)
        emitted = emit(e, node)
        e.values[x] = before
        return emitted

    return restored


def _limit(e: Emitter) -> onnx.Value | None:
    """The tokens [1] of a row up to which padding of a call harms nothing: the slots of a rolling cache, none where
    there is a state; None if nothing limits them."""
    limits = [
        0 if spec.growth is Growth.CONSTANT else e.graph.inputs[name].shape[2]
        for spec, name, _ in taken_states(e.graph)
        if not spec.growth.rewinds
    ]
    return e.size(functools.reduce(sizes.minimum, limits)) if limits else None
