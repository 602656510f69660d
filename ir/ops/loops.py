"""The loop over tokens: `scan` runs a step for one token, which is data (see `Step`), with the values that it reads of
every token and of none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..graph import Graph
from ..graph.step import BATCH, NEXT, Step, placed, traced_step
from ..interpreter import interpret
from ..op import Array, Growth, OpCall, Size, StateKind, StateSpec, TensorType, Trait, Value, case, normal, op, want
from ..schema.checks import total
from ..types import sizes
from ..types.dtypes import DType, f32
from .elementwise import add, cast, exp, mul, sigmoid, tanh
from .products import linear, matmul
from .reduce import sum as add_up
from .tensor import squeeze, unsqueeze


def step_of(
    function: Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]],
    states: Mapping[str, tuple[int | float, ...]],
    tokens: Mapping[str, tuple[int, ...]],
    **constants: tuple[int, ...],
) -> Step:
    """Return the step that `function` computes of states and tokens, then constants, for an op or a case.

    Shapes are those of rows, that of a state followed by what it begins with; `constants` are read by name.
    """
    graph = Graph("step")
    whole = {name: graph.add_input(name, TensorType(f32, shape)) for name, shape in constants.items()}

    def types(shape: tuple[int | float, ...]) -> TensorType:
        return TensorType(f32, (BATCH, *(n for n in shape if isinstance(n, int))))

    def starts(shape: tuple[int | float, ...]) -> float:
        return next((n for n in shape if isinstance(n, float)), 0.0)

    step, read = traced_step(
        graph,
        lambda s, t: function(s, [*t, *whole.values()]),
        {name: (types(shape), starts(shape)) for name, shape in states.items()},
        {name: types(shape) for name, shape in tokens.items()},
    )
    assert list(read) == list(whole.values())
    return step


def _gated(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Linear attention with a gate for every key: affine in its state."""
    q, k, v, decay = tokens
    kept = mul(unsqueeze(exp(decay), axes=(3,)), states[0])
    state = add(kept, mul(unsqueeze(k, axes=(3,)), unsqueeze(v, axes=(2,))), name="state")
    return [state], [squeeze(matmul(unsqueeze(q, axes=(2,)), state), axes=(2,))]


