"""One token of a recurrence as data: the graph that the op `scan` has for an attribute.

Its text form is a block of statements; nodes are those of a graph, in no scope ::

    {
      state %h: f32[batch, 8]
      token %x: f32[batch, 8]
      constant %decay: f32[8]
      %kept: f32[batch, 8] = mul(%h, %decay)
      %new: f32[batch, 8] = add(%kept, %x)
      next %h = %new
      output y = %new
    }

A state that does not begin with zeros says with what: ``state %m: f32[batch, 8] = -1e+30``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from ..errors import WeftError
from ..types import TensorType, sizes
from .graph import Graph, Node, Param, Value

BATCH = sizes.sym("batch")  # the first axis of states, of inputs at one token and of outputs
NEXT = "next."  # what the outputs of the graph are called that are new states


class Step:
    """A function of states and of inputs at one token, which gives new states and outputs; immutable.

    `graph` takes the states [batch, ...], then `tokens` [batch, ...], then constants (whole), and returns the new state
    of each state (called ``next.`` and its name), then the outputs [batch, ...]. `initial` has, by the name of each
    state, the number that it is filled with before the first token. Two steps are equal if their texts are.

    Raises:
        WeftError: if a new state has another type than its state, an axis of states and tokens is missing, or a size
            has a name other than batch.
    """

    def __init__(self, graph: Graph, initial: Mapping[str, float], tokens: Iterable[str]) -> None:
        self.graph, renamed = _canonical(graph)
        self.initial = {renamed[name]: float(value) for name, value in initial.items()}
        self.tokens = tuple(renamed[name] for name in tokens)
        known = {*self.initial, *self.tokens}
        self.constants = tuple(name for name in self.graph.inputs if name not in known)
        self.outputs = tuple(name for name in self.graph.outputs if not name.startswith(NEXT))
        self._check()
        self.text = self.__spelled__ = _text(self)

    def __repr__(self) -> str:
        return f"Step({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Step) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.initial)

    def new(self, state: str) -> Value:
        """The value in the graph that is the new `state`."""
        return self.graph.outputs[NEXT + state]

    def type(self, name: str, batch: sizes.Size) -> TensorType:
        """The type of the input `name` for so many texts."""
        return placed(self.graph.inputs[name].type, batch)

    def _check(self) -> None:
        graph, inputs = self.graph, self.graph.inputs
        if graph.params:
            raise WeftError(f"step: %{next(iter(graph.params))} is a parameter; a step takes constants instead")
        if list(inputs) != [*self.initial, *self.tokens, *self.constants]:
            raise WeftError("step: states come first, then tokens, then constants")
        if not self.initial or not self.tokens or not self.outputs:
            raise WeftError("step: a recurrence needs a state, an input and an output")
        for name in inputs:
            if name.startswith("past_"):
                raise WeftError(f"step: %{name} is called like the operand of a state; choose another name")
        for name, start in self.initial.items():
            if not math.isfinite(start):
                raise WeftError(f"step: the state {name} begins with {start}; begin with a finite number such as ±1e30")
            if NEXT + name not in graph.outputs:
                raise WeftError(f"step: nothing is the next %{name}")
            old, new = inputs[name].type, self.new(name).type
            if old != new:
                raise WeftError(f"step: the new state {name} is {new}, not {old} as the state before it")
            if not old.dtype.is_float:
                raise WeftError(f"step: the state {name} is {old}; states are floating-point numbers")
        if len(graph.outputs) != len(self.initial) + len(self.outputs):
            raise WeftError("step: something is next that is no state")
        by_row = {name: inputs[name].type for name in (*self.initial, *self.tokens)}
        by_row |= {name: graph.outputs[name].type for name in self.outputs}
        for name, type in by_row.items():
            if type.shape[:1] != (BATCH,):
                raise WeftError(f"step: {name} is {type}; its first axis must be batch")
        for name, type in {**by_row, **{name: inputs[name].type for name in self.constants}}.items():
            if named := {n for size in type.shape for n in sizes.names(size)} - {"batch"}:
                raise WeftError(f"step: {name} is {type}, but {named.pop()} is no size of a single token")


def placed(type: TensorType, batch: sizes.Size) -> TensorType:
    """`type` with a size in place of batch."""
    return type.with_shape(*(sizes.substitute(size, {"batch": batch}) for size in type.shape))


def _canonical(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """A copy of `graph` without scopes and unread nodes, whose values have names without dots; and, by the names of its
    inputs, what they are called there."""
    other, mapped, renamed = Graph("step"), dict[Value, Value](), dict[str, str]()
    for name, value in graph.inputs.items():
        renamed[name] = other.fresh(_plain(name))
        mapped[value] = Value(other, renamed[name], value.type)
        other.inputs[renamed[name]] = mapped[value]
    for param in graph.params.values():
        mapped[param] = other.add_param(_plain(param.name), param.type, param.recipe)
    for node in live_nodes(graph, graph.outputs.values()):
        operands = [None if v is None else mapped[v] for v in node.inputs]
        names = [_plain(v.name) for v in node.outputs]
        copy = other.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], names, "")
        mapped.update(zip(node.outputs, copy.outputs, strict=True))
    for name, value in graph.outputs.items():
        state = name.startswith(NEXT)
        other.add_output(NEXT + renamed.get(name[len(NEXT) :], name) if state else _plain(name), mapped[value])
    ordered = [*(n for n in other.outputs if n.startswith(NEXT)), *(n for n in other.outputs if n[: len(NEXT)] != NEXT)]
    for name in ordered:  # new states before outputs
        value = other.outputs[name]
        del other.outputs[name]
        other.outputs[name] = value
    return other, renamed


def live_nodes(graph: Graph, values: Iterable[Value], known: Container[Value] = ()) -> list[Node]:
    """The nodes of `graph` that `values` depend on, in order; not those that make what is `known`."""
    needed, found = set(values), list[Node]()
    for node in reversed(list(graph.nodes)):
        if not needed.isdisjoint(node.outputs):
            found.append(node)
            needed.update(v for v in node.inputs if v is not None and v not in known)
    return found[::-1]


def _plain(name: str) -> str:
    """The last part of a dotted name, in letters that text can spell."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name.rpartition(".")[2]) or "v"


