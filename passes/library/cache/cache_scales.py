"""Scales of quantized caches, fitted to the keys and values that attentions store of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from weft.ir import Graph, Node, Value, ops
from weft.ir.ops.cache_codes import limits
from weft.ir.recipes.readers import Array
from weft.ir.types import sizes

from ...analysis.states import has_state, specs
from ...fitting.calibration import Activations

Per = Literal["channel", "head", "tensor"]
SHRINK = (*np.linspace(0.3, 1.0, 29), 1.1, 1.25)  # factors of the range that are tried
CONTEXT = 4096  # positions that keys are rotated to, where the model does not say how far it reads


def fitted(
    graph: Graph, attentions: Sequence[Node], texts: Sequence[Array], bits: int, per: Per
) -> Iterator[tuple[Node, Array, Array | None]]:
    """For each of `attentions` in order the scales of its keys and values, f32 [kv_heads · width] or [1], for what it
    stores of the `texts` (ids [texts, length]); of latent caches those of the keys alone.

    Keys are stored as they are rotated, which at later positions reaches where the first ones do not: the texts stand
    all over the context, where the model's attention goes by distances.
    """
    copy, twins = _without_caches(graph)
    activations = Activations(copy, texts, _spread(copy, texts))
    for node in attentions:
        twin, heads = twins[node], int(node.attrs["kv_heads"])
        k = _rows(activations(twin.required("k")), heads)
        v = None if twin.operand("v") is None else _rows(activations(twin.required("v")), heads)
        q = _rows(activations(twin.required("q")), int(node.attrs["heads"]))
        # What an error of a key costs: the squares of the numbers that queries multiply it by.
        weight = np.square(q).mean(0).reshape(heads, -1, q.shape[2]).sum(1)
        yield node, scale_of(k, bits, per, weight), None if v is None else scale_of(v, bits, per)


def scale_of(x: Array, bits: int, per: Per, weight: Array | None = None) -> Array:
    """The scales, f32 [heads · width] or [1], that round x [n, heads, width] with the least squared error, in which
    channels count by `weight` [heads, width]."""
    n, heads, width = x.shape
    groups = {"channel": heads * width, "head": heads, "tensor": 1}[per]
    rows = np.ascontiguousarray(x.reshape(n, groups, -1).transpose(1, 0, 2), np.float32)
    counts = np.ones((groups, 1, rows.shape[2])) if weight is None else weight.reshape(groups, 1, -1)
    low, high = limits(bits)
    widest = np.abs(rows).max((1, 2), keepdims=True)
    widest[widest == 0] = 1  # any scale will do
    best, least = widest, np.full(widest.shape, np.inf)
    for factor in SHRINK:
        scale = widest * np.float32(factor / high)
        error = np.clip(np.rint(rows / scale), low, high) * scale - rows
        cost = (np.square(error) * counts).sum((1, 2), keepdims=True)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    found: Array = best.reshape(-1).astype(np.float32)
    return found if per != "head" else found.repeat(width)


def _rows(parts: Iterable[Array], heads: int) -> Array:
    """Activations [texts, length, heads · width] as [n, heads, width]."""
    return np.concatenate([part.reshape(-1, heads, part.shape[-1] // heads) for part in parts])


def _spread(graph: Graph, texts: Sequence[Array]) -> list[Array] | None:
    """Positions [texts, length] all over the context; None where texts must begin at 0."""
    at = graph.inputs.get("position_ids")
    if at is None or not at.uses or any(node.op is not ops.rope for node in at.users):
        return None
    context = int(graph.meta.get("context") or CONTEXT)
    starts = iter(np.linspace(0, 1, sum(len(ids) for ids in texts)))
    return [
        np.array([int(next(starts) * max(0, context - ids.shape[1])) + np.arange(ids.shape[1]) for _ in ids])
        for ids in texts
    ]


def _without_caches(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of `graph` that reads texts from their beginning, and its nodes by those of `graph`."""
    copy = graph.clone()
    twins = dict(zip(graph.nodes, copy.nodes, strict=True))
    for name in list(copy.outputs):
        del copy.outputs[name]
    # A mask of past and call is one of the call.
    _rename_size(copy, "total", "seq")
    for node, twin in list(twins.items()):
        if has_state(node):
            twins[node] = _fresh(copy, twin)
    for name, value in list(copy.inputs.items()):
        if not value.uses:
            del copy.inputs[name]
    return copy, twins


def _fresh(graph: Graph, node: Node) -> Node:
    """`node` of a call without a past, in its place."""
    absent = {spec.taken for spec in specs(node)} | {spec.positions for spec in specs(node)}
    given = [None if o.name in absent else v for o, v in zip(node.op.operands, node.inputs, strict=False)]
    attrs = {**node.attrs, **({"rolling": False} if "rolling" in node.attrs else {})}
    with graph.inserting(before=node):
        made = node.op.emit(*given, **attrs)
    node.output.replace_uses(made[0])
    graph.erase(node)
    assert made[0].producer is not None
    return made[0].producer


def _rename_size(graph: Graph, old: str, new: str) -> None:
    binding = {old: sizes.sym(new)}

    def renamed(value: Any) -> Any:
        if isinstance(value, sizes.Poly):
            return sizes.substitute(value, binding)
        return tuple(map(renamed, value)) if isinstance(value, tuple) else value

    values: list[Value] = [*graph.inputs.values(), *(v for node in graph.nodes for v in node.outputs)]
    for value in values:
        value.type = value.type.with_shape(*(renamed(size) for size in value.type.shape))
    for node in graph.nodes:
        node.attrs = {name: renamed(value) for name, value in node.attrs.items()}
