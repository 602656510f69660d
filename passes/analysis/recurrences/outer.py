"""Detect affine states that are read as those of linear attention are: S ← a ⊙ S + k vᵀ, seen by outputs as S_tᵀ q.

Then no state of a token in the middle has to be made: inside a chunk of tokens it is attention (Yang 2023, arXiv
2312.06635), between chunks the state is carried.
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
    """A state that is a sum of products of keys and values: its axes in the order batch, groups, keys, values; `reads`
    counts the queries that outputs read it by.

    Of its parts the gates make ``a.``, ``k.`` and ``v.`` [batch, groups, keys], of a [batch, groups, keys or 1], of v
    [batch, groups, values], and for each reading ``q0.``, ... [batch, groups, keys]; what is read, an input of `after`
    called ``read0_`` ..., is [batch, groups, values]. Where a token also `changes` what the state holds, its values are
    v + c ⊙ (wᵀ S) of the state before it, c. [batch, groups, 1] and w. [batch, groups, keys].
    """

    order: tuple[int, ...]
    groups: int
    reads: int
    changes: bool = False


@dataclass(frozen=True)
class Parallel:
    """The form in which a step runs on many tokens at once: graphs as of `Affine`, and for each state by name an
    `Outer`, or None where its values at all tokens are made."""

    gates: Graph
    after: Graph
    outer: dict[str, Outer | None]


@dataclass
class Reading:
    """A sum of q ⊙ S over the axis of keys, which `node` makes."""

    node: Node
    query: Value
    axis: int


def parallel(step: Step, affine: Affine) -> Parallel:
    """The parallel form of a `step` that is affine."""
    gates, after = affine.gates.clone(), affine.after.clone()
    outer: dict[str, Outer | None] = {}
    for name in step.states:
        outer[name] = outer_state(step, name, gates, after)
    return Parallel(pruned(gates), pruned(after), outer)


def pruned(graph: Graph) -> Graph:
    """A copy of `graph` without what no output needs."""
    copy = Graph(graph.name)
    copy_into(copy, graph, [*graph.inputs], dict(graph.outputs))
    for name, value in list(copy.inputs.items()):
        if not value.uses and not value.is_output:
            del copy.inputs[name]
    return copy


def outer_state(step: Step, name: str, gates: Graph, after: Graph) -> Outer | None:
    """Turn what is known of the state `name` into keys, values and queries, if that is possible."""
    state, old = after.inputs[f"new_{name}"], after.inputs[name]
    readings = _readings(step, state, after)
    a, b = (gates.outputs.get(f"{part}.{name}") for part in "ab")
    if old.uses or not readings or b is None or len({r.axis for r in readings}) != 1:
        return None
    if not all(is_known(r.query, gates) for r in readings):
        return None
    shape, keys = state.shape, readings[0].axis
    factors = [ranked(f, len(shape)) for f in _factors(b)]
    small = [ranked(v, len(shape)) for v in ([] if a is None else [a])]
    queries = [r.query for r in readings]

    def fits(axis: int) -> bool:
        apart = all(f.shape[axis] == 1 or f.shape[keys] == 1 for f in factors)
        return apart and all(v.shape[axis] == 1 for v in (*small, *queries))

    others = [axis for axis in range(1, len(shape)) if axis != keys]
    fitting = [axis for axis in others if fits(axis) and isinstance(shape[axis], int) and shape[axis] > 1]
    if not fitting:
        return None
    values = max(fitting, key=lambda axis: n if isinstance(n := shape[axis], int) else 0)
    order = (0, *(axis for axis in others if axis != values), keys, values)
    lay = Layout(shape, order)
    del gates.outputs[f"b.{name}"]
    if a is not None:
        gates.outputs[f"a.{name}"] = lay.keys(small[0], whole=False)
    gates.add_output(f"k.{name}", lay.keys(_product([f for f in factors if f.shape[values] == 1], gates, step)))
    gates.add_output(f"v.{name}", lay.values(_product([f for f in factors if f.shape[values] != 1], gates, step)))
    mapped: dict[Value, Value] = {}
    for i, reading in enumerate(readings):
        query = moved(reading.query, gates, mapped)
        gates.add_output(f"q{i}.{name}", lay.keys(query))
        read = after.add_input(f"read{i}_{name}", state.type.with_shape(BATCH, lay.groups, shape[values]))
        with after.inserting(before=reading.node):
            made = lay.placed(read, reading.node.output.shape)
        reading.node.output.replace_uses(made)
    return Outer(order, lay.groups, len(readings))


def _readings(step: Step, state: Value, after: Graph) -> list[Reading]:
    """The sums over one axis of a state, in the order of nodes; none if it is read in another way."""
    rules, found = Rules(after.inputs[step.tokens[0]]), list[Reading]()
    forms = {state: Diagonal("", state.shape)}
    for node in list(after.nodes):
        if forms.keys().isdisjoint(node.inputs):
            continue
        reading = reading_of(node, forms, rules)
        if reading is not None:
            found.append(reading)
        elif (form := rules.form(node, forms)) is not None and form.b is None and form.shape == state.shape:
            forms[node.output] = form
        else:
            return []
    return [] if any(v in forms for v in after.outputs.values()) else found


def reading_of(node: Node, forms: dict[Value, Diagonal], rules: Rules) -> Reading | None:
    given = [v for v in node.inputs if v is not None]
    held = [forms.get(v) for v in given]
    form = next(f for f in held if f is not None)
    rank = len(form.shape)
    if node.op is ops.sum and len(node.attrs["axes"]) == 1:
        axis = node.attrs["axes"][0] % rank
        query = rules.like(form.shape, 1.0) if form.a is None else form.a
        return Reading(node, ranked(query, rank), axis) if axis else None
    if node.op is not ops.matmul or len(held) != 2 or None not in held or len(node.output.shape) != rank:
        return None
    at = 1 if held[0] is None else 0  # of the state
    free = ranked(given[1 - at], rank)
    if free.shape[-2 if at else -1] != 1:
        return None
    query = ops.transpose(free, axes=(*range(rank - 2), rank - 1, rank - 2))
    return Reading(node, query if form.a is None else ops.mul(form.a, query), rank - 2 if at else rank - 1)


def _factors(value: Value) -> list[Value]:
    """The values whose product `value` is."""
    node = value.producer
    if node is None or node.op is not ops.mul:
        return [value]
    return [f for v in node.inputs if v is not None for f in _factors(v)]


def _product(factors: Sequence[Value], gates: Graph, step: Step) -> Value:
    made = factors[0] if factors else Rules(gates.inputs[step.tokens[0]]).one()
    for factor in factors[1:]:
        made = ops.mul(made, factor)
    return made


def ranked(v: Value, rank: int) -> Value:
    """`v` with axes of one number in front, behind that of rows if it has one."""
    missing = rank - len(v.shape)
    if not missing:
        return v
    return ops.unsqueeze(v, axes=tuple(range(missing)))


def is_known(value: Value, gates: Graph) -> bool:
    """Return whether `value`, of the graph behind the recurrence, depends on what the gates are given only."""
    if value.producer is None:
        return any(v is value for name, v in value.graph.inputs.items() if name in gates.inputs)
    return all(is_known(v, gates) for v in value.producer.inputs if v is not None)


def moved(value: Value, gates: Graph, mapped: dict[Value, Value]) -> Value:
    """`value` of the graph behind the recurrence, which depends on no state, made in `gates`."""
    if value in mapped:
        return mapped[value]
    if value.producer is None:
        name = next(n for n, v in value.graph.inputs.items() if v is value)
        return gates.inputs[name]
    node = value.producer
    operands = [None if v is None else moved(v, gates, mapped) for v in node.inputs]
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
        """x, of one number along values, as [batch, groups, keys]; of keys maybe 1 if it need not be `whole`."""
        return self._laid(x, self.at_keys, whole)

    def values(self, x: Value) -> Value:
        return self._laid(x, self.at_values, True)

    def _laid(self, x: Value, last: int, whole: bool) -> Value:
        x = ranked(x, len(self.shape))
        gone = self.at_values if last == self.at_keys else self.at_keys
        axes = [axis - (axis > gone) for axis in (0, *self.between, last)]
        x = _transposed(ops.squeeze(x, axes=(gone,)), axes)
        row = [self.shape[axis] for axis in (*self.between, last)]
        if not whole:
            row[-1] = x.shape[-1]
        if x.shape != (BATCH, *row):
            x = ops.expand(x, shape=(BATCH, *row))
        laid = (BATCH, self.groups, row[-1])
        return x if x.shape == laid else ops.reshape(x, shape=laid)

    def placed(self, read: Value, shape: Shape) -> Value:
        """Put what is `read` [batch, groups, values] into the axes of the state, in the `shape` of its node."""
        x = ops.reshape(read, shape=(BATCH, *(self.shape[a] for a in self.between), 1, self.shape[self.at_values]))
        x = _transposed(x, _inverse(self.order))
        return x if x.shape == shape else ops.reshape(x, shape=shape)


def _transposed(x: Value, axes: Sequence[int]) -> Value:
    """x with its axes in another order, two such steps in one; a reshape where only axes of one number move."""
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
