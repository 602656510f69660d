"""Masks of the standard Attention operator, computed from positions and the op's attributes.

Attentions share equal masks and parts of masks: a decoder computes each once per forward pass, not once per layer.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as onnx

from weft.ir.graph import Node, Value
from weft.ir.graph.operators import Operators
from weft.ir.schema.visible_keys import VisibleKeys
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType
from weft.ir.types.sizes import Size

from ..onnx_emitter import OnnxEmitter, emit_once
from .standard import DIRECT

Out = onnx.Value


def is_length_mask(mask: Value) -> bool:
    """Return whether the key mask `mask` only encodes the lengths of batch rows: it is the graph input attention_mask,
    which in a decoder has padding on the right only."""
    return mask.graph.inputs.get("attention_mask") is mask


def appends(node: Node) -> bool:
    """Return whether the attention `node` appends to a cache, with no slots by position."""
    return node.operand("past_k") is not None and node.operand("positions") is None


def is_causal_only(node: Node) -> bool:
    """Return whether the attribute is_causal of the standard operator can express all that positions hide from the
    attention `node`: `node` has no cache, no sinks, no window and no sparse pattern."""
    extra = node.operand("past_k") is not None or node.operand("sinks") is not None
    return not extra and not VisibleKeys.from_attrs(node.attrs).is_local


def emit_mask(e: OnnxEmitter, node: Node, include_causal: bool = False) -> Out | None:
    """Return the boolean mask [batch or 1, 1, seq, keys] (True: visible) of `node`; None if it needs none. It omits
    causality if `is_causal_only(node)`, which the attribute is_causal then expresses, unless `include_causal`. The keys
    of an attention with a cache are the cache's slots; with a rolling cache, the slots and then the new keys."""
    a, key_mask, past = node.attrs, node.operand("key_mask"), node.operand("past_k")
    positions = node.operand("positions")
    if key_mask is not None and positions is not None and is_length_mask(key_mask):
        key_mask = None  # the causal mask by position already hides empty slots
    plain = not include_causal and is_causal_only(node)
    sizes = node.required_operand("q").shape[1], count_keys(node)
    facts = None if plain else (VisibleKeys.from_attrs(a), a.get("rolling", False))
    key = ("mask", *sizes, None if past is None else past.shape[2], positions, key_mask, facts)
    return e.memo(key, lambda: _emit_new_mask(e, node, key_mask, plain))


def count_keys(node: Node) -> Size:
    """Return the number of keys of the attention `node`: new ones, the slots of a cache, or both where a cache rolls or
    the call appends to it."""
    new, past = node.required_operand("k").shape[1], node.operand("past_k")
    joins = appends(node) or node.attrs.get("rolling")
    keys: Size = new if past is None else past.shape[2] + new if joins else past.shape[2]
    return keys


def _emit_new_mask(e: OnnxEmitter, node: Node, key_mask: Value | None, plain: bool) -> Out | None:
    parts: list[Out] = []
    if not plain:
        query_at, key_at = _emit_positions(e, node)
        if node.attrs.get("rolling"):
            parts.append(e.op("GreaterOrEqual", key_at, e.constant(0)))
        parts += _emit_conditions(e, node, query_at, key_at)
    if key_mask is not None:
        parts.append(_broadcast_key_mask(e, node, key_mask, plain))
    return functools.reduce(lambda x, y: e.op("And", x, y), parts) if parts else None


def emit_additive_mask(e: OnnxEmitter, node: Node, hidden: Out, include_causal: bool = False) -> Out:
    """Return the bias of `node` (none: 0), a tensor of 4 axes, with the scalar `hidden` where `emit_mask` is False."""
    mask, bias, keys = emit_mask(e, node, include_causal), node.operand("bias"), count_keys(node)

    def add() -> Out:
        if bias is not None and mask is None:
            return expand_bias(e, bias, node.output.shape[1], keys)
        visible: Out = e.constant([[[[0.0]]]], node.output.type.dtype.numpy) if bias is None else e[bias]
        # Slots after the end of a bias are masked.
        if bias is not None and node.operand("positions") is not None and bias.shape[3] != 1:
            visible = pad_end(e, visible, 3, keys, 4, node.output.type.dtype)
        return e.op("Where", mask, visible, hidden)

    return e.memo(("added", mask, bias, keys, hidden), add)


def _broadcast_key_mask(e: OnnxEmitter, node: Node, key_mask: Value, plain: bool) -> Out:
    """Return `key_mask` [batch, keys] as a boolean mask [batch, 1, 1, keys]; with a cache, slots beyond `keys` are
    False. If `plain` (not combined with other conditions), the shape is [batch, 1, seq, keys]."""
    past = node.operand("past_k")
    visible: Out = e.cast(e[key_mask], dtypes.bool_)
    if past is not None and node.operand("positions") is not None:  # slots after the mask's end are hidden
        visible = pad_end(e, visible, 1, past.shape[2], 2, dtypes.bool_)
    visible = e.op("Unsqueeze", visible, e.constant([1, 2]))
    if plain:  # ONNX Runtime does not broadcast the query axis of a mask
        queries = e.op("Shape", e[node.inputs[0]], start=1, end=2)
        ones = e.constant([1])
        visible = e.op("Expand", visible, e.op("Concat", ones, ones, queries, ones, axis=0))
    return visible


def pad_end(e: OnnxEmitter, x: Out, axis: int, size: Any, rank: int, dtype: DType) -> Out:
    """Return `x`, of `rank` axes and `dtype`, padded with zeros at the end of `axis` to the IR size `size`."""
    return e.pad(x, (0, e.op("Sub", e.size(size), e.op("Shape", x, start=axis, end=axis + 1))), axis, rank, dtype)