def _elman(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """An Elman network with a gated accumulator of what it sees: nonlinear, two states and two outputs."""
    h, c = states
    x, weight = tokens
    new = tanh(add(x, linear(h, weight)))
    summed = add(mul(sigmoid(x), c), mul(new, x))
    return [new, summed], [mul(new, summed), add_up(summed, axes=(1,), keepdims=True)]


_GATED = step_of(_gated, {"state": (2, 3, 4)}, {"q": (2, 3), "k": (2, 3), "v": (2, 4), "decay": (2, 3)})
_ELMAN = step_of(_elman, {"h": (4,), "c": (4, -1.5)}, {"x": (4,)}, weight=(4, 4))
_QKV = (normal(2, 7, 2, 3), normal(2, 7, 2, 3), normal(2, 7, 2, 4), -np.linspace(0.1, 9, 84).reshape(2, 7, 2, 3))


@op(
    traits=[Trait.RECURRENT],
    cases=[
        case(*_QKV, step=_GATED),
        case(*_QKV, normal(2, 2, 3, 4), step=_GATED),
        case(normal(2, 7, 4), normal(4, 4), step=_ELMAN),
        case(normal(2, 1, 4), normal(4, 4), normal(2, 4), normal(2, 4), step=_ELMAN),
        case(*(normal(1, 150, *x.shape[2:]) for x in _QKV[:3]), -np.ones((1, 150, 2, 3)), step=_GATED),
    ],
)
def scan(*values: Array, step: Step) -> tuple[Array, ...]:
    """Run `step` over all tokens: states_t, outputs_t = step(states_{t−1}, inputs_t, constants).

    The values are inputs [batch, seq, ...], one for each token of the step, then its constants, then, where a text goes
    on, its states [batch, ...] before the first token. Returned are its outputs [batch, seq, ...], then, if states are
    given, those after the last token. Without them a state is filled with the number that the step says, mostly 0.
    """
    inputs, constants, states = _parts(values, step)
    if not states:
        states = [np.full(step.type(n, len(inputs[0])).concrete({}), start) for n, start in step.initial.items()]
    whole = dict(zip(step.constants, constants, strict=True))
    rows: list[list[Array]] = []
    for t in range(inputs[0].shape[1]):
        feeds = dict(zip((*step.states, *step.tokens), (*states, *(x[:, t] for x in inputs)), strict=True))
        made = interpret(step.graph, {**feeds, **whole})
        states = [made[NEXT + name] for name in step.states]
        rows.append([made[name] for name in step.outputs])
    outputs = tuple(np.stack(column, 1) for column in zip(*rows, strict=True))
    return outputs if len(values) == len(inputs) + len(constants) else (*outputs, *states)


def _parts(values: Sequence[Any], step: Step) -> tuple[list[Any], list[Any], list[Any]]:
    """Inputs, constants and states among the operands."""
    first, second = len(step.tokens), len(step.tokens) + len(step.constants)
    return list(values[:first]), list(values[first:second]), list(values[second:])


@scan.names
def _(attrs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    step: Step = attrs["step"]
    operands = (*step.tokens, *step.constants, *(f"past_{name}" for name in step.states))
    return operands, (*step.outputs, *(f"present_{name}" for name in step.states))


@scan.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    step: Step = n.step
    inputs, constants, states = _parts(n.values, step)
    names = (*step.tokens, *step.constants)
    counts = f"{len(names)} values ({', '.join(names)}) or {len(names) + len(step.states)} with states"
    want(len(n.values) in (len(names), len(names) + len(step.states)), f"this step takes {counts}, not {len(n.values)}")
    want(inputs[0].rank >= 2, f"{names[0]} {inputs[0]} must be [batch, seq, ...]")
    batch, seq = inputs[0].shape[:2]
    for name, type in zip(step.tokens, inputs, strict=True):
        token = step.type(name, batch)
        wanted = token.with_shape(batch, seq, *token.shape[1:])
        want(type == wanted, f"{name} {type} must be {wanted}, of which the step takes {token} at a token")
    wholes = zip((*step.constants, *step.states), (*constants, *states), strict=False)
    for name, type in wholes:
        wanted = step.type(name, batch)
        want(type == wanted, f"{name} {type} must be {wanted}")
    outputs = [placed(step.graph.outputs[name].type, batch) for name in step.outputs]
    return (*(t.with_shape(batch, seq, *t.shape[1:]) for t in outputs), *states)


@scan.cost
def _(n: OpCall) -> Size:
    batch, seq = n.values[0].shape[:2]
    one: Size = total(node.op.node_cost(node).flops for node in n.step.graph.nodes)
    every: Size = sizes.substitute(one, {"batch": batch}) * seq
    return every


@scan.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    batch, kind = n.values[0].shape[0], StateKind.SCAN
    return tuple(
        StateSpec(
            name, kind, Growth.CONSTANT, f"past_{name}", f"present_{name}", n.step.type(name, batch), initial=start
        )
        for name, start in n.step.initial.items()
    )


def beside(step: Step, operands: Sequence[DType]) -> Step:
    """Return `step` for tokens and constants of other floating-point types, in which its outputs then are, too.

    It computes in the types it had before: sums over thousands of tokens have no place in 8 or 11 bits.
    """
    old, graph = step.graph, Graph("step")
    given = dict(zip((*step.tokens, *step.constants), operands, strict=False))
    inputs, mapped = dict[Value, Value](), dict[Value, Value]()
    for name, value in old.inputs.items():
        inputs[value] = graph.add_input(name, value.type.with_dtype(given.get(name, value.type.dtype)))
    for value, new in inputs.items():
        mapped[value] = new if new.type == value.type else cast(new, to=value.type.dtype, name=f"{value.name}_wide")
    for node in old.nodes:
        first = node.inputs[0]
        if node.op is cast and first in inputs and inputs[first].type == node.output.type:  # as before it was narrow
            mapped[node.output] = inputs[first]
            continue
        values = [None if v is None else mapped[v] for v in node.inputs]
        types, names = [v.type for v in node.outputs], [v.name for v in node.outputs]
        copy = graph.add_node(node.op, values, node.attrs, types, names)
        mapped.update(zip(node.outputs, copy.outputs, strict=True))
    narrow = given[step.tokens[0]]
    for name, value in old.outputs.items():
        made = mapped[value]
        if name in step.outputs and value.type.dtype.is_float and value.type.dtype != narrow:
            source = value.producer.inputs[0] if value.producer is not None and value.producer.op is cast else None
            wide = source is not None and source.type.dtype == narrow
            made = mapped[source] if wide and source is not None else cast(made, to=narrow, name=f"{name}_narrow")
        graph.add_output(name, made)
    return Step(graph, step.initial, step.tokens)
