"""Analysis of a recurrence's step: which dimensions of its values run over the same axis of the states, and which
matrix products PyTorch computes before the kernel runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from networkx.utils import UnionFind

from weft.ir import ops
from weft.ir.graph import Graph, Node, Value
from weft.ir.graph.step import BATCH, Step, find_live_nodes

Axis = tuple[Value, int]  # a dimension of a value: the representative of all dimensions joined to it
REDUCTIONS = (ops.sum, ops.mean, ops.max, ops.min)
PRODUCTS = (ops.linear, ops.head_linear)
MOVES = (ops.reshape, ops.squeeze, ops.unsqueeze)


def split_products(step: Step) -> tuple[Graph, Step] | None:
    """Split `step` into a graph that computes its products by weights, and a step for the rest, whose last tokens are
    the products. Return None if there are no products, or one of them lacks a batch axis or is an output of `step`."""
    products = [_follow_moves(node.output) for node in step.graph.nodes if node.op in PRODUCTS]
    if not products or any(v.shape[:1] != (BATCH,) or v in step.graph.outputs.values() for v in products):
        return None
    first = find_live_nodes(step.graph, products)
    rest = find_live_nodes(step.graph, step.graph.outputs.values(), products)
    before, after, inputs = Graph("products"), Graph("step"), step.graph.inputs
    read = {v for node in rest for v in node.inputs if v is not None}
    copies = dict[Value, Value]()
    tokens, constants = ([n for n in part if inputs[n] in read] for part in (step.tokens, step.constants))
    named = {f"product{i}": value for i, value in enumerate(products)}
    for name, value in {**{n: inputs[n] for n in (*step.states, *tokens)}, **named}.items():
        copies[value] = after.add_input(name, value.type)
    for name in constants:
        copies[inputs[name]] = after.add_input(name, inputs[name].type)
    _copy_nodes(after, rest, copies)
    for name, value in step.graph.outputs.items():
        after.add_output(name, copies[value])
    needed = {v for node in first for v in node.inputs if v is not None}
    sources = {value: before.add_input(name, value.type) for name, value in inputs.items() if value in needed}
    _copy_nodes(before, first, sources)
    for name, value in named.items():
        before.add_output(name, sources[value])
    return before, Step(after, step.initial, [*tokens, *named])


def _follow_moves(value: Value) -> Value:
    """Return the result of the reshapes that follow `value`, each the only reader of its operand; else `value`."""
    while len(value.uses) == 1 and value.uses[0][0].op in MOVES:
        value = value.uses[0][0].output
    return value


def _copy_nodes(graph: Graph, nodes: Sequence[Node], copies: dict[Value, Value]) -> None:
    """Add copies of `nodes` to `graph`; `copies` maps values to their copies, and the results are added to it."""
    for node in nodes:
        operands = [None if v is None else copies[v] for v in node.inputs]
        names = [v.name for v in node.outputs]
        copy = graph.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], names, "")
        copies.update(zip(node.outputs, copy.outputs, strict=True))


class StepAxes:
    """The axes of `step`. An axis is a set of dimensions of values, above size 1, that ops iterate over together."""

    def __init__(self, step: Step) -> None:
        self._joined = UnionFind()
        states = ((step.graph.inputs[name], step.new_state(name)) for name in step.states)
        dims = [((old, d), (new, d)) for old, new in states for d in range(len(old.shape))]
        for a, b in itertools.chain(dims, *map(_pair_dims, step.graph.nodes)):
            if 1 not in (a[0].shape[a[1]], b[0].shape[b[1]]):
                self._joined.union(a, b)

    def axes_of(self, value: Value) -> tuple[Axis | None, ...]:
        """Return the axis of each dimension of `value`; None for a dimension of size 1."""
        return tuple(None if n == 1 else self._joined[value, d] for d, n in enumerate(value.shape))


def find_reduced_dims(node: Node) -> set[int]:
    """Return the dimensions of x, counted from 0, over which the reduction `node` runs."""
    rank = len(node.required_operand("x").shape)
    return {a % rank for a in node.attrs["axes"]}


def is_regrouping(node: Node) -> bool:
    """Return whether `node` is a reshape that merges or splits dimensions; sizes of 1 do not count."""
    if node.op is not ops.reshape:
        return False
    before, after = ([n for n in v.shape if n != 1] for v in (node.required_operand("x"), node.output))
    return before != after


def _pair_dims(node: Node) -> Iterable[tuple[Axis, Axis]]:
    """Return pairs (dimension of an operand, dimension of the result) of `node` that run over the same axis. A matrix
    product also pairs its summed dimensions; a node that regroups dimensions or has several outputs has no pairs."""
    if len(node.outputs) != 1 or is_regrouping(node):
        return []
    out, values = node.output, [v for v in node.inputs if v is not None]
    if node.op in (ops.reshape, ops.squeeze, ops.unsqueeze):
        dims = ([(v, d) for d, n in enumerate(v.shape) if n != 1] for v in (values[0], out))
        return zip(*dims, strict=True)
    if node.op is ops.transpose:
        return [((values[0], a), (out, d)) for d, a in enumerate(node.attrs["axes"])]
    if node.op in REDUCTIONS:
        remaining = [d for d in range(len(values[0].shape)) if d not in find_reduced_dims(node)]
        return [((values[0], d), (out, d if node.attrs["keepdims"] else i)) for i, d in enumerate(remaining)]
    if node.op is ops.matmul:
        x, y = values
        rows, inner, columns = (len(v.shape) - d for v, d in ((x, 2), (x, 1), (y, 1)))
        last = len(out.shape) - 1
        joined = [((x, rows), (out, last - 1)), ((y, columns), (out, last)), ((x, inner), (y, columns - 1))]
        return [*joined, *(pair for v in values for pair in _pair_broadcast_dims(v, out) if pair[1][1] < last - 1)]
    return [pair for v in values for pair in _pair_broadcast_dims(v, out)]


def _pair_broadcast_dims(value: Value, out: Value) -> list[tuple[Axis, Axis]]:
    """Return pairs of dimensions of an operand and the result `out` of an elementwise op, aligned at the last one."""
    first = len(out.shape) - len(value.shape)
    return [((value, d), (out, d + first)) for d in range(len(value.shape))] if first >= 0 else []
