"""Convert between RoPE layouts: pairs of halves, or interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.ir import Graph, Node, Param, ops
from weft.ir.recipes.readers import Array

from ...analysis.index_tracking import Destination, Origin, destination, origin
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import changed, derive, replace_param
from ..heads.head_layout import taken


@dataclass(frozen=True)
class RopeLayout(Pass):
    """Let RoPE pair number k of a head with k + pairs (half: Llama, NeoX) or 2k with 2k + 1 (interleaved: GPT-J, GGUF).

    A score is a sum over the numbers of a head, in any order that queries and keys share. So the rows of W_q and W_k
    (biases, weights of norms between) are put into the order in which the pairs stand in the other layout; what is not
    turned stays in place. That goes through packed linears, and through the splits and joins of latent attention.

    Condition: the queries and the keys of an attention are turned alike, come from linears, with nothing but norms,
    scales, clips, reshapes and splits between, and go to that attention alone. Refused where only one side is turned,
    where turned keys are values too, and where there are caches.

    Source: Su 2021, RoFormer (arXiv 2104.09864), with the layout of GPT-NeoX (Black 2022, arXiv 2204.06745) beside it.

    Example rope-layout{layout=interleaved}::

        graph example {
          input %x: f32[batch, seq, 5]
          input %at: i64[batch, seq]
          param %q.weight: f32[12, 5] = normal([12, 5], std=1.0, stream="q")
          param %k.weight: f32[6, 5] = normal([6, 5], std=1.0, stream="k")
          param %frequencies: f32[2] = rope_frequencies(4)
          %q: f32[batch, seq, 12] = linear(%x, %q.weight)
          %k: f32[batch, seq, 6] = linear(%x, %k.weight)
          %q_rope: f32[batch, seq, 12] = rope(%q, %at, %frequencies, heads=2)
          %k_rope: f32[batch, seq, 6] = rope(%k, %at, %frequencies, heads=1)
          %y: f32[batch, seq, 10] = attention(%q_rope, %k_rope, %x, heads=2, kv_heads=1, causal=true)
          output y = %y
        }
    """

    name = "rope-layout"
    effect = "exact"
    purpose = "Same function, other weights"
    layout: Literal["half", "interleaved"]

    def run(self, graph: Graph, trace: Trace) -> None:
        interleaved = self.layout == "interleaved"
        turned: dict[Node, list[tuple[Node, Destination]]] = {}
        for node in graph.nodes:
            if node.op is ops.rope:
                goes = destination(node.output, _elements(node))
                if isinstance(goes, str):
                    if node.attrs["interleaved"] != interleaved:
                        trace.refuse(self.name, node.output.name, goes)
                else:
                    turned.setdefault(goes.node, []).append((node, goes))
        for attention, sides in turned.items():
            if all(rotation.attrs["interleaved"] == interleaved for rotation, _ in sides):
                continue
            orders = _mismatch(attention, sides) or _orders([rotation for rotation, _ in sides])
            if isinstance(orders, str):
                trace.refuse(self.name, attention.output.name, orders)
                continue
            trace.fired(self.name, attention.output.name)
            for node, order in orders.items():
                _take(node, order)
            for rotation, _ in sides:
                changed(rotation, interleaved=interleaved)


def _elements(rotation: Node) -> Array:
    """Labels of what `rotation` makes: which element of its head a number is, counted from 1; 0 if it is not turned."""
    each = rotation.output.width // rotation.attrs["heads"]
    number = np.arange(1, each + 1)
    number[2 * _pairs(rotation) :] = 0
    return np.tile(number, rotation.attrs["heads"])


def _pairs(rotation: Node) -> int:
    frequencies = rotation.operand("frequencies")
    assert frequencies is not None
    return frequencies.width


def _mismatch(attention: Node, sides: list[tuple[Node, Destination]]) -> str | None:
    """Say why features that `attention` reads from rotations on its `sides` cannot be reordered."""
    if sorted(goes.role for _, goes in sides) != ["k", "q"]:
        return "not one rotation of queries faces one of keys"
    if len({rotation.attrs["interleaved"] for rotation, _ in sides}) > 1:
        return "its queries and keys are turned in different layouts"
    if attention.operand("past_k") is not None:
        return "its cache holds turned keys; run rope-layout before kv-cache"
    if attention.attrs.get("cache_bits") is not None:
        return "its turned keys are rounded with scales of their own; run rope-layout before quantize-cache"
    rows = np.concatenate([goes.labels for _, goes in sides])
    if (rows != rows[0]).any():
        return "turned numbers of queries face other numbers of keys"
    if attention.operand("v") is None and rows[0, : attention.attrs["value_dim"]].any():
        return "its turned keys are its values too"
    return None


def _orders(rotations: list[Node]) -> dict[Node, list[int]] | str:
    """The order in which each linear and norm behind `rotations` must have its rows for the other layout, or why there
    is none."""
    rows: dict[Node, Array] = {}
    origins: list[Origin] = []
    for rotation in rotations:
        value = rotation.inputs[0]
        assert value is not None
        came = origin(value)
        if isinstance(came, str):
            return came
        origins.append(came)
        order = rows.setdefault(came.linear, np.arange(came.linear.output.width))
        places, pairs = came.labels.reshape(rotation.attrs["heads"], -1), _pairs(rotation)
        paired = np.arange(2 * pairs).reshape((pairs, 2) if rotation.attrs["interleaved"] else (2, pairs))
        # Transposing [pairs, 2] or [2, pairs] turns one layout into the other.
        order[places[:, : 2 * pairs]] = places[:, paired.T.reshape(-1)]
    orders = {linear: order.tolist() for linear, order in rows.items()}
    for came in origins:
        for step, labels in came.steps:
            if step.op in (ops.rms_norm, ops.layer_norm, ops.mul, ops.add):
                vector = _order_of_vector(step, labels, rows[came.linear])
                if isinstance(vector, str):
                    return f"{step.op.name} (%{step.output.name}) {vector}"
                orders[step] = vector
    return orders


def _order_of_vector(step: Node, labels: Array, order: Array) -> list[int] | str:
    """Return the order of rows on the last axis of `step` that follows `order` for those labelled `labels`."""
    if not all(isinstance(v, Param) and v.shape == step.output.shape[-1:] for v in step.inputs[1:]):
        return "has an operand that is no vector of numbers of heads"
    groups = labels.reshape(-1, labels.shape[-1])
    if (np.sort(groups) != np.sort(order[groups])).any():
        return "treats parts of a head by themselves"
    places = [np.argsort(group)[np.searchsorted(np.sort(group), order[group])] for group in groups]
    if any((p != places[0]).any() for p in places):
        return "treats heads by one vector whose rows they have in different orders"
    return [int(p) for p in places[0]]


def _take(node: Node, order: list[int]) -> None:
    """Give `node` its parameters with their rows in `order`."""
    names = [o.name for o, v in zip(node.op.operands, node.inputs, strict=False) if isinstance(v, Param)]
    old = {name: node.operand(name) for name in names}
    new = {name: derive(p, taken(p.recipe, order)) for name, p in old.items() if isinstance(p, Param)}
    changed(node, new)
    for name, param in old.items():
        replace_param(param, new[name])
