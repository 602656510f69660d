"""State-space layers: the recurrences of Mamba and Mamba-2, and `scan`, those that a user writes as a step.

What surrounds them is composed: a projection into x, gate and step, `causal_conv` with silu, Δ = softplus(step + bias),
A = −e^A_log, then y ⊙ silu(gate); in Mamba-2 an `rms_norm` over each of its groups
follows (reshape, norm without weight, reshape, times weight). Both take the past as an optional operand and then also
return the present state.

`scan` takes a step for one token as data (see `Step`), with the values that it reads of every token and of none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..graph import Graph
from ..graph.step import BATCH, NEXT, Step, placed, traced_step
from ..interpreter import interpret
from ..op import (
    Array,
    Growth,
    OpCall,
    Sample,
    Size,
    StateKind,
    StateSpec,
    TensorType,
    Trait,
    Value,
    case,
    constant_state,
    fixed,
    normal,
    op,
    positive,
    want,
)
from ..schema.checks import total
from ..types import sizes
from ..types.dtypes import DType, f32
from .elementwise import add, cast, exp, mul, sigmoid, tanh
from .products import linear, matmul
from .recurrences import carried, gated_linear_attention
from .reduce import sum as add_up
from .tensor import reshape, squeeze, swap, unsqueeze

_A = -np.arange(1.0, 13.0).reshape(4, 3) / 5  # decay rates are negative
_SCAN = (normal(2, 7, 4), positive(2, 7, 4), _A, normal(2, 7, 3), normal(2, 7, 3))
_SSD = (normal(2, 7, 20), positive(2, 7, 4), _A[:, 0], normal(2, 7, 6), normal(2, 7, 6))


def _steady(a: Array, states: int) -> tuple[Sample | Array, ...]:
    """Operands of 150 tokens, longer than the chunks of any backend."""
    return normal(1, 150, 4), positive(1, 150, 4), a, normal(1, 150, states), normal(1, 150, states)


@op(
    outputs="selective_scan present",
    traits=[Trait.RECURRENT],
    cases=[case(*_SCAN), case(*_SCAN, normal(4)), case(*_SCAN, normal(4), normal(2, 3, 4)), case(*_steady(_A, 3))],
)
def selective_scan(
    x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array | None = None, past: Array | None = None
) -> Array | tuple[Array, Array]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t per channel (Gu & Dao 2023, Mamba).

    x, delta [batch, seq, channels], a [channels, states], b, c [batch, seq, states], d [channels] → y like x. The state
    before x is `past` [batch, states, channels], then the one after x is returned too; or zero.
    """
    state = np.zeros((len(x), *a.T.shape)) if past is None else past
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        step = delta[:, t, None]
        state = np.exp(step * a.T) * state + step * b[:, t, :, None] * x[:, t, None]
        y[:, t] = np.einsum("bnc,bn->bc", state, c[:, t])
    y = y if d is None else y + d * x
    return y if past is None else (y, state)


@selective_scan.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    x, a, b, c = n.x, n.a, n.b, n.c
    want(x.rank == 3 and n.delta == x, f"delta {n.delta} must be [batch, seq, channels] like x {x}")
    want(a == x.with_shape(x.shape[2], a.shape[-1]), f"a {a} must be [channels, states] for x {x}")
    want(b == c == x.with_shape(*x.shape[:2], a.shape[1]), f"b {b} and c {c} must be [batch, seq, states] for a {a}")
    want(n.d is None or n.d == x.with_shape(x.shape[2]), f"d {n.d} does not fit x {x}")
    return x, *carried(n.past, x.with_shape(x.shape[0], a.shape[1], a.shape[0]))


@selective_scan.cost
def _(n: OpCall) -> Size:
    x: TensorType = n.x
    states: Size = n.a.shape[1]
    return x.elements * states * 9


@selective_scan.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    channels, numbers = n.a.shape
    return (constant_state(StateKind.SSM, n.x, numbers, channels),)


@selective_scan.body
def _(n: OpCall) -> tuple[Value, ...]:
    channels, states = n.a.shape
    decay = reshape(mul(unsqueeze(n.delta, axes=(3,)), n.a), shape=(*n.x.shape[:2], channels * states))
    past = None if n.past is None else unsqueeze(swap(n.past), axes=(3,))
    y, *present = gated_linear_attention.emit(n.c, n.b, mul(n.delta, n.x), decay, past, heads=channels)
    y = y if n.d is None else add(y, mul(n.x, n.d))
    return (y, *(swap(squeeze(state, axes=(3,))) for state in present))


