"""Attention masks: boolean tensors [batch or 1, 1, seq, keys], True where a key is visible to a query; and biases on
scores by the distance between query and key.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.graph.operators import Operators
from weft.ir.schema.visible_keys import VisibleKeys

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.stateful_nodes import (
    emit_first_position,
    emit_key_positions,
    emit_query_positions,
    emit_rolling_positions,
    find_rolling_capacity,
)
from ..program.statements import Operand, Var
from .calls import FunctionCall
from .elementwise import TEXTS

ARANGE = "torch.arange({0}.shape[1], device={0}.device)[None]"


def emit_mask(e: Emitter, node: Node) -> tuple[Operand | None, str]:
    """Emit and return the mask of the attention `node` (None if there is none), and the source of an argument of SDPA,
    such as is_causal=True, or "". Plain causal attention has the mask None at run time if its cache was empty."""
    a, key_mask = node.attrs, node.operand("key_mask")
    causal, window = a["causal"], a.get("window")
    plain = is_dense(node)
    dense = plain and node.op is ops.attention and a["softcap"] is None  # SDPA computes it with is_causal
    dense = dense and node.operand("bias") is None and node.operand("sinks") is None and window is None
    if node in e.cached:
        assert e.start is not None
        queries = emit_query_positions(e)
        if not dense:
            return _emit_position_mask(e, node, queries, emit_cached_positions(e, node)), ""
        if causal and _has_flash_kernel(node) and (first := emit_first_position(e)) is not None:
            operands = [queries, emit_cached_positions(e, node), e.start, first]
            text = "None if {2} == 0 else earlier_keys({0}, {1}, {3})"
            return e.hoist((text, *operands), text, *operands, name="mask"), "is_causal={mask} is None"
        text = f"None if {{2}} == 0 else {write_visibility(node)}"
        return _emit_position_mask(e, node, queries, emit_cached_positions(e, node), text), "is_causal={mask} is None"
    if causal and dense and key_mask is None:
        return None, "is_causal=True"
    mask: Operand | None = None
    if causal or window is not None or not plain:
        at = e.emit(ARANGE, node.required_operand("q"), name="queries")
        mask = _emit_position_mask(e, node, at, e.emit(ARANGE, node.required_operand("k"), name="keys"))
    if key_mask is not None:
        visible = emit_key_mask(e, key_mask)
        mask = visible if mask is None else e.emit("{0} & {1}", mask, visible, name="mask")
    return mask, ""


def _has_flash_kernel(node: Node) -> bool:
    """Return whether flash attention supports the heads of `node`: keys and values have the same width."""
    keys, values = node.operand("k"), node.operand("v")
    return keys is not None and values is not None and keys.width == values.width and not node.attrs.get("value_dim")


def is_dense(node: Node) -> bool:
    """Return whether the attention `node` has no sparse pattern; a causal mask or a window does not count as one."""
    return bool(node.attrs.get("pattern", "dense") == "dense")


def has_position_mask(node: Node) -> bool:
    """Return whether the snippet `attend` computes the attention `node`. It does so if visible keys depend on positions
    alone, without bias and key mask, and the attention has a window, a sparse pattern, a softcap or sinks."""
    a = node.attrs
    special = a["window"] is not None or a["softcap"] is not None or node.operand("sinks") is not None
    alone = node.operand("bias") is None and node.operand("key_mask") is None
    return alone and bool(write_visibility(node)) and (special or not is_dense(node))


def emit_visibility(e: Emitter, node: Node) -> Var:
    """Emit and return the `KeyVisibility` of an attention with `has_position_mask`. Attentions with a cache share one
    if their rule and positions are equal."""
    rule = f"lambda q, k: {write_visibility(node, e).format('q', 'k')}"
    kernel = is_dense(node) and node.attrs["causal"]
    name = "near" if node.attrs["window"] is not None or not is_dense(node) else "earlier"
    if node in e.cached:
        first = emit_first_position(e) if kernel else None
        operands = [emit_query_positions(e), emit_cached_positions(e, node), *([] if first is None else [first])]
        text = f"KeyVisibility({{0}}, {{1}}, {rule}{', {2}' if first is not None else ''})"
        seen = e.hoist((text, *operands), text, *operands, name=name)
    else:
        text = f"KeyVisibility({ARANGE}, {ARANGE.replace('0', '1')}, {rule}{', 0' if kernel else ''})"
        seen = e.emit(text, node.required_operand("q"), node.required_operand("k"), name=name)
    seen.type = "KeyVisibility"
    return seen


def emit_cached_positions(e: Emitter, node: Node) -> Var:
    """Emit and return the positions [batch or 1, keys] of the keys that an attention with a cache reads."""
    room = find_rolling_capacity(node)
    return emit_key_positions(e) if room is None else emit_rolling_positions(e, *room)


def emit_key_mask(e: Emitter, key_mask: Value) -> Var:
    """Emit and return `key_mask` [batch, keys] as booleans [batch, 1, 1, keys]; None at run time if the mask is an
    optional input that is not passed."""
    mask = e[key_mask]
    text = "{0}[:, None, None, :] != 0"
    if isinstance(mask, Var) and mask.default:
        optional = e.hoist(("shown", mask), f"None if {{0}} is None else {text}", mask, name="shown")
        optional.type = "Tensor | None"
        return optional
    if key_mask.producer is not None:  # next to its producer: an encoder, which later calls may skip
        return e.emit_once(("shown", mask), key_mask.producer.scope, text, mask, name="shown")
    return e.hoist(("shown", mask), text, mask, name="shown")


class _Text(Operators["_Text"]):
    """Source of a Python expression; operators on it return the source of larger expressions."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _apply(self, name: str, *operands: Any) -> _Text:
        return _Text(f"({TEXTS[name].format(*(v.text if isinstance(v, _Text) else v for v in operands))})")

    def __ge__(self, other: _Text | float) -> _Text:
        return _Text(f"({self.text} >= {other.text if isinstance(other, _Text) else other})")

    def __abs__(self) -> _Text:
        return _Text(f"{self.text}.abs()")

    def equal(self, other: _Text | int) -> _Text:
        return self._apply("equal", self, other)


