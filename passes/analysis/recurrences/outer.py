"""Detect affine states that are read as in linear attention: S ← a ⊙ S + k vᵀ, read by outputs as S_tᵀ q.

Then states inside a chunk of tokens are never computed: the chunk is attention (Yang 2023, arXiv 2312.06635), and the
state is carried between chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.ir import Graph, Node, Value, ops
from weft.ir.graph.step import BATCH, Step
from weft.ir.types import Shape

from .affine import Affine, Diagonal, Rules, copy_into


@dataclass(frozen=True)
class Outer:
    """A state that is a sum of outer products of keys and values: `order` has its axes as batch, groups, keys, values.

    The gates compute ``a.NAME`` [batch, groups, keys or 1], ``k.NAME`` [batch, groups, keys], ``v.NAME`` [batch,
    groups, values], and the queries ``q0.NAME`` ... [batch, groups, keys] of its `reads` readings; the results of the
    readings are the inputs ``read0_NAME`` ... [batch, groups, values] of `after`. If `changes`, the values of a token
    are v + c ⊙ (wᵀ S) of the state S before it, with ``c.NAME`` [batch, groups, 1], ``w.NAME`` [batch, groups, keys].
    """

    order: tuple[int, ...]
    groups: int
    reads: int
    changes: bool = False


@dataclass(frozen=True)
class Parallel:
    """The form in which a step runs on many tokens at once: graphs as in `Affine`, and by name of the state an `Outer`,
    or None if the state has to be computed at every token."""

    gates: Graph
    after: Graph
    outer: dict[str, Outer | None]


@dataclass
class Reading:
    """A sum of q ⊙ S over the axis of keys, computed by `node`."""

    node: Node
    query: Value
    axis: int


def parallel_form(step: Step, affine: Affine) -> Parallel:
    """Return the parallel form of a `step` that is affine."""
    gates, after = affine.gates.clone(), affine.after.clone()
    outer: dict[str, Outer | None] = {}
    for name in step.states:
        outer[name] = outer_state(step, name, gates, after)
    return Parallel(prune(gates), prune(after), outer)


def prune(graph: Graph) -> Graph:
    """Return a copy of `graph` without unused nodes and inputs."""
    copy = Graph(graph.name)
    copy_into(copy, graph, [*graph.inputs], dict(graph.outputs))
    for name, value in list(copy.inputs.items()):
        if not value.uses and not value.is_output:
            del copy.inputs[name]
    return copy


def outer_state(step: Step, name: str, gates: Graph, after: Graph) -> Outer | None:
    """Add the keys, values and queries of the state `name` to the outputs of `gates`, and its readings to the inputs of
    `after`; return None, without a change, if the state has no such form."""
    state, old = after.inputs[f"new_{name}"], after.inputs[name]
    readings = _find_readings(step, state, after)
    a, b = (gates.outputs.get(f"{part}.{name}") for part in "ab")
    if old.uses or not readings or b is None or len({r.axis for r in readings}) != 1:
        return None
    if not all(depends_on_gates(r.query, gates) for r in readings):
        return None
    shape, keys = state.shape, readings[0].axis
    factors = [pad_rank(f, len(shape)) for f in _factors(b)]
    scales = [pad_rank(v, len(shape)) for v in ([] if a is None else [a])]
    queries = [r.query for r in readings]

    def fits(axis: int) -> bool:
        is_separate = all(f.shape[axis] == 1 or f.shape[keys] == 1 for f in factors)
        return is_separate and all(v.shape[axis] == 1 for v in (*scales, *queries))

    other_axes = [axis for axis in range(1, len(shape)) if axis != keys]
    fitting = [axis for axis in other_axes if fits(axis) and isinstance(shape[axis], int) and shape[axis] > 1]
    if not fitting:
        return None
    values = max(fitting, key=lambda axis: n if isinstance(n := shape[axis], int) else 0)
    order = (0, *(axis for axis in other_axes if axis != values), keys, values)
    layout = Layout(shape, order)
    del gates.outputs[f"b.{name}"]
    if a is not None:
        gates.outputs[f"a.{name}"] = layout.keys(scales[0], whole=False)
    gates.add_output(f"k.{name}", layout.keys(_product([f for f in factors if f.shape[values] == 1], gates, step)))
    gates.add_output(f"v.{name}", layout.values(_product([f for f in factors if f.shape[values] != 1], gates, step)))
    copies: dict[Value, Value] = {}
    for i, reading in enumerate(readings):
        query = move_into(reading.query, gates, copies)
        gates.add_output(f"q{i}.{name}", layout.keys(query))
        result = after.add_input(f"read{i}_{name}", state.type.with_shape(BATCH, layout.groups, shape[values]))
        with after.inserting(before=reading.node):
            placed = layout.place(result, reading.node.output.shape)
        reading.node.output.replace_uses(placed)
    return Outer(order, layout.groups, len(readings))


def _find_readings(step: Step, state: Value, after: Graph) -> list[Reading]:
    """Return the sums over one axis of a state, in the order of nodes; [] if it is read in another way."""
    rules, readings = Rules(after.inputs[step.tokens[0]]), list[Reading]()
    forms = {state: Diagonal("", state.shape)}
    for node in list(after.nodes):
        if forms.keys().isdisjoint(node.inputs):
            continue
        reading = reading_of(node, forms, rules)
        if reading is not None:
            readings.append(reading)
        elif (form := rules.form(node, forms)) is not None and form.b is None and form.shape == state.shape:
            forms[node.output] = form
        else:
            return []
    return [] if any(v in forms for v in after.outputs.values()) else readings


def reading_of(node: Node, forms: dict[Value, Diagonal], rules: Rules) -> Reading | None:
    operands = [v for v in node.inputs if v is not None]
    operand_forms = [forms.get(v) for v in operands]
    form = next(f for f in operand_forms if f is not None)
    rank = len(form.shape)
    if node.op is ops.sum and len(node.attrs["axes"]) == 1:
        axis = node.attrs["axes"][0] % rank
        query = rules.like(form.shape, 1.0) if form.a is None else form.a
        return Reading(node, pad_rank(query, rank), axis) if axis else None
    if (
        node.op is not ops.matmul
        or len(operand_forms) != 2
        or None not in operand_forms
        or len(node.output.shape) != rank
    ):
        return None
    state_index = 1 if operand_forms[0] is None else 0
    factor = pad_rank(operands[1 - state_index], rank)
    if factor.shape[-2 if state_index else -1] != 1:
        return None
    query = ops.transpose(factor, axes=(*range(rank - 2), rank - 1, rank - 2))
    return Reading(node, query if form.a is None else ops.mul(form.a, query), rank - 2 if state_index else rank - 1)


def _factors(value: Value) -> list[Value]:
    """Return the factors of the product `value`, or `value` itself."""
    node = value.producer
    if node is None or node.op is not ops.mul:
        return [value]
    return [f for v in node.inputs if v is not None for f in _factors(v)]


def _product(factors: Sequence[Value], gates: Graph, step: Step) -> Value:
    product = factors[0] if factors else Rules(gates.inputs[step.tokens[0]]).fill()
    for factor in factors[1:]:
        product = ops.mul(product, factor)
    return product


def pad_rank(v: Value, rank: int) -> Value:
    """Return `v` with leading axes of size 1, up to `rank` axes."""
    missing = rank - len(v.shape)
    if not missing:
        return v
    return ops.unsqueeze(v, axes=tuple(range(missing)))


def depends_on_gates(value: Value, gates: Graph) -> bool:
    """Return whether `value`, of the graph after the recurrence, depends only on inputs that `gates` has also."""
    if value.producer is None:
        return any(v is value for name, v in value.graph.inputs.items() if name in gates.inputs)
    return all(depends_on_gates(v, gates) for v in value.producer.inputs if v is not None)


def move_into(value: Value, gates: Graph, mapped: dict[Value, Value]) -> Value:
    """Copy `value`, of the graph after the recurrence, with all that it depends on into `gates`; return the copy."""
    if value in mapped:
        return mapped[value]
    if value.producer is None:
        name = next(n for n, v in value.graph.inputs.items() if v is value)
        return gates.inputs[name]
    node = value.producer
    operands = [None if v is None else move_into(v, gates, mapped) for v in node.inputs]
    copy = gates.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], [v.name for v in node.outputs])
    mapped.update(zip(node.outputs, copy.outputs, strict=True))
    return mapped[value]


class Layout:
    """The axes of a state of `shape` as [batch, groups, keys, values], by their `order`."""

    def __init__(self, shape: Shape, order: tuple[int, ...]) -> None:
        self.shape, self.order = shape, order
        *self.between, self.at_keys, self.at_values = order[1:]
        self.groups = math.prod(n for axis in self.between if isinstance(n := shape[axis], int))

    def keys(self, x: Value, whole: bool = True) -> Value:
        """Return x, of size 1 along values, as [batch, groups, keys]; unless `whole`, keys may stay 1."""
        return self._flatten(x, self.at_keys, whole)

    def values(self, x: Value) -> Value:
        return self._flatten(x, self.at_values, True)

    def _flatten(self, x: Value, last: int, whole: bool) -> Value:
        x = pad_rank(x, len(self.shape))
        dropped = self.at_values if last == self.at_keys else self.at_keys
        axes = [axis - (axis > dropped) for axis in (0, *self.between, last)]
        x = _transpose(ops.squeeze(x, axes=(dropped,)), axes)
        row = [self.shape[axis] for axis in (*self.between, last)]
        if not whole:
            row[-1] = x.shape[-1]
        if x.shape != (BATCH, *row):
            x = ops.expand(x, shape=(BATCH, *row))
        flat = (BATCH, self.groups, row[-1])
        return x if x.shape == flat else ops.reshape(x, shape=flat)

    def place(self, read: Value, shape: Shape) -> Value:
        """Return the result `read` [batch, groups, values] with the axes of the state, in the `shape` of its node."""
        x = ops.reshape(read, shape=(BATCH, *(self.shape[a] for a in self.between), 1, self.shape[self.at_values]))
        x = _transpose(x, _inverse(self.order))
        return x if x.shape == shape else ops.reshape(x, shape=shape)


def _transpose(x: Value, axes: Sequence[int]) -> Value:
    """Transpose x, merged with a transpose that x is the result of; a reshape if only axes of size 1 move."""
    if x.producer is not None and x.producer.op is ops.transpose:
        axes, x = [x.producer.attrs["axes"][axis] for axis in axes], x.producer.required("x")
    if list(axes) == list(range(len(axes))):
        return x
    wide = [axis for axis in axes if x.shape[axis] != 1]
    if wide == sorted(wide):
        return ops.reshape(x, shape=tuple(x.shape[axis] for axis in axes))
    return ops.transpose(x, axes=tuple(axes))


def _inverse(order: Iterable[int]) -> list[int]:
    places = list(order)
    return [places.index(axis) for axis in range(len(places))]
