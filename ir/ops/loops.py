"""The loop over tokens: `scan` runs a `Step`, the graph of a recurrence at one token, over a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..graph import Graph
from ..graph.step import BATCH, NEXT, Step, bind_batch, trace_step
from ..interpreter import interpret
from ..op import Array, Growth, OpCall, Size, StateKind, StateSpec, TensorType, Trait, Value, case, normal, op, require
from ..types import sizes
from ..types.dtypes import DType, f32
from .elementwise import add, cast, exp, sigmoid, tanh
from .products import linear, matmul
from .reduce import sum as add_up
from .tensor import squeeze, unsqueeze


def build_step(
    function: Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]],
    states: Mapping[str, tuple[int | float, ...]],
    tokens: Mapping[str, tuple[int, ...]],
    **constants: tuple[int, ...],
) -> Step:
    """Return the `Step` that `function` computes, with all inputs in f32.

    `function` maps (states, [*tokens, *constants]) to (new states, outputs). `states` and `tokens` map names to shapes
    without the batch axis, `constants` to complete shapes. A float in the shape of a state is not an axis, but the
    state's initial value (default 0).
    """
    graph = Graph("step")
    constant_values = {name: graph.add_input(name, TensorType(f32, shape)) for name, shape in constants.items()}

    def types(shape: tuple[int | float, ...]) -> TensorType:
        return TensorType(f32, (BATCH, *(n for n in shape if isinstance(n, int))))

    def starts(shape: tuple[int | float, ...]) -> float:
        return next((n for n in shape if isinstance(n, float)), 0.0)

    step, read = trace_step(
        graph,
        lambda s, t: function(s, [*t, *constant_values.values()]),
        {name: (types(shape), starts(shape)) for name, shape in states.items()},
        {name: types(shape) for name, shape in tokens.items()},
    )
    assert list(read) == list(constant_values.values())
    return step


def _gated_step(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    q, k, v, decay = tokens
    decayed = unsqueeze(exp(decay), axes=(3,)) * states[0]
    state = add(decayed, unsqueeze(k, axes=(3,)) * unsqueeze(v, axes=(2,)), name="state")
    return [state], [squeeze(matmul(unsqueeze(q, axes=(2,)), state), axes=(2,))]


def _elman_step(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    h, c = states
    x, weight = tokens
    new = tanh(x + linear(h, weight))
    summed = sigmoid(x) * c + new * x
    return [new, summed], [new * summed, add_up(summed, axes=(1,), keepdims=True)]


_GATED = build_step(_gated_step, {"state": (2, 3, 4)}, {"q": (2, 3), "k": (2, 3), "v": (2, 4), "decay": (2, 3)})
_ELMAN = build_step(_elman_step, {"h": (4,), "c": (4, -1.5)}, {"x": (4,)}, weight=(4, 4))
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
    """The recurrence (states_t, outputs_t) = step(states_{t−1}, inputs_t, constants) over all tokens t.

    `values` are one input [batch, seq, ...] for each name in `step.tokens`, then one for each in `step.constants`, then
    optionally the states [batch, ...] before the first token → the outputs [batch, seq, ...] and, if states are among
    `values`, the states after the last token. Otherwise each state is initially filled with its number in
    `step.initial`.
    """
    inputs, constants, states = _split_operands(values, step)
    if not states:
        states = [np.full(step.input_type(n, len(inputs[0])).concrete({}), start) for n, start in step.initial.items()]
    constant_values = dict(zip(step.constants, constants, strict=True))
    rows: list[list[Array]] = []
    for t in range(inputs[0].shape[1]):
        feeds = dict(zip((*step.states, *step.tokens), (*states, *(x[:, t] for x in inputs)), strict=True))
        results = interpret(step.graph, {**feeds, **constant_values})
        states = [results[NEXT + name] for name in step.states]
        rows.append([results[name] for name in step.outputs])
    outputs = tuple(np.stack(column, 1) for column in zip(*rows, strict=True))
    return outputs if len(values) == len(inputs) + len(constants) else (*outputs, *states)


def _split_operands(values: Sequence[Any], step: Step) -> tuple[list[Any], list[Any], list[Any]]:
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
    inputs, constants, states = _split_operands(n.values, step)
    names = (*step.tokens, *step.constants)
    counts = f"{len(names)} values ({', '.join(names)}) or {len(names) + len(step.states)} with states"
    fits = len(n.values) in (len(names), len(names) + len(step.states))
    require(fits, f"this step takes {counts}, not {len(n.values)}")
    require(inputs[0].rank >= 2, f"{names[0]} {inputs[0]} must be [batch, seq, ...]")
    batch, seq = inputs[0].shape[:2]
    for name, type in zip(step.tokens, inputs, strict=True):
        token = step.input_type(name, batch)
        expected = token.with_shape(batch, seq, *token.shape[1:])
        require(type == expected, f"{name} {type} must be {expected}: the step reads {token} for each token")
    named = zip((*step.constants, *step.states), (*constants, *states), strict=False)
    for name, type in named:
        expected = step.input_type(name, batch)
        require(type == expected, f"{name} {type} must be {expected}")
    outputs = [bind_batch(step.graph.outputs[name].type, batch) for name in step.outputs]
    return (*(t.with_shape(batch, seq, *t.shape[1:]) for t in outputs), *states)


@scan.cost
def _(n: OpCall) -> Size:
    batch, seq = n.values[0].shape[:2]
    step_flops = sizes.sum_sizes(node.op.node_cost(node).flops for node in n.step.graph.nodes)
    flops: Size = sizes.substitute(step_flops, {"batch": batch}) * seq
    return flops


@scan.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    types = {name: n.step.input_type(name, n.values[0].shape[0]) for name in n.step.states}
    return tuple(
        StateSpec(name, StateKind.SCAN, Growth.CONSTANT, f"past_{name}", f"present_{name}", types[name], initial=start)
        for name, start in n.step.initial.items()
    )


def cast_step(step: Step, operands: Sequence[DType]) -> Step:
    """Return `step` with casts, so that its tokens and then its constants have the dtypes `operands`, in this order.

    Float outputs get the dtype of the first token. The step still computes in its own dtypes, since sums over thousands
    of tokens need f32. Casts that an earlier call added are replaced.
    """
    old, graph = step.graph, Graph("step")
    dtypes = dict(zip((*step.tokens, *step.constants), operands, strict=False))
    inputs, mapped = dict[Value, Value](), dict[Value, Value]()
    for name, value in old.inputs.items():
        inputs[value] = graph.add_input(name, value.type.with_dtype(dtypes.get(name, value.type.dtype)))
    for value, new in inputs.items():
        mapped[value] = new if new.type == value.type else cast(new, to=value.type.dtype, name=f"{value.name}_wide")
    for node in old.nodes:
        first = node.inputs[0]
        if node.op is cast and first in inputs and inputs[first].type == node.output.type:
            mapped[node.output] = inputs[first]  # a cast from before is undone
            continue
        graph.copy_node(node, mapped, [v.name for v in node.outputs])
    narrow = dtypes[step.tokens[0]]
    for name, value in old.outputs.items():
        output = mapped[value]
        if name in step.outputs and value.type.dtype.is_float and value.type.dtype != narrow:
            source = value.producer.inputs[0] if value.producer is not None and value.producer.op is cast else None
            wide = source is not None and source.type.dtype == narrow
            output = mapped[source] if wide and source is not None else cast(output, to=narrow, name=f"{name}_narrow")
        graph.add_output(name, output)
    return Step(graph, step.initial, step.tokens)
