"""Track features from a linear to an attention, through reshapes, splits, concatenations and norms.

Integer labels replace the elements of a value, and the NumPy references of the ops move the labels. All named sizes
are bound to 1 for this, and all tokens have the same labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.ir import Node, Value, ops
from weft.ir.interpreter import run_node
from weft.ir.recipes.readers import Array
from weft.ir.types.sizes import evaluate, list_names

from ..edits.edit import are_params

_MOVES = (ops.reshape, ops.split, ops.slice_, ops.concat, ops.expand, ops.unsqueeze, ops.squeeze)
_STILL = (ops.rms_norm, ops.layer_norm, ops.mul, ops.add, ops.clip, ops.affine)


def _bind_ones(*values: Value | None) -> dict[str, int]:
    """Return a size for each name in the shapes of `values`: 1, or a power of two if an expression would be below 1.
    The latter occurs for lengths of audio: a convolution has to return at least one frame."""
    shapes = [size for value in values if value is not None for size in value.shape]
    binding = {name: 1 for size in shapes for name in list_names(size)}
    for size in shapes:
        while evaluate(size, binding) < 1:
            binding.update((name, 2 * binding[name]) for name in list_names(size))
    return binding


def _make_labels(value: Value, labels: Array | None = None, first: int = 0) -> Array:
    """Return `labels` (one per feature of a token), broadcast to the shape of `value` [batch, seq, ...].
    If `labels` is None, the features are labelled first, first + 1, …."""
    shape = value.type.concrete(_bind_ones(value))
    labels = np.arange(first, first + int(np.prod(shape[2:]))) if labels is None else labels
    return np.broadcast_to(labels.reshape(shape[2:]), shape)


def _propagate_labels(node: Node, operand: int, labels: Array) -> list[Array] | None:
    """Return the labels of each output of `node` for `labels` of operand number `operand`; None if features may mix.
    All other operands get the label 0."""
    if node.op in _STILL and operand == 0:
        return [labels]
    if not _is_move(node):
        return None
    zeros = (None if v is None else np.zeros(v.type.concrete(_bind_ones(v)), int) for v in node.inputs)
    return _run_on_labels(node, [labels if i == operand else x for i, x in enumerate(zeros) if x is not None])


def _is_move(node: Node) -> bool:
    """Return whether `node` only moves features within a token: all operands and the output begin with [batch, seq]."""
    operands = [v for v in node.inputs if v is not None]
    return node.op in _MOVES and all(v.shape[:2] == node.output.shape[:2] for v in operands)


def _run_on_labels(node: Node, labels: list[Array]) -> list[Array]:
    binding = _bind_ones(*node.inputs, *node.outputs)
    return list(run_node(node.op, list(labels), node.attrs, binding))


def trace_sources(value: Value) -> dict[Value, Array]:
    """Trace the features of `value` back through ops that only move features, to the values they come from.

    Return, for each source value, an array in the shape of one token of `value`: the index of the feature within one
    token of the source, counted from 1, or 0 where the feature comes from another source.
    """
    labelled: dict[Value, Array] = {}
    starts: dict[Value, int] = {}
    count = 0  # the largest label in use

    def labels(v: Value) -> Array:
        nonlocal count
        if v not in labelled:
            node = v.producer
            if node is not None and _is_move(node):
                moved = _run_on_labels(node, [labels(x) for x in node.inputs if x is not None])
                labelled.update(zip(node.outputs, moved, strict=True))
            else:
                starts[v], labelled[v] = count, _make_labels(v, first=count + 1)
                count = int(labelled[v].max())
        return labelled[v]

    token = labels(value)[0, 0]
    moved = {
        v: np.where((token > first) & (token <= labelled[v].max()), token - first, 0) for v, first in starts.items()
    }
    return {v: indices for v, indices in moved.items() if indices.any()}


@dataclass(frozen=True)
class LinearOrigin:
    """The linear that computes the features of a value, and the nodes in between.

    `steps` are the nodes after `linear`, in order, each with the labels of its output; `labels` are those of the value.
    A label is the index of the weight row that computes a feature; label arrays have the shape of one token.
    """

    linear: Node
    steps: tuple[tuple[Node, Array], ...]
    labels: Array


def trace_origin(value: Value) -> LinearOrigin | str:
    """Trace `value` back to the linear that computes its features; return a reason (str) if there is no such path.

    On the path, every value has a single use; after the linear, which has only parameters, nodes move, normalize,
    scale, shift or clip features.
    """
    path: list[Value] = []
    while (node := value.producer) is not None:
        if len(value.uses) != 1 or value.is_output:
            return f"%{value.name} is also read elsewhere"
        path.insert(0, value)
        if node.op in (ops.linear, ops.norm_linear):
            break
        # Only the first operand is followed, and a concat has several sources.
        if node.op not in (*_MOVES, *_STILL) or node.op is ops.concat or node.inputs[0] is None:
            return f"%{value.name} is made by {node.op.name}, not by a linear"
        value = node.inputs[0]
    if node is None:
        return f"no linear computes %{value.name}"
    if not are_params(node.inputs[1:]):
        return f"the weight of %{node.output.name} is computed"
    labels = _make_labels(node.output)
    steps: list[tuple[Node, Array]] = []
    for reached in path[1:]:
        step = reached.producer
        assert step is not None
        pushed = _propagate_labels(step, 0, labels)
        if pushed is None:
            return f"{step.op.name} (%{reached.name}) mixes its features"
        labels = pushed[reached.index]
        steps.append((step, labels[0, 0]))
    return LinearOrigin(node, tuple(steps), labels[0, 0])


@dataclass(frozen=True)
class Destination:
    """The attention `node` that reads a value as its operand `role` ("q" or "k").

    `labels` [heads, head_dim] are the labels of this operand, with its number of heads (KV heads for k).
    """

    node: Node
    role: str
    labels: Array


def trace_destination(value: Value, token: Array) -> Destination | str:
    """Follow `value` to the attention that reads it as q or k; return a reason (str) if there is no such path.

    `token` has the labels of one token of `value`. On the path, every value has a single use. Nodes move features, or
    change all alike: clips, factors, and norms without a weight whose rows all have the same labels.
    """
    labels = _make_labels(value, token)
    while True:
        if len(value.uses) != 1 or value.is_output:
            return f"%{value.name} is not read by one attention alone"
        ((node, i),) = value.uses
        if node.op is ops.attention and i < 2:
            heads = node.attrs["heads" if i == 0 else "kv_heads"]
            return Destination(node, "qk"[i], labels[0, 0].reshape(heads, -1))
        pushed = _propagate_labels(node, i, labels)
        groups = np.sort(labels.reshape(-1, labels.shape[-1]))
        # A norm averages each row: all rows must hold the same labels, in any order.
        uneven = node.op in (ops.rms_norm, ops.layer_norm) and (groups != groups[0]).any()
        # A second operand, such as a norm's weight, differs from feature to feature.
        if pushed is None or len(pushed) != 1 or uneven or (node.op in _STILL and len(node.inputs) > 1):
            return f"%{value.name} is read by {node.op.name}, not by an attention"
        value, labels = node.output, pushed[0]
