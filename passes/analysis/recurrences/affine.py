"""Detect steps that are affine in each number of their state: new state = a ⊙ state + b, a and b free of all states.

Such a recurrence has a parallel form (Martin & Cundy 2018, arXiv 1709.04057). Nothing declares it: the step is run on
pairs (a, b) instead of numbers, by rules for the ops that keep a value affine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from weft.ir import Graph, Node, Value, ops
from weft.ir.graph.step import BATCH, NEXT, Step, live_nodes
from weft.ir.op import Op
from weft.ir.types import Shape
from weft.ir.types.dtypes import f32

from .rows import keeps_rows


@dataclass(frozen=True)
class Diagonal:
    """A value that is a ⊙ `state` + b, in the order of the state's numbers: `a` None is 1, `b` None is 0."""

    state: str
    shape: Shape
    a: Value | None = None
    b: Value | None = None


@dataclass(frozen=True)
class Affine:
    """A step of the form new state = a ⊙ state + b.

    `gates` makes, of tokens and constants, the outputs ``a.`` and ``b.`` and the name of each state; one that is left
    out is 1, or 0. `after` makes the outputs of the step of its new states, old states, tokens and constants.
    """

    gates: Graph
    after: Graph


def affine(step: Step) -> Affine | None:
    """Return the parts of `step` if it is affine in each number of its states, and treats each row alone."""
    graph = step.graph.clone()
    if not all(keeps_rows(node) for node in graph.nodes):
        return None
    if graph.inputs[step.tokens[0]].type.dtype != f32:
        return None
    dependent = {graph.inputs[name] for name in step.states}
    forms: dict[Value, Diagonal] = {graph.inputs[n]: Diagonal(n, graph.inputs[n].shape) for n in step.states}
    nodes = list(graph.nodes)
    rules = Rules(graph.inputs[step.tokens[0]])
    for node in nodes:
        known = dependent.intersection(v for v in node.inputs if v is not None)
        if not known:
            continue
        dependent.update(node.outputs)
        if known <= forms.keys() and (form := rules.form(node, forms)) is not None:
            forms[node.output] = form
    gates = Graph("gates")
    found = dict[str, Value]()
    for name in step.states:
        form = forms.get(graph.outputs[NEXT + name])
        if form is None or form.state != name:
            return None
        parts = ((part, v) for part, v in (("a", form.a), ("b", form.b)) if v is not None)
        found |= {f"{part}.{name}": _by_row(v, len(form.shape)) for part, v in parts}
    if not any(reaches(graph.inputs[name], found.values()) for name in step.tokens):
        return None  # tokens change nothing: there is no recurrence to speak of
    copy_into(gates, graph, [*step.tokens, *step.constants], found)
    return Affine(gates, _after(step))


def _by_row(value: Value, rank: int) -> Value:
    """`value` with rows, and of this `rank`."""
    if value.shape[:1] == (BATCH,):
        return value
    value = value if len(value.shape) == rank else ops.unsqueeze(value, axes=tuple(range(rank - len(value.shape))))
    return ops.expand(value, shape=(BATCH, *value.shape[1:]))


def reaches(value: Value, ends: Iterable[Value]) -> bool:
    """Return whether one of `ends` depends on `value`."""
    ends = list(ends)
    return value in ends or any(value in node.inputs for node in live_nodes(value.graph, ends))


def _after(step: Step) -> Graph:
    """The outputs of `step` from its new states, which stand before the inputs that it has."""
    graph, after = step.graph, Graph("after")
    known = {step.new(name): after.add_input(f"new_{name}", step.new(name).type) for name in step.states}
    outputs = {name: graph.outputs[name] for name in step.outputs}
    copy_into(after, graph, [*graph.inputs], outputs, known)
    return after


def copy_into(
    graph: Graph, source: Graph, inputs: Iterable[str], outputs: Mapping[str, Value], known: Mapping[Value, Value] = {}
) -> None:
    """Copy what `outputs` of `source` need into `graph`, which gets the `inputs`; `known` values are there already."""
    mapped = dict(known)
    for name in inputs:
        value = graph.add_input(name, source.inputs[name].type)
        mapped.setdefault(source.inputs[name], value)
    for node in live_nodes(source, (v for v in outputs.values() if v not in known), known):
        operands = [None if v is None else mapped[v] for v in node.inputs]
        types, names = [v.type for v in node.outputs], [v.name for v in node.outputs]
        copy = graph.add_node(node.op, operands, node.attrs, types, names, "")
        mapped |= {old: new for old, new in zip(node.outputs, copy.outputs, strict=True) if old not in known}
    for name, value in outputs.items():
        graph.add_output(name, mapped[value])


# -- rules: the form of what a node makes, of the forms of its operands; None if it has none


Part = Value | None