@op(
    outputs="ssd present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_SSD, heads=4),
        case(*_SSD, normal(4), heads=4, groups=2),
        case(*_SSD, normal(4), normal(2, 4, 3, 5), heads=4, groups=2),
        case(*_SSD, None, normal(2, 4, 6, 5), heads=4),
        case(*_steady(_A[:, 0], 6), heads=4, groups=2),
    ],
)
def ssd(
    x: Array,
    delta: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    past: Array | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> Array | tuple[Array, Array]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t per head, A, D scalars (Dao & Gu 2024, Mamba-2).

    x [batch, seq, heads·p], delta [batch, seq, heads], a and d [heads], b and c [batch, seq, groups·states] (head h
    reads group ⌊h·groups/heads⌋) → y like x. The state before x is `past` [batch, heads, states, p], then the one after
    x is returned too; or zero.
    """
    batch, seq, _ = x.shape
    xh = x.reshape(batch, seq, heads, -1)
    bh, ch = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (b, c))
    state = np.zeros((batch, heads, bh.shape[3], xh.shape[3])) if past is None else past
    y = np.zeros_like(xh)
    for t in range(seq):
        step = delta[:, t, :, None, None]
        state = np.exp(step * a[:, None, None]) * state + step * bh[:, t, :, :, None] * xh[:, t, :, None]
        y[:, t] = np.einsum("bhnp,bhn->bhp", state, ch[:, t])
    y = y if d is None else y + d[:, None] * xh
    return y.reshape(x.shape) if past is None else (y.reshape(x.shape), state)


@ssd.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    x, a, b, heads, groups = n.x, n.a, n.b, n.heads, n.groups
    width, wide = (fixed(t.shape[-1], f"x {x} and b {b} must have fixed widths") for t in (x, b))
    want(heads >= 1 and groups >= 1 and heads % groups == 0, f"heads={heads} is no multiple of groups={groups}")
    want(x.rank == 3 and width % heads == 0, f"x {x} must be [batch, seq, {heads}·p]")
    want(n.delta == x.with_shape(*x.shape[:2], heads), f"delta {n.delta} must be [batch, seq, {heads}] for x {x}")
    want(a == x.with_shape(heads), f"a {a} must be [{heads}]")
    fits = b == n.c == x.with_shape(*x.shape[:2], wide) and wide % groups == 0
    want(fits, f"b {b}, c {n.c} do not fit groups={groups}")
    want(n.d is None or n.d == a, f"d {n.d} differs from a {a}")
    return x, *carried(n.past, x.with_shape(x.shape[0], heads, wide // groups, width // heads))


@ssd.cost
def _(n: OpCall) -> Size:
    x: TensorType = n.x
    return x.elements * sizes.floordiv(n.b.shape[2], n.groups) * 7


@ssd.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    return (constant_state(StateKind.SSM, n.x, n.heads, n.b.shape[2] // n.groups, n.x.shape[2] // n.heads),)


@ssd.body
def _(n: OpCall) -> tuple[Value, ...]:
    by_head = reshape(n.x, shape=(*n.delta.shape, n.x.width // n.heads))
    driven = reshape(mul(by_head, unsqueeze(n.delta, axes=(3,))), shape=n.x.shape)
    shape = {"heads": n.heads, "groups": n.groups}
    y, *present = gated_linear_attention.emit(n.c, n.b, driven, mul(n.delta, n.a), n.past, **shape)
    if n.d is not None:
        y = add(y, reshape(mul(by_head, unsqueeze(n.d, axes=(1,))), shape=n.x.shape))
    return (y, *present)


# -- recurrences of steps


def _example(
    function: Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]],
    states: Mapping[str, tuple[int | float, ...]],
    tokens: Mapping[str, tuple[int, ...]],
    **constants: tuple[int, ...],
) -> Step:
    """A step for a case: shapes of rows, of a state followed by what it begins with; `constants` are read by name."""
    graph = Graph("example")
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


_GATED = _example(_gated, {"state": (2, 3, 4)}, {"q": (2, 3), "k": (2, 3), "v": (2, 4), "decay": (2, 3)})
_ELMAN = _example(_elman, {"h": (4,), "c": (4, -1.5)}, {"x": (4,)}, weight=(4, 4))
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
