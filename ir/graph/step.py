"""One token of a recurrence as data: the graph that is an attribute of the op `scan`.

Its text form is a block of statements; nodes are written as in a graph, without scopes ::

    {
      state %h: f32[batch, 8]
      token %x: f32[batch, 8]
      constant %decay: f32[8]
      %kept: f32[batch, 8] = mul(%h, %decay)
      %new: f32[batch, 8] = add(%kept, %x)
      next %h = %new
      output y = %new
    }

A state with an initial value other than 0 spells it: ``state %m: f32[batch, 8] = -1e+30``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from ..errors import WeftError
from ..types import TensorType, sizes
from .graph import Graph, Node, Param, Value

BATCH = sizes.sym("batch")  # the first axis of states, of inputs at one token and of outputs
NEXT = "next."  # prefix of graph outputs that are new states


class Step:
    """One token of a recurrence: maps states and the inputs at the token to new states and outputs; immutable.

    The inputs of `graph` are the states [batch, ...], then `tokens` (the inputs at the token) [batch, ...], then
    constants of any shape. Its outputs are the new states, called ``next.`` + state name, then other outputs [batch,
    ...]. `initial` maps each state name to the number that fills it before the first token. Steps are equal if their
    text forms are.

    Raises:
        WeftError: if the graph is not such a function (it has parameters, an input named past_…, another order, a state
            of integers or of changing type, another first axis or symbolic size), or a number in `initial` is infinite.
    """

    def __init__(self, graph: Graph, initial: Mapping[str, float], tokens: Iterable[str]) -> None:
        self.graph, renamed = _canonicalize(graph)
        self.initial = {renamed[name]: float(value) for name, value in initial.items()}
        self.tokens = tuple(renamed[name] for name in tokens)
        varying = {*self.initial, *self.tokens}
        self.constants = tuple(name for name in self.graph.inputs if name not in varying)
        self.outputs = tuple(name for name in self.graph.outputs if not name.startswith(NEXT))
        self._check()
        self.text = self.__spelled__ = _format_step(self)

    def __repr__(self) -> str:
        return f"Step({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Step) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.initial)

    def new_state(self, state: str) -> Value:
        """Return the value of `graph` that is the new state called `state`."""
        return self.graph.outputs[NEXT + state]

    def input_type(self, name: str, batch: sizes.Size) -> TensorType:
        """Return the type of the graph input `name` for a batch of size `batch`."""
        return bind_batch(self.graph.inputs[name].type, batch)

    def _check(self) -> None:
        graph, inputs = self.graph, self.graph.inputs
        if graph.params:
            raise WeftError(f"step: %{next(iter(graph.params))} is a parameter; pass it to the step as a constant")
        if list(inputs) != [*self.initial, *self.tokens, *self.constants]:
            raise WeftError(f"step: inputs {', '.join(inputs)} must be states first, then tokens, then constants")
        if not self.initial or not self.tokens or not self.outputs:
            counts = f"{len(self.initial)}, {len(self.tokens)} and {len(self.outputs)}"
            raise WeftError(f"step: a recurrence needs states, tokens and outputs, but it has {counts} of them")
        for name in inputs:
            if name.startswith("past_"):
                raise WeftError(f"step: %{name} begins with past_, which names state operands; choose another name")
        for name, start in self.initial.items():
            if not math.isfinite(start):
                raise WeftError(f"step: the state {name} begins with {start}; begin with a finite number such as ±1e30")
            if NEXT + name not in graph.outputs:
                raise WeftError(f"step: the state %{name} has no new value; add the statement next %{name} = …")
            old, new = inputs[name].type, self.new_state(name).type
            if old != new:
                raise WeftError(f"step: the state {name} has type {old}, but its new value {new}; make them equal")
            if not old.dtype.is_float:
                raise WeftError(f"step: the state {name} is {old}, but states must be floating-point")
        if len(graph.outputs) != len(self.initial) + len(self.outputs):
            raise WeftError("step: a statement next names a value that is not a state")
        by_row = {name: inputs[name].type for name in (*self.initial, *self.tokens)}
        by_row |= {name: graph.outputs[name].type for name in self.outputs}
        for name, type in by_row.items():
            if type.shape[:1] != (BATCH,):
                raise WeftError(f"step: %{name} is {type}, but its first axis must be batch")
        for name, type in {**by_row, **{name: inputs[name].type for name in self.constants}}.items():
            if named := {n for size in type.shape for n in sizes.list_names(size)} - {"batch"}:
                raise WeftError(
                    f"step: %{name} is {type}, but {named.pop()} is not allowed: only batch may be symbolic"
                )


def bind_batch(type: TensorType, batch: sizes.Size) -> TensorType:
    """Return `type` with the symbolic size called batch replaced by `batch`."""
    return type.with_shape(*(sizes.substitute(size, {"batch": batch}) for size in type.shape))


def _canonicalize(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """Return a copy of `graph` without scopes, unused nodes and dots in names, and a map from old to new input names.
    In the copy the outputs that are new states come first."""
    clone, mapped, renamed = Graph("step"), dict[Value, Value](), dict[str, str]()
    for name, value in graph.inputs.items():
        renamed[name] = clone.reserve_name(_simplify_name(name))
        mapped[value] = Value(clone, renamed[name], value.type)
        clone.inputs[renamed[name]] = mapped[value]
    for param in graph.params.values():
        mapped[param] = clone.add_param(_simplify_name(param.name), param.type, param.recipe)
    for node in find_live_nodes(graph, graph.outputs.values()):
        clone.copy_node(node, mapped, [_simplify_name(v.name) for v in node.outputs])
    for name, value in graph.outputs.items():
        state = name.startswith(NEXT)
        clone.add_output(NEXT + renamed.get(name[len(NEXT) :], name) if state else _simplify_name(name), mapped[value])
    for name in sorted(clone.outputs, key=lambda n: not n.startswith(NEXT)):  # new states before outputs
        clone.outputs[name] = clone.outputs.pop(name)
    return clone, renamed


def find_live_nodes(graph: Graph, values: Iterable[Value], known: Container[Value] = ()) -> list[Node]:
    """Return the nodes of `graph` that `values` depend on, in graph order; the search stops at operands in `known`."""
    needed, live = set(values), list[Node]()
    for node in reversed(list(graph.nodes)):
        if not needed.isdisjoint(node.outputs):
            live.append(node)
            needed.update(v for v in node.inputs if v is not None and v not in known)
    return live[::-1]


def _simplify_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name.rpartition(".")[2]) or "v"


def _format_step(step: Step) -> str:
    lines = ["{"]
    kinds = {**dict.fromkeys(step.states, "state"), **dict.fromkeys(step.tokens, "token")}
    for name, value in step.graph.inputs.items():
        start = repr(step.initial.get(name, 0.0))  # repr: -0.0 and 0.0 are different initial values
        initial = "" if start == "0.0" else f" = {start}"
        lines.append(f"  {kinds.get(name, 'constant')} %{name}: {value.type}{initial}")
    lines += ["  " + str(node).replace("\n", "\n  ") for node in step.graph.nodes]
    lines += [f"  next %{name} = %{step.new_state(name).name}" for name in step.states]
    lines += [f"  output {name} = %{step.graph.outputs[name].name}" for name in step.outputs]
    return "\n".join([*lines, "}"])


# -- steps of functions


def trace_step(
    graph: Graph,
    function: Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]],
    states: Mapping[str, tuple[TensorType, float]],
    tokens: Mapping[str, TensorType],
) -> tuple[Step, tuple[Value, ...]]:
    """Return the step that `function` computes, and the other values of `graph` that it reads: its constants.

    `function` maps (states, tokens) to (new states, outputs). `states` maps names to (type [batch, ...], initial
    value), `tokens` maps names to types [batch, ...]. Nodes that `function` emits into `graph` are removed again, but
    parameters that it adds stay.

    Raises:
        WeftError: if `function` reads a value with a token axis, or does not build a valid `Step`.
    """
    before = set(graph.nodes)
    types = {**{name: type for name, (type, _) in states.items()}, **tokens}
    inputs = {name: Value(graph, graph.reserve_name(name), type) for name, type in types.items()}
    try:
        new_states, outputs = function([inputs[n] for n in states], [inputs[n] for n in tokens])
        nodes = [n for n in graph.nodes if n not in before]
        return _extract_step(nodes, inputs, {name: start for name, (_, start) in states.items()}, new_states, outputs)
    finally:
        nodes = [n for n in graph.nodes if n not in before]
        for node in reversed(nodes):
            graph.erase(node)
        for value in (*inputs.values(), *(v for node in nodes for v in node.outputs)):
            graph.release_name(value)


def _extract_step(
    nodes: Sequence[Node],
    inputs: Mapping[str, Value],
    initial: Mapping[str, float],
    new_states: Sequence[Value],
    outputs: Sequence[Value],
) -> tuple[Step, tuple[Value, ...]]:
    """Return the step with the body `nodes`, and the other values that they read; outputs are called y, or y0, y1, …"""
    body, mapped, read = Graph("step"), dict[Value, Value](), list[Value]()
    for name, value in inputs.items():
        mapped[value] = body.add_input(name, value.type)
    internal = {*inputs.values(), *(v for node in nodes for v in node.outputs)}
    for v in (*(v for node in nodes for v in node.inputs if v is not None), *new_states, *outputs):
        if v not in internal and v not in mapped:
            named = [n for size in v.shape for n in sorted(sizes.list_names(size)) if n != "batch"]
            if named and not isinstance(v, Param):
                raise WeftError(
                    f"the step reads %{v.name} {v.type}, which has an axis {named[0]}: pass it to scan as an input"
                )
            mapped[v] = body.add_input(body.reserve_name(v.name.rpartition(".")[2]), v.type)
            read.append(v)
    for node in nodes:
        body.copy_node(node, mapped, [v.name.rpartition(".")[2] for v in node.outputs])
    for name, value in zip(initial, new_states, strict=True):
        body.add_output(NEXT + name, mapped[value])
    for i, value in enumerate(outputs):
        body.add_output(f"y{i}" if len(outputs) > 1 else "y", mapped[value])
    return Step(body, initial, [name for name in inputs if name not in initial]), tuple(read)
