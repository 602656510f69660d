"""Detect steps with new state = L(state) + b, where L is linear along one axis of the state.

Examples are the delta rule (Yang 2024, arXiv 2406.06484) and products with matrices that depend on the token. L is the
step without the terms that are independent of the state. The axis that L mixes is determined on random values: the
result for a state with one nonzero index along an axis is nonzero elsewhere only if L mixes this axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from weft.ir import Graph, Node, Value, interpret, ops
from weft.ir.graph.step import NEXT, Step, find_live_nodes
from weft.ir.op import Op
from weft.ir.recipes.readers import Array

from .affine import copy_into, has_dependent
from .rows import is_rowwise

# L is applied to the columns of an identity: to at most MOST_BLOCKS blocks as wide as the state, or to SMALL keys.
MOST_BLOCKS, SMALL = 4, 16


@dataclass(frozen=True)
class LinearPart:
    """The linear part L of one state of a step, in new state = L(state) + b.

    graph: computes L(state) as its output ``next``, from the state and the step's inputs other than states.
    order: the axes of the state in the order batch, groups, the axis that L mixes, and, if `columns` is True, an axis
        along which L acts identically on every index.
    """

    graph: Graph
    order: tuple[int, ...]
    columns: bool


def find_linear_parts(step: Step) -> dict[str, LinearPart] | None:
    """Return the linear part of each state of `step`, by name; None if a state has none.

    Also return None if batch rows depend on each other. The axis that L mixes must have at most `SMALL` indices, or at
    most `MOST_BLOCKS` times the number of columns: otherwise a loop over the tokens is faster.
    """
    if not all(is_rowwise(node) for node in step.graph.nodes):
        return None
    parts = {name: _find_linear_part(step, name) for name in step.states}
    return {name: part for name, part in parts.items() if part} if all(parts.values()) else None


def _find_linear_part(step: Step, name: str) -> LinearPart | None:
    graph = step.graph.clone()
    state, new = graph.inputs[name], graph.outputs[NEXT + name]
    if any(has_dependent(graph.inputs[other_state], [new]) for other_state in step.states if other_state != name):
        return None
    parts = {state: state}
    for node in find_live_nodes(graph, [new]):
        if state not in node.inputs and parts.keys().isdisjoint(node.inputs):
            continue
        rule = _RULES.get(node.op)
        results = None if rule is None else rule(node, parts)
        if results is None:
            return None
        parts.update(zip(node.outputs, results, strict=True))
    if new not in parts:
        return None
    linear = Graph(f"linear_{name}")
    copy_into(linear, graph, [*graph.inputs], {"next": parts[new]})
    for other_state in step.states:
        if other_state != name:
            del linear.inputs[other_state]
    return _order_axes(step, linear, name)


# -- rules: the linear parts of a node's outputs; None if they are not linear in the state


Parts = Mapping[Value, Value]


def _emit_again(node: Node, parts: Parts, **attrs: float) -> tuple[Value, ...] | None:
    return node.op.emit(parts[node.required_operand("x")], **{**node.attrs, **attrs})


def _add(node: Node, parts: Parts) -> tuple[Value, ...]:
    x, y = (None if v is None else parts.get(v) for v in node.inputs)
    if x is not None and y is not None:
        return (node.op(x, y),)
    summand = x if x is not None else y if node.op is ops.add or y is None else ops.neg(y)
    assert summand is not None
    return (summand if summand.shape == node.output.shape else ops.expand(summand, shape=node.output.shape),)


def _multiply(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    x, y = (v for v in node.inputs if v is not None)
    return None if x in parts and y in parts else (node.op(parts.get(x, x), parts.get(y, y)),)


def _multiply_weight(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    if not parts.keys().isdisjoint(node.inputs[1:]):
        return None
    return (ops.linear(parts[node.required_operand("x")], node.required_operand("weight")),)


def _concat(node: Node, parts: Parts) -> tuple[Value, ...]:
    return node.op.emit(*(_get_part_or_zero(v, parts) for v in node.inputs if v is not None), **node.attrs)


def _select(node: Node, parts: Parts) -> tuple[Value, ...] | None:
    condition, x, y = (v for v in node.inputs if v is not None)
    if condition in parts:
        return None
    result = ops.where(condition, _get_part_or_zero(x, parts), _get_part_or_zero(y, parts))
    return (result if result.shape == node.output.shape else ops.expand(result, shape=node.output.shape),)


def _get_part_or_zero(value: Value, parts: Parts) -> Value:
    return parts[value] if value in parts else ops.affine(value, by=0.0)


_VIEWS = (ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze, ops.expand, ops.slice_, ops.split)
_RULES: dict[Op, Callable[[Node, Parts], tuple[Value, ...] | None]] = {
    **dict.fromkeys((*_VIEWS, ops.neg, ops.sum, ops.mean, ops.cumsum), _emit_again),
    **dict.fromkeys((ops.add, ops.sub), _add),
    **dict.fromkeys((ops.mul, ops.matmul), _multiply),
    **{ops.affine: partial(_emit_again, plus=0.0), ops.pad: partial(_emit_again, value=0.0)},
    ops.cast: lambda node, parts: _emit_again(node, parts) if node.attrs["to"].is_float else None,
    ops.div: lambda node, parts: None if node.inputs[1] in parts else _multiply(node, parts),
    **{ops.linear: _multiply_weight, ops.concat: _concat, ops.where: _select},
}


# -- axes


def _order_axes(step: Step, graph: Graph, name: str) -> LinearPart | None:
    """Return `graph`, the map L of the state `name`, as a `LinearPart` with its axes ordered.
    Return None unless L mixes one axis, which is short enough (see `find_linear_parts`)."""
    shape = step.graph.inputs[name].shape
    row = [n for n in shape[1:] if isinstance(n, int)]
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(v.type.concrete({"batch": 2})) for n, v in graph.inputs.items()}

    def run_linear(state: Array) -> Array:
        return interpret(graph, {**feeds, name: state})["next"]

    state = rng.standard_normal((2, *row))
    result = run_linear(state)

    def is_independent(axis: int) -> bool:
        """Return whether L maps the slices along `axis` independently of each other."""
        first = np.arange(state.shape[axis]).reshape(-1, *[1] * (state.ndim - 1 - axis)) == 0
        return np.array_equal(run_linear(state * first) != 0, (result != 0) & first)

    def is_uniform(axis: int) -> bool:
        """Return whether L commutes with np.roll along `axis`: it maps every slice by the same function."""
        actual, rolled = run_linear(np.roll(state, 1, axis)), np.roll(result, 1, axis)
        return bool(np.allclose(actual, rolled, rtol=1e-9, atol=1e-9 * np.abs(result).max()))

    axes = range(1, len(shape))
    independent = [axis for axis in axes if state.shape[axis] > 1 and is_independent(axis)]
    mixed = [axis for axis in axes if state.shape[axis] > 1 and axis not in independent]
    if len(mixed) != 1:
        return None
    columns = [axis for axis in independent if is_uniform(axis)]
    last = max(columns, key=lambda axis: state.shape[axis], default=0)
    keys, width = state.shape[mixed[0]], state.shape[last] if last else 1
    if keys > SMALL and -(-keys // width) > MOST_BLOCKS:
        return None
    groups = [axis for axis in axes if axis not in (mixed[0], last)]
    return LinearPart(graph, (0, *groups, mixed[0], *([last] if last else [])), bool(last))
