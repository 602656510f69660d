"""The step of a recurrence taken apart: which dimensions of its values run over the same axis of its states, and the
products by weights that libraries compute before its kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.ir import ops
from weft.ir.graph import Graph, Node, Value
from weft.ir.graph.step import BATCH, Step, live_nodes

Axis = tuple[Value, int]  # a dimension of a value, which stands for all dimensions that are joined to it
REDUCTIONS = (ops.sum, ops.mean, ops.max, ops.min)
PRODUCTS = (ops.linear, ops.head_linear)
MOVES = (ops.reshape, ops.squeeze, ops.unsqueeze)


def products_apart(step: Step) -> tuple[Graph, Step] | None:
    """The products by weights in `step`, as a graph of what they are made of, and the step that takes them as its last
    tokens; None where it has none."""
    products = [_moved(node.output) for node in step.graph.nodes if node.op in PRODUCTS]
    if not products or any(v.shape[:1] != (BATCH,) or v in step.graph.outputs.values() for v in products):
        return None
    first = live_nodes(step.graph, products)
    rest = live_nodes(step.graph, step.graph.outputs.values(), products)
    before, after, given = Graph("products"), Graph("step"), step.graph.inputs
    read = {v for node in rest for v in node.inputs if v is not None}
    made = dict[Value, Value]()
    tokens, constants = ([n for n in part if given[n] in read] for part in (step.tokens, step.constants))
    named = {f"product{i}": value for i, value in enumerate(products)}
    for name, value in {**{n: given[n] for n in (*step.states, *tokens)}, **named}.items():
        made[value] = after.add_input(name, value.type)
    for name in constants:
        made[given[name]] = after.add_input(name, given[name].type)
    _copy(after, rest, made)
    for name, value in step.graph.outputs.items():
        after.add_output(name, made[value])
    needed = {v for node in first for v in node.inputs if v is not None}
    known = {value: before.add_input(name, value.type) for name, value in given.items() if value in needed}
    _copy(before, first, known)
    for name, value in named.items():
        before.add_output(name, known[value])
    return before, Step(after, step.initial, [*tokens, *named])


def _moved(value: Value) -> Value:
    """`value` in the last of the shapes that it is given."""
    while len(value.uses) == 1 and value.uses[0][0].op in MOVES:
        value = value.uses[0][0].output
    return value


def _copy(graph: Graph, nodes: Sequence[Node], made: dict[Value, Value]) -> None:
    """Add copies of `nodes` to `graph`, which read what is `made` of their operands, and note what they make there."""
    for node in nodes:
        operands = [None if v is None else made[v] for v in node.inputs]
        names = [v.name for v in node.outputs]
        copy = graph.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], names, "")
        made.update(zip(node.outputs, copy.outputs, strict=True))


class Axes:
    """The dimensions of all values of `step`, those joined that an op runs over together; sizes of 1 are joined to
    none."""

    def __init__(self, step: Step) -> None:
        self._joined: dict[Axis, Axis] = {}
        for node in step.graph.nodes:
            self._join_all(_pairs(node))
        for name in step.states:
            old, new = step.graph.inputs[name], step.new(name)
            self._join_all(((old, d), (new, d)) for d in range(len(old.shape)))

    def of(self, value: Value) -> tuple[Axis | None, ...]:
        """The axis that each dimension of `value` runs over; None where its size is 1."""
        return tuple(None if n == 1 else self._root((value, d)) for d, n in enumerate(value.shape))

    def _root(self, axis: Axis) -> Axis:
        while axis in self._joined:
            axis = self._joined[axis]
        return axis

    def _join_all(self, pairs: Iterable[tuple[Axis, Axis]]) -> None:
        for one, two in pairs:
            if 1 not in (one[0].shape[one[1]], two[0].shape[two[1]]) and self._root(one) != self._root(two):
                self._joined[self._root(one)] = self._root(two)


def reduced(node: Node) -> set[int]:
    """The dimensions of its operand that a reduction sums up, or takes the largest of."""
    rank = len(node.required("x").shape)
    return {a % rank for a in node.attrs["axes"]}


def regroups(node: Node) -> bool:
    """Return whether a reshape merges or splits dimensions, and does not only add or drop those of size 1."""
    if node.op is not ops.reshape:
        return False
    before, after = ([n for n in v.shape if n != 1] for v in (node.required("x"), node.output))
    return before != after


def _pairs(node: Node) -> Iterable[tuple[Axis, Axis]]:
    """The dimensions of operands and results of `node` that are the same."""
    if len(node.outputs) != 1 or regroups(node):
        return []
    out, values = node.output, [v for v in node.inputs if v is not None]
    if node.op in (ops.reshape, ops.squeeze, ops.unsqueeze):
        dims = ([(v, d) for d, n in enumerate(v.shape) if n != 1] for v in (values[0], out))
        return zip(*dims, strict=True)
    if node.op is ops.transpose:
        return [((values[0], a), (out, d)) for d, a in enumerate(node.attrs["axes"])]
    if node.op in REDUCTIONS:
        kept = [d for d in range(len(values[0].shape)) if d not in reduced(node)]
        return [((values[0], d), (out, d if node.attrs["keepdims"] else i)) for i, d in enumerate(kept)]
    if node.op is ops.matmul:
        x, y = values
        rows, inner, columns = (len(v.shape) - d for v, d in ((x, 2), (x, 1), (y, 1)))
        last = len(out.shape) - 1
        own = [((x, rows), (out, last - 1)), ((y, columns), (out, last)), ((x, inner), (y, columns - 1))]
        return [*own, *(pair for v in values for pair in _broadcast(v, out) if pair[1][1] < last - 1)]
    return [pair for v in values for pair in _broadcast(v, out)]


def _broadcast(value: Value, out: Value) -> list[tuple[Axis, Axis]]:
    """The dimensions of an operand and of what an elementwise op makes of it, aligned at the last."""
    first = len(out.shape) - len(value.shape)
    return [((value, d), (out, d + first)) for d in range(len(value.shape))] if first >= 0 else []