def _emit_positions(e: OnnxEmitter, node: Node) -> tuple[Out, Out]:
    """Return the positions of queries and keys, in shapes that broadcast to [batch or 1, 1, seq, keys]."""
    past, positions = node.operand("past_k"), node.operand("positions")
    mask = node.operand("key_mask")
    if mask is not None and appends(node) and VisibleKeys.from_attrs(node.attrs).is_local:
        return _emit_valid_counts(e, mask, node.required_operand("q").shape[1])
    if past is None or positions is None:
        queries = emit_range(e, node.required_operand("q").shape[1])
        if past is not None:  # after the slots of the past
            queries = e.op("Add", queries, e.size(past.shape[2]))
        return e.op("Unsqueeze", queries, e.constant([1])), emit_range(e, count_keys(node))
    queries = e.op("Unsqueeze", e[positions], e.constant([1, 3]))
    if not node.attrs.get("rolling"):
        return queries, emit_range(e, past.shape[2])
    key_positions = emit_slot_positions(e, positions, past.shape[2])
    keys = e.op("Concat", key_positions, emit_consecutive_positions(e, positions), axis=1)
    return queries, e.op("Unsqueeze", keys, e.constant([1, 2]))


@emit_once
def _emit_valid_counts(e: OnnxEmitter, mask: Value, seq: Size) -> tuple[Out, Out]:
    """Return the positions of the last `seq` slots and of all slots, for `mask` [batch, slots]: each is the number of
    earlier slots where the mask is 1. So padding between tokens does not move the window."""
    allowed = e.cast(e[mask], dtypes.i64) if mask.type.dtype == dtypes.bool_ else e[mask]
    counts = e.op("Sub", e.op("CumSum", allowed, e.constant(1)), e.constant(1))
    queries = e.op("Slice", counts, e.op("Neg", e.size(seq)), e.constant([2**63 - 1]), e.constant([1]))
    return e.op("Unsqueeze", queries, e.constant([1, 3])), e.op("Unsqueeze", counts, e.constant([1, 2]))


@emit_once
def expand_bias(e: OnnxEmitter, bias: Value, queries: Any, keys: Any) -> Out:
    """Return `bias` [batch or 1, heads or 1, queries or 1, keys or 1] expanded along its last two axes to `queries` and
    `keys`: ONNX Runtime broadcasts only batch and heads."""
    if bias.shape[2:] == (queries, keys):
        return e[bias]
    ones = e.constant([1])
    return e.op("Expand", e[bias], e.op("Concat", ones, ones, e.size(queries), e.size(keys), axis=0))


@emit_once
def emit_range(e: OnnxEmitter, size: Any) -> Out:
    """Return the int64 values 0 to `size` − 1 for the IR size `size`: a constant, or computed in the graph."""
    return e.constant(range(size)) if isinstance(size, int) else e.range(e.size(size))


@emit_once
def emit_first_position(e: OnnxEmitter, positions: Value) -> Out:
    """Return the position of the first new token of each batch row: positions[:, 0:1], [batch, 1]."""
    return e.op("Gather", e[positions], e.constant([0]), axis=1)


@emit_once
def emit_consecutive_positions(e: OnnxEmitter, positions: Value) -> Out:
    """Return the positions [batch, seq] of the new keys, which count up from the first position of their row, also in
    padding at its end. There `positions` is arbitrary: onnxruntime-genai passes 0, which would make padding visible."""
    return e.op("Add", emit_first_position(e, positions), emit_range(e, positions.shape[1]))


@emit_once
def emit_slot_positions(e: OnnxEmitter, positions: Value, capacity: Any) -> Out:
    """Return the positions [batch, capacity] of the keys that the slots of a rolling cache contain before the new keys
    are written; negative for empty slots."""
    newest = e.op("Sub", emit_first_position(e, positions), e.constant(1))
    # Mod is never negative here (ONNX, fmod=0), so an empty slot gets a position below 0.
    age = e.op("Mod", e.op("Sub", newest, emit_range(e, capacity)), e.size(capacity))
    return e.op("Sub", newest, age)


class _Position(Operators["_Position"]):
    """A tensor of positions or conditions in an ONNX graph; Python operators on it append ONNX nodes."""

    def __init__(self, e: OnnxEmitter, value: Out) -> None:
        self.e, self.value = e, value

    def _apply(self, name: str, *operands: Any) -> _Position:
        values = (self.e.constant(v) if isinstance(v, int) else v.value for v in operands)
        return _Position(self.e, self.e.op(DIRECT.get(name, name), *values))

    def __floordiv__(self, other: _Position | int) -> _Position:
        # Integer Div truncates towards 0, so subtract the remainder first.
        return self._apply("div", self - self % other, other)

    def __ge__(self, other: _Position | float) -> _Position:
        return self._apply("GreaterOrEqual", self, other)

    def equal(self, other: _Position | int) -> _Position:
        return self._apply("equal", self, other)


def _emit_conditions(e: OnnxEmitter, node: Node, query_at: Out, key_at: Out) -> list[Out]:
    """Return the conditions, bool [batch or 1, 1, seq, keys], all true for a visible key; never empty."""
    query, key = _Position(e, query_at), _Position(e, key_at)
    conditions = VisibleKeys.from_attrs(node.attrs).conditions(query, key, equal=_Position.equal)
    return [condition.value for condition in conditions or [abs(query - key) >= 0]]
