"""Biases on attention scores by the distance between query and key."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Param, Value

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import Operand, Var
from .calls import FunctionCall
from .masks import emit_cached_positions

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
