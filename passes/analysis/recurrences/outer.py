"""Detect states of linear attention: S ← a ⊙ S + k vᵀ, with outputs that read S only as products Sᵀ q.

A chunk of tokens is then computed as attention, without the states between its tokens (Yang 2023, arXiv 2312.06635);
only the state at the end of a chunk is carried to the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.ir import Graph, Node, Value, ops
from weft.ir.graph.step import BATCH, Step
from weft.ir.types import Shape

from .affine import AffineRules, AffineStep, AffineValue, copy_into, pad_rank


@dataclass(frozen=True)
class OuterProductState:
    """A state S that is a decayed sum of outer products of keys and values.

    order: the axes of the state in the order batch, groups, keys, values (several axes may form the groups).
    groups: the product of the sizes of the group axes.
    reads: the number of reads, the products Sᵀ q.
    changes: True if a token adds k (v + c ⊙ wᵀS)ᵀ, with S before the token, instead of k vᵀ.

    Outputs of the graph `gates`: ``a.NAME`` [batch, groups, keys or 1] (missing: 1), ``k.NAME`` and the queries
    ``q0.NAME``, ``q1.NAME``, … [batch, groups, keys], ``v.NAME`` [batch, groups, values]; if `changes`, ``c.NAME``
    [batch, groups, 1] and ``w.NAME`` [batch, groups, keys]. Inputs of the graph `after`: the results of the reads,
    ``read0_NAME``, ``read1_NAME``, … [batch, groups, values].
    """

    order: tuple[int, ...]
    groups: int
    reads: int
    changes: bool = False


@dataclass(frozen=True)
class ParallelForm:
    """A form of a step that runs on many tokens at once: `gates` and `after` as in `AffineStep`.

    `outer` maps each state to its `OuterProductState`, or to None if the state must be computed at every token.
    """

    gates: Graph
    after: Graph
    outer: dict[str, OuterProductState | None]


@dataclass
class StateRead:
    """A read of a state S: `node` computes the sum over `axis` of query ⊙ S; `query` has the rank of S."""

    node: Node
    query: Value
    axis: int


def derive_parallel_form(step: Step, affine: AffineStep) -> ParallelForm:
    """Return the parallel form of `step`, given its affine form `affine`."""
    gates, after = affine.gates.clone(), affine.after.clone()
    outer = {name: extract_outer(step, name, gates, after) for name in step.states}
    return ParallelForm(prune(gates), prune(after), outer)


def prune(graph: Graph) -> Graph:
    """Return a copy of `graph` without the nodes and inputs that no output depends on."""
    copy = Graph(graph.name)
    copy_into(copy, graph, [*graph.inputs], dict(graph.outputs))
    for name, value in list(copy.inputs.items()):
        if not value.uses and not value.is_output:
            del copy.inputs[name]
    return copy


def extract_outer(step: Step, name: str, gates: Graph, after: Graph) -> OuterProductState | None:
    """Return the state `name` as a sum of outer products; None, with both graphs unchanged, if it is not such a sum.

    Edit the graphs of the affine form in place: replace output ``b.NAME`` of `gates` by keys, values and queries, and
    the reads in `after` by inputs (see `OuterProductState`).
    """
    state, old = after.inputs[f"new_{name}"], after.inputs[name]
    reads = _find_reads(step, state, after)
    a, b = (gates.outputs.get(f"{part}.{name}") for part in "ab")
    if old.uses or not reads or b is None or len({r.axis for r in reads}) != 1:
        return None
    if not all(depends_on_gates(r.query, gates) for r in reads):
        return None
    shape, keys = state.shape, reads[0].axis
    factors = [pad_rank(f, len(shape)) for f in _split_factors(b)]
    scales = [pad_rank(v, len(shape)) for v in ([] if a is None else [a])]
    queries = [r.query for r in reads]

    def fits(axis: int) -> bool:
        is_separate = all(f.shape[axis] == 1 or f.shape[keys] == 1 for f in factors)
        return is_separate and all(v.shape[axis] == 1 for v in (*scales, *queries))

    other_axes = [axis for axis in range(1, len(shape)) if axis != keys]
    fitting = [axis for axis in other_axes if fits(axis) and isinstance(shape[axis], int) and shape[axis] > 1]
    if not fitting:
        return None
    values = max(fitting, key=lambda axis: n if isinstance(n := shape[axis], int) else 0)
    order = (0, *(axis for axis in other_axes if axis != values), keys, values)
    view = StateView(shape, order)
    del gates.outputs[f"b.{name}"]
    if a is not None:
        gates.outputs[f"a.{name}"] = view.flatten(scales[0], keys, expand=False)
    key = _multiply([f for f in factors if f.shape[values] == 1], gates, step)
    gates.add_output(f"k.{name}", view.flatten(key, keys))
    value = _multiply([f for f in factors if f.shape[values] != 1], gates, step)
    gates.add_output(f"v.{name}", view.flatten(value, values))
    copies: dict[Value, Value] = {}
    for i, read in enumerate(reads):
        query = copy_value_into(read.query, gates, copies)
        gates.add_output(f"q{i}.{name}", view.flatten(query, keys))
        result = after.add_input(f"read{i}_{name}", state.type.with_shape(BATCH, view.groups, shape[values]))
        with after.inserting(before=read.node):
            unflattened = view.unflatten(result, read.node.output.shape)
        read.node.output.replace_uses(unflattened)
    return OuterProductState(order, view.groups, len(reads))


def _find_reads(step: Step, state: Value, after: Graph) -> list[StateRead]:
    """Return the reads of `state` in `after`, in order; [] if anything else also uses it."""
    rules, reads = AffineRules(after.inputs[step.tokens[0]]), list[StateRead]()
    forms = {state: AffineValue("", state.shape)}
    for node in list(after.nodes):
        if forms.keys().isdisjoint(node.inputs):
            continue
        read = match_read(node, forms, rules)
        if read is not None:
            reads.append(read)
        elif (form := rules.derive_form(node, forms)) is not None and form.b is None and form.shape == state.shape:
            forms[node.output] = form
        else:
            return []
    return [] if any(v in forms for v in after.outputs.values()) else reads


def match_read(node: Node, forms: dict[Value, AffineValue], rules: AffineRules) -> StateRead | None:
    """Return the read of a state that `node` computes; None if it computes anything else.

    `forms` has the affine form of at least one operand of `node`; `rules` emit the query.
    """
    operands = [v for v in node.inputs if v is not None]
    operand_forms = [forms.get(v) for v in operands]
    form = next(f for f in operand_forms if f is not None)
    rank = len(form.shape)
    if node.op is ops.sum and len(node.attrs["axes"]) == 1:
        axis = node.attrs["axes"][0] % rank
        query = rules.make_constant_like(form.shape, 1.0) if form.a is None else form.a
        return StateRead(node, pad_rank(query, rank), axis) if axis else None
    if node.op is not ops.matmul or None not in operand_forms or len(node.output.shape) != rank:
        return None
    state_index = 1 if operand_forms[0] is None else 0
    factor = pad_rank(operands[1 - state_index], rank)
    if factor.shape[-2 if state_index else -1] != 1:
        return None
    query = ops.transpose(factor, axes=(*range(rank - 2), rank - 1, rank - 2))
    return StateRead(node, query if form.a is None else ops.mul(form.a, query), rank - 2 if state_index else rank - 1)


def _split_factors(value: Value) -> list[Value]:
    node = value.producer
    if node is None or node.op is not ops.mul:
        return [value]
    return [f for v in node.inputs if v is not None for f in _split_factors(v)]


def _multiply(factors: Sequence[Value], gates: Graph, step: Step) -> Value:
    if not factors:
        return AffineRules(gates.inputs[step.tokens[0]]).make_constant()
    return functools.reduce(ops.mul, factors)


def depends_on_gates(value: Value, gates: Graph) -> bool:
    """Return whether `value`, of the graph `after`, depends only on inputs that `gates` also has, by name."""
    if value.producer is None:
        return any(v is value for name, v in value.graph.inputs.items() if name in gates.inputs)
    return all(depends_on_gates(v, gates) for v in value.producer.inputs if v is not None)


def copy_value_into(value: Value, gates: Graph, mapped: dict[Value, Value]) -> Value:
    """Copy `value` of the graph `after`, with the nodes that compute it, into `gates`; return the copy.

    Graph inputs become those of `gates` with the same names. `mapped` maps originals to copies and is updated.
    """
    if value in mapped:
        return mapped[value]
    if value.producer is None:
        name = next(n for n, v in value.graph.inputs.items() if v is value)
        return gates.inputs[name]
    node = value.producer
    operands = [None if v is None else copy_value_into(v, gates, mapped) for v in node.inputs]
    copy = gates.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], [v.name for v in node.outputs])
    mapped.update(zip(node.outputs, copy.outputs, strict=True))
    return mapped[value]


class StateView:
    """A state of `shape` viewed as [batch, groups, keys, values]; `order` lists its axes in this order."""

    def __init__(self, shape: Shape, order: tuple[int, ...]) -> None:
        self.shape, self.order = shape, order
        *self.between, self.at_keys, self.at_values = order[1:]
        self.groups = math.prod(n for axis in self.between if isinstance(n := shape[axis], int))

    def flatten(self, x: Value, last: int, expand: bool = True) -> Value:
        """Return `x` as [batch, groups, size of the axis `last`]: that of keys or that of values; `x` has size 1 along
        the other. Without `expand`, an axis `last` of size 1 stays."""
        x = pad_rank(x, len(self.shape))
        dropped = self.at_values if last == self.at_keys else self.at_keys
        axes = [axis - (axis > dropped) for axis in (0, *self.between, last)]
        x = _transpose(ops.squeeze(x, axes=(dropped,)), axes)
        row = [self.shape[axis] for axis in (*self.between, last)]
        if not expand:
            row[-1] = x.shape[-1]
        if x.shape != (BATCH, *row):
            x = ops.expand(x, shape=(BATCH, *row))
        flat = (BATCH, self.groups, row[-1])
        return x if x.shape == flat else ops.reshape(x, shape=flat)

    def unflatten(self, read: Value, shape: Shape) -> Value:
        """Return `read` [batch, groups, values] with the groups as separate axes in the state's order, in `shape`."""
        x = ops.reshape(read, shape=(BATCH, *(self.shape[a] for a in self.between), 1, self.shape[self.at_values]))
        x = _transpose(x, [self.order.index(axis) for axis in range(len(self.order))])
        return x if x.shape == shape else ops.reshape(x, shape=shape)


def _transpose(x: Value, axes: Sequence[int]) -> Value:
    """Return `x` transposed by `axes`; a transpose that computes x is merged into the new one.
    A permutation that only moves axes of size 1 becomes a reshape, and the identity adds no node."""
    if x.producer is not None and x.producer.op is ops.transpose:
        axes, x = [x.producer.attrs["axes"][axis] for axis in axes], x.producer.required_operand("x")
    if list(axes) == list(range(len(axes))):
        return x
    wide = [axis for axis in axes if x.shape[axis] != 1]
    if wide == sorted(wide):
        return ops.reshape(x, shape=tuple(x.shape[axis] for axis in axes))
    return ops.transpose(x, axes=tuple(axes))