class Rules:
    """Emits the parts of forms into a graph; `token` is a value of it with rows, for constants."""

    def __init__(self, token: Value) -> None:
        self.token = token

    def form(self, node: Node, forms: Mapping[Value, Diagonal]) -> Diagonal | None:
        """The form of the output of `node`, of those of its operands."""
        if len(node.outputs) != 1:
            return None
        given = [v for v in node.inputs if v is not None]
        found = [forms.get(v) for v in given]
        known = [form for form in found if form is not None]
        if len({form.state for form in known}) != 1:
            return None
        if node.op in (ops.reshape, ops.unsqueeze, ops.squeeze):
            return self.viewed(node, known[0])
        if any(form.shape != node.output.shape for form in known):
            return None  # it repeats numbers of the state
        if node.op is ops.affine:
            return self.scaled(known[0], node.attrs["by"], node.attrs["plus"])
        if node.op is ops.neg:
            return self.scaled(known[0], -1, 0)
        if node.op is ops.cast:
            return self.each(known[0], lambda v: node.op(v, **node.attrs)) if node.attrs["to"].is_float else None
        if node.op is ops.mul and len(known) == 1:
            factor = given[1] if found[0] is not None else given[0]
            a = factor if known[0].a is None else ops.mul(known[0].a, factor)
            return replace(known[0], a=a, b=None if known[0].b is None else ops.mul(known[0].b, factor))
        if node.op is ops.div and found[1] is None:
            a, b = self.one() if known[0].a is None else known[0].a, known[0].b
            return replace(known[0], a=ops.div(a, given[1]), b=None if b is None else ops.div(b, given[1]))
        if node.op in (ops.add, ops.sub):
            return self.added(node.op, given, found)
        if node.op is ops.where and found[0] is None:
            return self.chosen(given, found)
        return None

    def one(self, number: float = 1.0) -> Value:
        """A `number` for each row, [batch, 1, ...] of the rank of the token."""
        axes = tuple(range(1, len(self.token.shape)))
        x = ops.sum(self.token, axes=axes, keepdims=True) if axes else self.token
        return ops.affine(x, by=0.0, plus=float(number))

    def like(self, shape: Shape, number: float) -> Value:
        """A `number` for each row, of the rank of `shape`."""
        x = self.one(number)
        return ops.reshape(x, shape=(BATCH, *[1] * (len(shape) - 1)))

    def each(self, form: Diagonal, change: Callable[[Value], Value]) -> Diagonal:
        a, b = (None if v is None else change(v) for v in (form.a, form.b))
        return replace(form, a=a, b=b)

    def viewed(self, node: Node, form: Diagonal) -> Diagonal:
        before, after = form.shape, node.output.shape

        def view(v: Value) -> Value:
            v = v if len(v.shape) == len(before) else ops.unsqueeze(v, axes=tuple(range(len(before) - len(v.shape))))
            if node.op is not ops.reshape:
                return node.op(v, **node.attrs)
            if before[-1] == after[-1]:  # one factor of a row stays one
                full, target = (*before[:-1], v.shape[-1]), (*after[:-1], v.shape[-1])
            else:
                full, target = before, after
            return ops.reshape(v if v.shape == full else ops.expand(v, shape=full), shape=target)

        return replace(self.each(form, view), shape=after)

    def scaled(self, form: Diagonal, by: float, plus: float) -> Diagonal:
        a, b = form.a, form.b
        if by != 1:
            a = self.like(form.shape, by) if a is None else ops.affine(a, by=by)
        if b is not None:
            b = ops.affine(b, by=by, plus=plus)
        elif plus != 0:
            b = self.like(form.shape, plus)
        return replace(form, a=a, b=b)

    def added(self, op: Op, given: list[Value], found: list[Diagonal | None]) -> Diagonal:
        (x, y), form = found, next(f for f in found if f is not None)
        if x is None or y is None:
            other, turned = (given[0], op is ops.sub) if x is None else (given[1], False)
            a = self.like(form.shape, 1.0) if turned and form.a is None else form.a
            b = self.joined(op, other, form.b) if x is None else self.joined(op, form.b, other)
            return replace(form, a=ops.neg(a) if turned and a is not None else a, b=b)
        zero_one = [self.parts(f, v) for f, v in ((x, given[0]), (y, given[1]))]
        return replace(form, a=self.joined(op, *(p[0] for p in zero_one)), b=self.joined(op, *(p[1] for p in zero_one)))

    def parts(self, form: Diagonal | None, value: Value) -> tuple[Part, Part]:
        """a and b of an operand, None for 0."""
        if form is None:
            return None, value
        return (self.like(form.shape, 1.0) if form.a is None else form.a), form.b

    def joined(self, op: Op, x: Part, y: Part) -> Part:
        """x ± y, where None is 0."""
        if y is None:
            return x
        return op(x, y) if x is not None else y if op is ops.add else ops.neg(y)

    def chosen(self, given: list[Value], found: list[Diagonal | None]) -> Diagonal:
        form = next(f for f in found if f is not None)
        (a, b), (c, d) = (self.parts(f, v) for f, v in zip(found[1:], given[1:], strict=True))

        def choose(x: Part, y: Part) -> Part:
            x, y = (self.like(form.shape, 0.0) if v is None else v for v in (x, y))
            return ops.where(given[0], x, y)

        return replace(form, a=choose(a, c), b=choose(b, d) if b is not None or d is not None else None)
