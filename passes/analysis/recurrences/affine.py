"""Detect steps that are elementwise affine in their state: new state = a ⊙ state + b, a and b independent of states.

Such a recurrence has a parallel form (Martin & Cundy 2018, arXiv 1709.04057). The form is derived, not declared: rules
for the ops that keep a value affine compute a and b of every value of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from weft.ir import Graph, Node, Value, ops
from weft.ir.graph.step import BATCH, NEXT, Step, find_live_nodes
from weft.ir.op import Op
from weft.ir.types import Shape
from weft.ir.types.dtypes import f32

from .rows import is_rowwise


@dataclass(frozen=True)
class AffineValue:
    """A value a ⊙ S + b, where S is the state `state` reshaped to `shape`. `a` None means 1, `b` None means 0."""

    state: str
    shape: Shape
    a: Value | None = None
    b: Value | None = None


@dataclass(frozen=True)
class AffineStep:
    """A step of the form new state = a ⊙ state + b, as two graphs.

    gates: computes ``a.NAME`` (missing: 1) and ``b.NAME`` (missing: 0) of each state from tokens and constants.
    after: computes the outputs of the step from new states (``new_NAME``), old states, tokens and constants.
    """

    gates: Graph
    after: Graph


def find_affine_form(step: Step) -> AffineStep | None:
    """Return the affine form of `step`; None unless every new state is elementwise affine in its old state.

    Also return None if batch rows depend on each other, the first token is not f32, or no a or b depends on a token.
    """
    graph = step.graph.clone()
    if not all(is_rowwise(node) for node in graph.nodes):
        return None
    if graph.inputs[step.tokens[0]].type.dtype != f32:
        return None
    forms: dict[Value, AffineValue] = {graph.inputs[n]: AffineValue(n, graph.inputs[n].shape) for n in step.states}
    AffineRules(graph.inputs[step.tokens[0]]).add_forms_of(list(graph.nodes), forms)
    gates = Graph("gates")
    gate_values = dict[str, Value]()
    for name in step.states:
        form = forms.get(graph.outputs[NEXT + name])
        if form is None or form.state != name:
            return None
        factors = ((part, v) for part, v in (("a", form.a), ("b", form.b)) if v is not None)
        gate_values |= {f"{part}.{name}": _expand_rows(v, len(form.shape)) for part, v in factors}
    if not any(has_dependent(graph.inputs[name], gate_values.values()) for name in step.tokens):
        return None  # tokens do not reach the state: it is not a recurrence
    copy_into(gates, graph, [*step.tokens, *step.constants], gate_values)
    after = Graph("after")
    new_states = {v: after.add_input(f"new_{n}", v.type) for n in step.states for v in [step.new_state(n)]}
    outputs = {name: step.graph.outputs[name] for name in step.outputs}
    copy_into(after, step.graph, [*step.graph.inputs], outputs, new_states)
    return AffineStep(gates, after)


def _expand_rows(value: Value, rank: int) -> Value:
    """Return `value` with a batch axis: unchanged if it has one, else with `rank` axes, expanded along the first."""
    if value.shape[:1] == (BATCH,):
        return value
    value = pad_rank(value, rank)
    return ops.expand(value, shape=(BATCH, *value.shape[1:]))


def pad_rank(v: Value, rank: int) -> Value:
    """Return `v` with leading axes of size 1 added, so that it has `rank` axes."""
    return v if len(v.shape) == rank else ops.unsqueeze(v, axes=tuple(range(rank - len(v.shape))))


def has_dependent(value: Value, ends: Iterable[Value]) -> bool:
    """Return whether `value` is one of `ends` or one of `ends` depends on it."""
    ends = list(ends)
    return value in ends or any(value in node.inputs for node in find_live_nodes(value.graph, ends))


def copy_into(
    graph: Graph, source: Graph, inputs: Iterable[str], outputs: Mapping[str, Value], known: Mapping[Value, Value] = {}
) -> None:
    """Copy the nodes of `source` that compute `outputs` into `graph`; add `inputs` and `outputs` to `graph`, by name.

    `known` maps values of `source` to existing values of `graph`, which are used instead of copies.
    """
    mapped = dict(known)
    for name in inputs:
        value = graph.add_input(name, source.inputs[name].type)
        mapped.setdefault(source.inputs[name], value)
    for node in find_live_nodes(source, (v for v in outputs.values() if v not in known), known):
        operands = [None if v is None else mapped[v] for v in node.inputs]
        types, names = [v.type for v in node.outputs], [v.name for v in node.outputs]
        copy = graph.add_node(node.op, operands, node.attrs, types, names, "")
        mapped |= {old: new for old, new in zip(node.outputs, copy.outputs, strict=True) if old not in known}
    for name, value in outputs.items():
        graph.add_output(name, mapped[value])


# -- rules: the form of a node's output, given the forms of its operands; None if it is not affine


Part = Value | None


class AffineRules:
    """Rules that derive affine forms a ⊙ state + b node by node and emit nodes for a and b.

    `token` is a value with a batch axis in the graph of these nodes; constants are derived from it.
    """

    def __init__(self, token: Value) -> None:
        self.token = token

    def add_forms_of(self, nodes: Iterable[Node], forms: dict[Value, AffineValue]) -> None:
        """Find which outputs of `nodes` are affine in the states, and add their forms to `forms`, which maps the states
        to theirs."""
        dependent = set(forms)
        for node in nodes:
            read = dependent.intersection(v for v in node.inputs if v is not None)
            if read:
                dependent.update(node.outputs)
                if read <= forms.keys() and (form := self.derive_form(node, forms)) is not None:
                    forms[node.output] = form

    def derive_form(self, node: Node, forms: Mapping[Value, AffineValue]) -> AffineValue | None:
        """Return the form of the output of `node`, or None; `forms` has those of all operands that depend on states."""
        if len(node.outputs) != 1:
            return None
        operands = [v for v in node.inputs if v is not None]
        operand_forms = [forms.get(v) for v in operands]
        state_forms = [form for form in operand_forms if form is not None]
        if len({form.state for form in state_forms}) != 1:
            return None
        if node.op in (ops.reshape, ops.unsqueeze, ops.squeeze):
            return self.reshape_form(node, state_forms[0])
        if any(form.shape != node.output.shape for form in state_forms):
            return None  # it broadcasts the state
        if node.op is ops.affine:
            return self.scale_form(state_forms[0], node.attrs["by"], node.attrs["plus"])
        if node.op is ops.neg:
            return self.scale_form(state_forms[0], -1, 0)
        if node.op is ops.cast:
            is_float = node.attrs["to"].is_float
            return self.map_parts(state_forms[0], lambda v: node.op(v, **node.attrs)) if is_float else None
        if node.op is ops.mul and len(state_forms) == 1:
            factor = operands[1] if operand_forms[0] is not None else operands[0]
            a = factor if state_forms[0].a is None else ops.mul(state_forms[0].a, factor)
            b = None if state_forms[0].b is None else ops.mul(state_forms[0].b, factor)
            return replace(state_forms[0], a=a, b=b)
        if node.op is ops.div and operand_forms[1] is None:
            a, b = self.make_constant() if state_forms[0].a is None else state_forms[0].a, state_forms[0].b
            return replace(state_forms[0], a=ops.div(a, operands[1]), b=None if b is None else ops.div(b, operands[1]))
        if node.op in (ops.add, ops.sub):
            return self.add_forms(node.op, operands, operand_forms)
        if node.op is ops.where and operand_forms[0] is None:
            return self.select_forms(operands, operand_forms)
        return None

    def make_constant(self, number: float = 1.0) -> Value:
        """Return a value filled with `number`, of shape [batch, 1, ...] and the rank of `token`."""
        axes = tuple(range(1, len(self.token.shape)))
        x = ops.sum(self.token, axes=axes, keepdims=True) if axes else self.token
        return ops.affine(x, by=0.0, plus=float(number))

    def make_constant_like(self, shape: Shape, number: float) -> Value:
        """Return a value filled with `number`, of shape [batch, 1, ...] and the rank of `shape`."""
        x = self.make_constant(number)
        return ops.reshape(x, shape=(BATCH, *[1] * (len(shape) - 1)))

    def map_parts(self, form: AffineValue, change: Callable[[Value], Value]) -> AffineValue:
        a, b = (None if v is None else change(v) for v in (form.a, form.b))
        return replace(form, a=a, b=b)

    def reshape_form(self, node: Node, form: AffineValue) -> AffineValue:
        before, after = form.shape, node.output.shape

        def reshape(v: Value) -> Value:
            v = pad_rank(v, len(before))
            if node.op is not ops.reshape:
                return node.op(v, **node.attrs)
            if before[-1] == after[-1]:  # one factor per row stays one
                full, target = (*before[:-1], v.shape[-1]), (*after[:-1], v.shape[-1])
            else:
                full, target = before, after
            return ops.reshape(v if v.shape == full else ops.expand(v, shape=full), shape=target)

        return replace(self.map_parts(form, reshape), shape=after)

    def scale_form(self, form: AffineValue, by: float, plus: float) -> AffineValue:
        a, b = form.a, form.b
        if by != 1:
            a = self.make_constant_like(form.shape, by) if a is None else ops.affine(a, by=by)
        if b is not None:
            b = ops.affine(b, by=by, plus=plus)
        elif plus != 0:
            b = self.make_constant_like(form.shape, plus)
        return replace(form, a=a, b=b)

    def add_forms(self, op: Op, operands: list[Value], forms: list[AffineValue | None]) -> AffineValue:
        (x, y), form = forms, next(f for f in forms if f is not None)
        if x is None or y is None:
            summand, is_negated = (operands[0], op is ops.sub) if x is None else (operands[1], False)
            a = self.make_constant_like(form.shape, 1.0) if is_negated and form.a is None else form.a
            b = self.add_parts(op, summand, form.b) if x is None else self.add_parts(op, form.b, summand)
            return replace(form, a=ops.neg(a) if is_negated and a is not None else a, b=b)
        (a, b), (c, d) = (self.get_parts(f, v) for f, v in ((x, operands[0]), (y, operands[1])))
        return replace(form, a=self.add_parts(op, a, c), b=self.add_parts(op, b, d))

    def get_parts(self, form: AffineValue | None, value: Value) -> tuple[Part, Part]:
        """Return (a, b) of `form`, or (None, value) if `form` is None; a part that is None is 0."""
        if form is None:
            return None, value
        return (self.make_constant_like(form.shape, 1.0) if form.a is None else form.a), form.b

    def add_parts(self, op: Op, x: Part, y: Part) -> Part:
        """Return x + y or x - y, by `op` (add or sub); None represents 0, as operand and as result."""
        if y is None:
            return x
        return op(x, y) if x is not None else y if op is ops.add else ops.neg(y)

    def select_forms(self, operands: list[Value], forms: list[AffineValue | None]) -> AffineValue:
        form = next(f for f in forms if f is not None)
        (a, b), (c, d) = (self.get_parts(f, v) for f, v in zip(forms[1:], operands[1:], strict=True))

        def select(x: Part, y: Part) -> Part:
            x, y = (self.make_constant_like(form.shape, 0.0) if v is None else v for v in (x, y))
            return ops.where(operands[0], x, y)

        return replace(form, a=select(a, c), b=select(b, d) if b is not None or d is not None else None)