def _text(step: Step) -> str:
    lines = ["{"]
    kinds: Sequence[tuple[str, Iterable[str]]] = (
        ("state", step.states), ("token", step.tokens), ("constant", step.constants)
    )  # fmt: skip
    for kind, names in kinds:
        for name in names:
            start = step.initial.get(name, 0.0)
            # repr: -0.0 is another start than 0.0
            value = f" = {start!r}" if repr(start) != "0.0" else ""
            lines.append(f"  {kind} %{name}: {step.graph.inputs[name].type}{value}")
    lines += ["  " + str(node).replace("\n", "\n  ") for node in step.graph.nodes]
    lines += [f"  next %{name} = %{step.new(name).name}" for name in step.states]
    lines += [f"  output {name} = %{step.graph.outputs[name].name}" for name in step.outputs]
    return "\n".join([*lines, "}"])


# -- steps of functions


def traced_step(
    graph: Graph,
    function: Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]],
    states: Mapping[str, tuple[TensorType, float]],
    tokens: Mapping[str, TensorType],
) -> tuple[Step, tuple[Value, ...]]:
    """Return the step that `function` computes of states and tokens, and the other values of `graph` that it reads.

    `states` have a type [batch, ...] and the number that they begin with, `tokens` a type [batch, ...]. What the
    function emits goes into `graph`, where it makes its parameters, and is taken out again.

    Raises:
        WeftError: if it reads a value of all tokens, or makes what no step is (see `Step`).
    """
    before = set(graph.nodes)
    types = {**{name: type for name, (type, _) in states.items()}, **tokens}
    given = {name: Value(graph, graph.fresh(name), type) for name, type in types.items()}
    try:
        made, outputs = function([given[n] for n in states], [given[n] for n in tokens])
        nodes = [n for n in graph.nodes if n not in before]
        return _cut(nodes, given, {name: start for name, (_, start) in states.items()}, made, outputs)
    finally:
        nodes = [n for n in graph.nodes if n not in before]
        for node in reversed(nodes):
            graph.erase(node)
        for value in (*given.values(), *(v for node in nodes for v in node.outputs)):
            graph.forget(value)


def _cut(
    nodes: Sequence[Node],
    given: Mapping[str, Value],
    initial: Mapping[str, float],
    made: Sequence[Value],
    outputs: Sequence[Value],
) -> tuple[Step, tuple[Value, ...]]:
    """The step that `nodes` are, and the values from outside that they read."""
    body, mapped, read = Graph("step"), dict[Value, Value](), list[Value]()
    for name, value in given.items():
        mapped[value] = body.add_input(name, value.type)
    own = {*given.values(), *(v for node in nodes for v in node.outputs)}
    for v in (*(v for node in nodes for v in node.inputs if v is not None), *made, *outputs):
        if v not in own and v not in mapped:
            if not isinstance(v, Param) and (sym := _of_tokens(v)):
                raise WeftError(
                    f"the step reads %{v.name} {v.type}, which has an axis {sym}: give it to scan as an input"
                )
            mapped[v] = body.add_input(body.fresh(v.name.rpartition(".")[2]) + "", v.type)
            read.append(v)
    for node in nodes:
        operands = [None if v is None else mapped[v] for v in node.inputs]
        names = [v.name.rpartition(".")[2] for v in node.outputs]
        copy = body.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], names, "")
        mapped.update(zip(node.outputs, copy.outputs, strict=True))
    for name, value in zip(initial, made, strict=True):
        body.add_output(NEXT + name, mapped[value])
    for i, value in enumerate(outputs):
        body.add_output(f"y{i}" if len(outputs) > 1 else "y", mapped[value])
    return Step(body, initial, [name for name in given if name not in initial]), tuple(read)


def _of_tokens(value: Value) -> str:
    """The name of a size of `value` that is not the batch."""
    return next((n for size in value.shape for n in sorted(sizes.names(size)) if n != "batch"), "")
