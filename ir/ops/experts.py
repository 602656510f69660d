"""Mixture of experts: what the routers of `routing` send their tokens to."""

from __future__ import annotations

import numpy as np

from .. import sizes
from ..op import Array, Size, TensorType, Trait, Value, case, normal, op, want
from .activation import activate, apply_activation, glu, known_activation
from .elementwise import add, mul
from .products import matmul
from .reduce import sum as add_up
from .tensor import reshape, transpose, unsqueeze

_X, _WEIGHTS = normal(2, 5, 6), (normal(3, 8, 6), normal(3, 6, 8))
_COMBINE = np.where(np.arange(30).reshape(2, 5, 3) * 7 % 5 < 2, 0.7, 0.0)


@op(
    traits=[Trait.ROWWISE],
    cases=[
        case(_X, _COMBINE, *_WEIGHTS, normal(3, 8, 6), active=2),
        case(_X, _COMBINE, *_WEIGHTS, activation="relu"),
        case(_X, _COMBINE, *_WEIGHTS, None, normal(3, 8), normal(3, 6), activation="gelu"),
        case(normal(4, 6), normal(4, 3), *_WEIGHTS, normal(3, 8, 6), *(normal(3, n) for n in (8, 6, 8)), limit=0.5),
        case(_X, _COMBINE, *_WEIGHTS, normal(3, 8, 6), activation="swish(1.702)", limit=0.9, shift=1.0),
    ],
)
def moe(
    x: Array,
    combine: Array,
    up: Array,
    down: Array,
    gate: Array | None = None,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
    gate_bias: Array | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
    active: int | None = None,
) -> Array:
    """Σ_e combine_e · E_e(x) over the experts e, E_e a feed-forward (Shazeer 2017).

    x [..., dim]; combine [..., experts], zero for an expert that is not asked; up and gate [experts, hidden, dim], down
    [experts, dim, hidden], biases [experts, hidden or dim]. E(x) = down(glu(gate(x), up(x))) with `activation`, `limit`
    and `shift` as in `glu`, or down(activation(up(x))) without gate. `active` promises that no row of combine has
    more non-zero entries; it changes the cost, not the result.
    """
    y = np.zeros_like(x)
    for e in range(len(up)):
        hidden = x @ up[e].T + (0 if up_bias is None else up_bias[e])
        if gate is None:
            hidden = apply_activation(hidden, activation)
        else:
            opened = x @ gate[e].T + (0 if gate_bias is None else gate_bias[e])
            hidden = glu.reference(opened, hidden, activation=activation, limit=limit, shift=shift)
        y = y + combine[..., e, None] * (hidden @ down[e].T + (0 if down_bias is None else down_bias[e]))
    return y


@moe.infer
def _(
    x: TensorType,
    combine: TensorType,
    up: TensorType,
    down: TensorType,
    gate: TensorType | None = None,
    up_bias: TensorType | None = None,
    down_bias: TensorType | None = None,
    gate_bias: TensorType | None = None,
    *,
    activation: str,
    limit: float | None,
    shift: float,
    active: int | None,
) -> TensorType:
    want(up.rank == 3 and x.rank >= 1, f"up {up} must be [experts, hidden, dim]")
    experts, hidden, dim = up.shape
    want(x.shape[-1] == dim and x.dtype == up.dtype, f"x {x} does not fit up {up}")
    want(combine == x.with_shape(*x.shape[:-1], experts), f"combine {combine} must weigh {experts} experts for x {x}")
    want(down == up.with_shape(experts, dim, hidden), f"down {down} does not fit up {up}")
    want(gate is None or gate == up, f"gate {gate} differs from up {up}")
    want(gate is not None or gate_bias is None, "gate_bias needs a gate")
    want(gate is not None or (limit is None and shift == 0), "limit and shift need a gate")
    for bias, width in ((up_bias, hidden), (down_bias, dim), (gate_bias, hidden)):
        want(bias is None or bias == up.with_shape(experts, width), f"bias {bias} must be [{experts}, {width}]")
    known_activation(activation)
    within = active is None or (active >= 1 and (not isinstance(experts, int) or active <= experts))
    want(within, f"active={active} is not within 1 and {experts} experts")
    return x


@moe.cost
def _(
    x: TensorType,
    combine: TensorType,
    up: TensorType,
    down: TensorType,
    gate: TensorType | None = None,
    *biases: TensorType | None,
    active: int | None,
    **attrs: object,
) -> Size:
    tokens = sizes.product(x.shape[:-1])
    experts, hidden, dim = up.shape
    return tokens * (experts if active is None else active) * hidden * dim * (4 if gate is None else 6)


@moe.body
def _(
    x: Value,
    combine: Value,
    up: Value,
    down: Value,
    gate: Value | None = None,
    up_bias: Value | None = None,
    down_bias: Value | None = None,
    gate_bias: Value | None = None,
    *,
    activation: str,
    limit: float | None,
    shift: float,
    active: int | None,
) -> Value:
    """Every token through every expert."""
    experts, dim = up.shape[0], up.shape[2]
    tokens = sizes.product(x.shape[:-1])

    def project(rows: Value, weight: Value, bias: Value | None) -> Value:
        y = matmul(rows, transpose(weight, axes=(0, 2, 1)))
        return y if bias is None else add(y, unsqueeze(bias, axes=(1,)))

    rows = reshape(x, shape=(1, tokens, dim))
    hidden = project(rows, up, up_bias)  # [experts, tokens, hidden]
    if gate is None:
        hidden = activate(hidden, activation)
    else:
        opened = project(rows, gate, gate_bias)
        hidden = glu(opened, hidden, activation=activation, limit=limit, shift=shift)
    weights = unsqueeze(transpose(reshape(combine, shape=(tokens, experts)), axes=(1, 0)), axes=(2,))
    mixed = add_up(mul(weights, project(hidden, down, down_bias)), axes=(0,))
    return reshape(mixed, shape=x.shape)
