"""Convert between RoPE layouts: half (feature k pairs with k + pairs) and interleaved (2k with 2k + 1)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from weft.ir import Graph, Node, Param, ops
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.index_tracking import Destination, LinearOrigin, trace_destination, trace_origin
from ...edits.edit import derive_param, rebuild_node, replace_param
from ..heads.head_layout import take_rows


class RopeLayout(Pass):
    """Convert RoPE to the `layout` half (feature k pairs with k + pairs: Llama, NeoX) or interleaved (2k with 2k + 1).

    GPT-J and GGUF use interleaved pairs. A score is a sum over the features of a head, in any order that queries and
    keys share. So the rows of W_q and W_k, their biases, and the weights of norms after them are permuted to the new
    layout; features without rotation stay in place. The pass follows features through packed linears, and through the
    splits and concatenations of latent attention.

    Condition: the same features of queries and keys are rotated, in the same layout. Both come from linears, with only
    norms, scales, clips, reshapes and splits between linear and rotation, and have no other readers. The pass refuses
    attentions with only one of q and k rotated, with rotated keys that are also the values, or with a cache.

    Source: Su 2021, RoFormer (arXiv 2104.09864); the half layout: GPT-NeoX (Black 2022, arXiv 2204.06745).

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
        ropes_by_attention: dict[Node, list[tuple[Node, Destination]]] = {}
        for node in graph.nodes:
            if node.op is ops.rope:
                target = trace_destination(node.output, _label_features(node))
                if isinstance(target, str):
                    if node.attrs["interleaved"] != interleaved:
                        trace.refuse(self.name, node.output.name, target)
                else:
                    ropes_by_attention.setdefault(target.node, []).append((node, target))
        for attention, ropes in ropes_by_attention.items():
            if all(rotation.attrs["interleaved"] == interleaved for rotation, _ in ropes):
                continue
            orders = _find_obstacle(attention, ropes) or _find_orders([rotation for rotation, _ in ropes])
            if isinstance(orders, str):
                trace.refuse(self.name, attention.output.name, orders)
                continue
            trace.record_rewrite(self.name, attention.output.name)
            for node, order in orders.items():
                _reorder_params(node, order)
            for rotation, _ in ropes:
                rebuild_node(rotation, interleaved=interleaved)


def _label_features(rotation: Node) -> Array:
    """Return a label per output feature [width] of `rotation`: its index in the head, from 1; 0 if not rotated."""
    head_dim = rotation.output.width // rotation.attrs["heads"]
    labels = np.arange(1, head_dim + 1)
    labels[2 * _count_pairs(rotation) :] = 0
    return np.tile(labels, rotation.attrs["heads"])


def _count_pairs(rotation: Node) -> int:
    return rotation.required_operand("frequencies").width


def _find_obstacle(attention: Node, ropes: list[tuple[Node, Destination]]) -> str | None:
    """Return why the features in `ropes`, pairs (rope, destination in `attention`), cannot be reordered, or None."""
    if sorted(target.role for _, target in ropes) != ["k", "q"]:
        return "it does not have exactly one rotation of queries and one of keys"
    if len({rotation.attrs["interleaved"] for rotation, _ in ropes}) > 1:
        return "its queries and keys are rotated in different layouts"
    if attention.operand("past_k") is not None:
        return "its cache holds rotated keys; run rope-layout before kv-cache"
    if attention.attrs.get("cache_bits") is not None:
        return "its rotated keys are quantized with their own scales; run rope-layout before quantize-cache"
    rows = np.concatenate([target.labels for _, target in ropes])
    if (rows != rows[0]).any():
        return "its queries and keys rotate different features"
    if attention.operand("v") is None and rows[0, : attention.attrs["value_dim"]].any():
        return "its rotated keys are also its values"
    return None


def _find_orders(rotations: list[Node]) -> dict[Node, list[int]] | str:
    """Return the old row of each new row, by linear or op with vectors before `rotations`; or a reason (str)."""
    rows: dict[Node, Array] = {}
    origins: list[LinearOrigin] = []
    for rotation in rotations:
        source = trace_origin(rotation.required_operand("x"))
        if isinstance(source, str):
            return source
        origins.append(source)
        order = rows.setdefault(source.linear, np.arange(source.linear.output.width))
        features, pairs = source.labels.reshape(rotation.attrs["heads"], -1), _count_pairs(rotation)
        pair_index = np.arange(2 * pairs).reshape((pairs, 2) if rotation.attrs["interleaved"] else (2, pairs))
        # Transposing [pairs, 2] or [2, pairs] converts one layout to the other.
        order[features[:, : 2 * pairs]] = features[:, pair_index.T.reshape(-1)]
    orders = {linear: order.tolist() for linear, order in rows.items()}
    for source in origins:
        for step, labels in source.steps:
            if step.op in (ops.rms_norm, ops.layer_norm, ops.mul, ops.add):
                vector = _find_vector_order(step, labels, rows[source.linear])
                if isinstance(vector, str):
                    return f"{step.op.name} (%{step.output.name}) {vector}"
                orders[step] = vector
    return orders


def _find_vector_order(step: Node, labels: Array, order: Array) -> list[int] | str:
    """Return places: new element i of the vectors that `step` reads is old element places[i]; or a reason (str).
    labels [..., width] has the linear's row that computes each feature of `step`; new row r is old row order[r]."""
    if not all(isinstance(v, Param) and v.shape == step.output.shape[-1:] for v in step.inputs[1:]):
        return "has an operand that is not a vector over the features"
    groups = labels.reshape(-1, labels.shape[-1])
    if (np.sort(groups) != np.sort(order[groups])).any():
        return "applies to parts of a head separately"
    places = [np.argsort(group)[np.searchsorted(np.sort(group), order[group])] for group in groups]
    if any((p != places[0]).any() for p in places):
        return "applies one vector to heads with different orders of features"
    return [int(p) for p in places[0]]


def _reorder_params(node: Node, order: list[int]) -> None:
    names = [o.name for o, v in zip(node.op.operands, node.inputs, strict=False) if isinstance(v, Param)]
    old = {name: node.operand(name) for name in names}
    new = {name: derive_param(p, take_rows(p.recipe, order)) for name, p in old.items() if isinstance(p, Param)}
    rebuild_node(node, new)
    for name, param in old.items():
        replace_param(param, new[name])
