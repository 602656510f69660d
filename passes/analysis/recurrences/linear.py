"""Detect steps that are affine in a state as a whole: new state = L(state) + b, L linear along one axis of the state.

So are the delta rule (Yang 2024, arXiv 2406.06484) and products with matrices that depend on the token. L is found by
taking from the step what does not depend on the state; which axes it mixes is measured on random numbers, where a map
that mixes an axis keeps no zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from weft.ir import Graph, Node, Value, interpret, ops
from weft.ir.graph.step import NEXT, Step, live_nodes
from weft.ir.op import Op
from weft.ir.recipes.readers import Array

from .affine import copy_into, reaches
from .rows import keeps_rows

MOST_BLOCKS, SMALL = 4, 16  # of an identity that are run beside a state; keys of states that may have more


@dataclass(frozen=True)
class Linear:
    """The linear part of one state of a step: `graph` makes L(state), the output ``next``, of all that the step takes.

    `order` is its axes as batch, groups, the axis that L mixes, and the one whose columns it treats alike; where there
    is no such, the last is missing.
    """

    graph: Graph
    order: tuple[int, ...]
    columns: bool


def linear_parts(step: Step) -> dict[str, Linear] | None:
    """The linear part of each state of `step`; None if one has none, or one that costs more than a loop."""
    if not all(keeps_rows(node) for node in step.graph.nodes):
        return None
    found = {name: _part(step, name) for name in step.states}
    return {name: part for name, part in found.items() if part} if all(found.values()) else None


def _part(step: Step, name: str) -> Linear | None:
    graph = step.graph.clone()
    state, new = graph.inputs[name], graph.outputs[NEXT + name]
    if any(reaches(graph.inputs[other], [new]) for other in step.states if other != name):
        return None
    parts = {state: state}
    for node in live_nodes(graph, [new]):
        if state not in node.inputs and parts.keys().isdisjoint(node.inputs):
            continue
        rule = _RULES.get(node.op)
        made = None if rule is None else rule(node, parts)
        if made is None:
            return None
        parts.update(zip(node.outputs, made, strict=True))
    if new not in parts:
        return None
    only = Graph(f"linear_{name}")
    copy_into(only, graph, [*graph.inputs], {"next": parts[new]})
    for other in step.states:
        if other != name:
            del only.inputs[other]
    return _laid(step, only, name)


# -- rules: the linear parts of what a node makes, None if it is not linear


Parts = Mapping[Value, Value]


def _each(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    """The node, of the part of its first and only operand."""
    return node.op.emit(parts[node.required("x")], **node.attrs)


def _scaled(node: Node, parts: Parts) -> tuple[Value, ...]:
    return (ops.affine(parts[node.required("x")], by=node.attrs["by"]),)


def _padded(node: Node, parts: Parts) -> tuple[Value, ...]:
    return node.op.emit(parts[node.required("x")], **{**node.attrs, "value": 0.0})


def _cast(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    return _each(node, parts) if node.attrs["to"].is_float else None


def _added(node: Node, parts: Parts) -> tuple[Value, ...]:
    x, y = (None if v is None else parts.get(v) for v in node.inputs)
    if x is not None and y is not None:
        return (node.op(x, y),)
    alone = x if x is not None else y if node.op is ops.add or y is None else ops.neg(y)
    assert alone is not None
    return (alone if alone.shape == node.output.shape else ops.expand(alone, shape=node.output.shape),)


def _multiplied(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    x, y = node.inputs[:2]
    assert x is not None and y is not None
    if x in parts and y in parts:
        return None
    return (node.op(parts.get(x, x), parts.get(y, y)),)


def _divided(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    return None if node.inputs[1] in parts else _multiplied(node, parts)


def _mapped(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    if not parts.keys().isdisjoint(node.inputs[1:]):
        return None
    return (ops.linear(parts[node.required("x")], node.required("weight")),)


def _joined(node: Node, parts: Parts) -> tuple[Value, ...]:
    return node.op.emit(*(_or_zero(v, parts) for v in node.inputs if v is not None), **node.attrs)


def _chosen(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    condition, x, y = (v for v in node.inputs if v is not None)
    if condition in parts:
        return None
    made = ops.where(condition, _or_zero(x, parts), _or_zero(y, parts))
    return (made if made.shape == node.output.shape else ops.expand(made, shape=node.output.shape),)


def _or_zero(value: Value, parts: Parts) -> Value:
    return parts[value] if value in parts else ops.affine(value, by=0.0)


_VIEWS = (ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze, ops.expand, ops.slice_, ops.split)
_RULES: dict[Op, Callable[[Node, Parts], tuple[Value, ...] | None]] = {
    **dict.fromkeys((*_VIEWS, ops.neg, ops.sum, ops.mean, ops.cumsum), _each),
    **dict.fromkeys((ops.add, ops.sub), _added),
    **dict.fromkeys((ops.mul, ops.matmul), _multiplied),
    **{ops.affine: _scaled, ops.pad: _padded, ops.cast: _cast, ops.div: _divided, ops.linear: _mapped},
    **{ops.concat: _joined, ops.where: _chosen},
}


# -- axes


def _laid(step: Step, graph: Graph, name: str) -> Linear | None:
    """The linear part with the order of its axes; None if it mixes several, or many more than it has columns."""
    shape = step.graph.inputs[name].shape
    row = [n for n in shape[1:] if isinstance(n, int)]
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(v.type.concrete({"batch": 2})) for n, v in graph.inputs.items()}

    def mapped(state: Array) -> Array:
        return interpret(graph, {**feeds, name: state})["next"]

    state = rng.standard_normal((2, *row))
    whole = mapped(state)

    def apart(axis: int) -> bool:
        """Return whether the numbers along `axis` are mapped each alone."""
        one = np.arange(state.shape[axis]).reshape(-1, *[1] * (state.ndim - 1 - axis)) == 0
        return np.array_equal(mapped(state * one) != 0, (whole != 0) & one)

    def alike(axis: int) -> bool:
        """Return whether they are mapped in the same way."""
        turned = np.roll(whole, 1, axis)
        return bool(np.allclose(mapped(np.roll(state, 1, axis)), turned, rtol=1e-9, atol=1e-9 * np.abs(whole).max()))

    axes = range(1, len(shape))
    alone = [axis for axis in axes if state.shape[axis] > 1 and apart(axis)]
    mixed = [axis for axis in axes if state.shape[axis] > 1 and axis not in alone]
    if len(mixed) != 1:
        return None
    columns = [axis for axis in alone if alike(axis)]
    last = max(columns, key=lambda axis: state.shape[axis], default=0)
    keys, width = state.shape[mixed[0]], state.shape[last] if last else 1
    if keys > SMALL and -(-keys // width) > MOST_BLOCKS:
        return None
    groups = [axis for axis in axes if axis not in (mixed[0], last)]
    return Linear(graph, (0, *groups, mixed[0], *([last] if last else [])), bool(last))