def write_visibility(node: Node, e: Emitter | None = None) -> str:
    """Return an expression, True where attention `node` lets the query at position ``{0}`` attend to the key at
    ``{1}``. It is "" if all keys are visible. Attributes are literals, or the names that `e` has for them."""
    attrs = node.attrs if e is None else {name: e.attr(node, name) for name in node.attrs}
    conditions = VisibleKeys.from_attrs(attrs).conditions(_Text("{0}"), _Text("{1}"), equal=_Text.equal)
    return functools.reduce(operator.and_, conditions).text if conditions else ""


def _emit_position_mask(e: Emitter, node: Node, queries: Operand, keys: Operand, text: str = "") -> Var:
    """Emit and return the mask [batch or 1, 1, seq, keys] that the expression `text` computes from positions `queries`
    and `keys`; `text` defaults to `write_visibility`. Attentions with a cache share equal masks."""
    q, k = "{0}[:, None, :, None]", "{0}[:, None, None, :]"
    text = text or write_visibility(node, e)
    name = "mask" if node.attrs.get("window") is None and is_dense(node) else "near"
    if node not in e.cached:
        return e.emit(text, e.emit(q, queries, name="queries"), e.emit(k, keys, name="keys"), name=name)
    at = e.hoist((q, queries), q, queries, name="queries"), e.hoist((k, keys), k, keys, name="keys")
    operands = (*at, *([e.start] if "{2}" in text and e.start is not None else []))
    return e.hoist((text, *operands), text, *operands, name=name)


DISTANCE = "{1}[:, None, :] - {0}[:, :, None]"  # j − i as [batch or 1, seq, keys] of the positions i and j


def is_shared(value: Value) -> bool:
    """Return whether layers can share `value`: it is an input, a parameter, or computed in the model's own forward."""
    return value.producer is None or not value.producer.scope


def emit_distance(e: Emitter, queries: Operand, keys: Operand) -> Var:
    """Emit and return the distances j − i [batch or 1, seq, keys] of the positions j of `keys` and i of `queries`. The
    statement precedes the layers, which share it."""
    return e.hoist(("distance", queries, keys), DISTANCE, queries, keys, name="distance")


def _emit_bias_distance(e: Emitter, node: Node) -> tuple[Var, bool]:
    """Emit and return the distances from which the bias `node` is computed, and whether layers share them."""
    queries, keys = node.required_operand("queries"), node.required_operand("keys")
    at: Operand = e[keys]
    if node in e.bias_nodes and keys is e.graph.inputs.get("position_ids"):
        at = emit_cached_positions(e, node.output.uses[0][0])  # all readers have the same: see `find_rolling_capacity`
    if is_shared(queries) and (is_shared(keys) or at is not e[keys]):
        return emit_distance(e, e[queries], at), True
    return e.emit(DISTANCE, queries, at, name="distance"), False


@lowering(ops.alibi)
def _alibi(e: Emitter, node: Node) -> Var:
    slopes = node.required_operand("slopes")
    distances, shared = _emit_bias_distance(e, node)
    text = "alibi({0}, {1})" if not node.attrs["symmetric"] else "alibi({0}, -{1}.abs())"
    if shared and isinstance(slopes, Param):
        return e.hoist((text, e[slopes], distances), text, slopes, distances, name="bias")
    return e.emit(text, slopes, distances, name="bias")


@lowering(ops.relative_position_bias)
def _relative_position_bias(e: Emitter, node: Node) -> Var:
    distances, _ = _emit_bias_distance(e, node)
    call = FunctionCall("relative_bias" if node.attrs["bidirectional"] else "causal_relative_bias")
    call.add(node.required_operand("table"), distances, str(e.attr(node, "max_distance")))
    return call.emit(e, name="bias")
