"""State-space layers: the recurrences of Mamba and Mamba-2.

Models compose the rest of a layer of other ops: a projection to x, gate and step size; `causal_conv` with silu; Δ =
softplus(step + bias); A = −e^A_log; y ⊙ silu(gate), and in Mamba-2 an `rms_norm` per group. An op that gets the
optional past state also returns the present state.
"""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, StateKind, StateSpec, TensorType, Trait, Value, build_fixed_size_spec
from ..schema.cases import Sample, case, normal, positive
from ..schema.checks import require, require_int
from ..types import sizes
from .declaration import composed_op
from .recurrences import gated_linear_attention, infer_present_type
from .tensor import reshape, squeeze, swap_last_axes, unsqueeze

_A = -np.arange(1.0, 13.0).reshape(4, 3) / 5  # decay rates are negative
_SCAN = (normal(2, 7, 4), positive(2, 7, 4), _A, normal(2, 7, 3), normal(2, 7, 3))
_SSD = (normal(2, 7, 20), positive(2, 7, 4), _A[:, 0], normal(2, 7, 6), normal(2, 7, 6))


def _draw_long_operands(a: Array, states: int) -> tuple[Sample | Array, ...]:
    return normal(1, 150, 4), positive(1, 150, 4), a, normal(1, 150, states), normal(1, 150, states)


@composed_op(
    outputs="selective_scan present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_SCAN),
        case(*_SCAN, normal(4)),
        case(*_SCAN, normal(4), normal(2, 3, 4)),
        case(*_draw_long_operands(_A, 3)),
    ],
)
def selective_scan(
    x: Value, delta: Value, a: Value, b: Value, c: Value, d: Value | None = None, past: Value | None = None
) -> tuple[Value, ...]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t per channel (Gu & Dao 2023, Mamba).

    Δ, A, B, C and D are delta [batch, seq, channels], a [channels, states], b and c [batch, seq, states], d [channels]
    (0 if absent); x [batch, seq, channels] → y with the shape of x. The initial state is `past` [batch, states,
    channels] or zero; with `past` the final state is also returned.
    """
    channels, states = a.shape
    decay = reshape(unsqueeze(delta, axes=(3,)) * a, shape=(*x.shape[:2], channels * states))
    past = None if past is None else unsqueeze(swap_last_axes(past), axes=(3,))
    y, *present = gated_linear_attention.emit(c, b, delta * x, decay, past, heads=channels)
    y = y if d is None else y + x * d
    return (y, *(swap_last_axes(squeeze(state, axes=(3,))) for state in present))


@selective_scan.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    x, a, b, c = n.x, n.a, n.b, n.c
    require(x.rank == 3 and n.delta == x, f"delta {n.delta} must be [batch, seq, channels] like x {x}")
    require(a == x.with_shape(x.shape[2], a.shape[-1]), f"a {a} must be [channels, states] for x {x}")
    require(b == c == x.with_shape(*x.shape[:2], a.shape[1]), f"b {b} and c {c} must be [batch, seq, states] for a {a}")
    require(n.d is None or n.d == x.with_shape(x.shape[2]), f"d {n.d} does not fit x {x}")
    return x, *infer_present_type(n.past, x.with_shape(x.shape[0], a.shape[1], a.shape[0]))


selective_scan.cost(lambda n: n.x.elements * n.a.shape[1] * 9)


@selective_scan.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    channels, states = n.a.shape
    return (build_fixed_size_spec(StateKind.SSM, n.x, states, channels),)


@composed_op(
    outputs="ssd present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_SSD, heads=4),
        case(*_SSD, normal(4), heads=4, groups=2),
        case(*_SSD, normal(4), normal(2, 4, 3, 5), heads=4, groups=2),
        case(*_SSD, None, normal(2, 4, 6, 5), heads=4),
        case(*_draw_long_operands(_A[:, 0], 6), heads=4, groups=2),
    ],
)
def ssd(
    x: Value,
    delta: Value,
    a: Value,
    b: Value,
    c: Value,
    d: Value | None = None,
    past: Value | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> tuple[Value, ...]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t per head, A, D scalars (Dao & Gu 2024, Mamba-2).

    Δ, A, B, C and D are delta [batch, seq, heads], a [heads], b and c [batch, seq, groups·states] (head h reads group
    ⌊h·groups/heads⌋), d [heads] (0 if absent); x [batch, seq, heads·p] → y with the shape of x. The initial state is
    `past` [batch, heads, states, p] or zero; with `past` the final state is also returned.
    """
    by_head = reshape(x, shape=(*delta.shape, x.width // heads))
    driven = reshape(by_head * unsqueeze(delta, axes=(3,)), shape=x.shape)
    y, *present = gated_linear_attention.emit(c, b, driven, delta * a, past, heads=heads, groups=groups)
    if d is not None:
        y = y + reshape(by_head * unsqueeze(d, axes=(1,)), shape=x.shape)
    return (y, *present)


@ssd.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    x, a, b, heads, groups = n.x, n.a, n.b, n.heads, n.groups
    width, wide = (require_int(t.shape[-1], f"x {x} and b {b} must have fixed widths") for t in (x, b))
    require(heads >= 1 and groups >= 1 and heads % groups == 0, f"heads={heads} is not a multiple of groups={groups}")
    require(x.rank == 3 and width % heads == 0, f"x {x} must be [batch, seq, {heads}·p]")
    require(n.delta == x.with_shape(*x.shape[:2], heads), f"delta {n.delta} must be [batch, seq, {heads}] for x {x}")
    require(a == x.with_shape(heads), f"a {a} must be [{heads}]")
    fits = b == n.c == x.with_shape(*x.shape[:2], wide) and wide % groups == 0
    require(fits, f"b {b}, c {n.c} do not fit groups={groups}")
    require(n.d is None or n.d == a, f"d {n.d} differs from a {a}")
    return x, *infer_present_type(n.past, x.with_shape(x.shape[0], heads, wide // groups, width // heads))


ssd.cost(lambda n: n.x.elements * sizes.floordiv(n.b.shape[2], n.groups) * 7)


@ssd.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    return (build_fixed_size_spec(StateKind.SSM, n.x, n.heads, n.b.shape[2] // n.groups, n.x.shape[2] // n.heads),)
