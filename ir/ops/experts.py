"""The experts of a mixture: feed-forward layers, weighted per token by a router (see `routing`)."""

from __future__ import annotations

import numpy as np

from ..op import Array, Cost, OpCall, Trait, Value, case, normal, op, require, sum_sizes
from ..types import sizes
from .activation import activate, apply_activation, check_activation, glu
from .products import matmul
from .reduce import sum as add_up
from .tensor import reshape, swap_last_axes, unsqueeze

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

    x [..., dim]; combine [..., experts] ≥ 0, zero for experts that a token does not choose; up and gate
    [experts, hidden, dim], down [experts, dim, hidden], up_bias and gate_bias [experts, hidden], down_bias
    [experts, dim]. E(x) = down(glu(gate(x), up(x))) with `activation`, `limit` and `shift` as in `glu`, or
    down(activation(up(x))) without gate. `active`, the most experts per token (None: all), only affects the cost.
    """
    y = np.zeros_like(x)
    for e in range(len(up)):
        chosen = combine[..., e] != 0
        biases = (None if b is None else b[e] for b in (up_bias, gate_bias))
        gate_weight = None if gate is None else gate[e]
        hidden = compute_expert_hidden(
            x[chosen], up[e], gate_weight, *biases, activation=activation, limit=limit, shift=shift
        )
        expert_output = hidden @ down[e].T + (0 if down_bias is None else down_bias[e])
        y[chosen] += combine[chosen, e, None] * expert_output
    return y


def compute_expert_hidden(
    x: Array,
    up: Array,
    gate: Array | None,
    up_bias: Array | None,
    gate_bias: Array | None,
    *,
    activation: str,
    limit: float | None,
    shift: float,
) -> Array:
    """Return glu(gate(x), up(x)) of one expert, or act(up(x)) without gate: [tokens, hidden] for `x` [tokens, dim]."""
    hidden: Array = x @ up.T + (0 if up_bias is None else up_bias)
    if gate is None:
        return apply_activation(hidden, activation)
    gate_input = x @ gate.T + (0 if gate_bias is None else gate_bias)
    return np.asarray(glu.reference(gate_input, hidden, activation=activation, limit=limit, shift=shift))


@moe.infer
def _(n: OpCall) -> None:
    x, up, gate = n.x, n.up, n.gate
    require(up.rank == 3 and x.rank >= 1, f"up {up} must be [experts, hidden, dim]")
    experts, hidden, dim = up.shape
    require(x.shape[-1] == dim and x.dtype == up.dtype, f"x {x} does not fit up {up}")
    fits = n.combine == x.with_shape(*x.shape[:-1], experts)
    require(fits, f"combine {n.combine} must weigh {experts} experts for x {x}")
    require(n.down == up.with_shape(experts, dim, hidden), f"down {n.down} does not fit up {up}")
    require(gate is None or gate == up, f"gate {gate} differs from up {up}")
    require(gate is not None or n.gate_bias is None, "gate_bias needs a gate")
    require(gate is not None or (n.limit is None and n.shift == 0), "limit and shift need a gate")
    for bias, width in ((n.up_bias, hidden), (n.down_bias, dim), (n.gate_bias, hidden)):
        require(bias is None or bias == up.with_shape(experts, width), f"bias {bias} must be [{experts}, {width}]")
    check_activation(n.activation)
    in_range = n.active is None or (n.active >= 1 and (not isinstance(experts, int) or n.active <= experts))
    require(in_range, f"active={n.active} is not between 1 and {experts} experts")


@moe.cost
def _(n: OpCall) -> Cost:
    experts, hidden, dim = n.up.shape
    chosen, tokens = experts if n.active is None else n.active, sizes.multiply_sizes(n.x.shape[:-1])
    stacks = [t for t in (n.up, n.down, n.gate, n.up_bias, n.down_bias, n.gate_bias) if t is not None]
    each = sum_sizes([t.with_shape(*t.shape[1:]).bytes for t in stacks])
    read = n.x.bytes + n.combine.bytes + each * sizes.minimum(experts, tokens * chosen)
    return Cost(tokens * chosen * hidden * dim * (4 if n.gate is None else 6), read, n.x.bytes)


@moe.body
def _(n: OpCall) -> Value:
    """Emit all experts on all tokens, and the sum of their results weighted by combine."""
    experts, _, dim = n.up.shape
    tokens = sizes.multiply_sizes(n.x.shape[:-1])

    def project(rows: Value, weight: Value, bias: Value | None) -> Value:
        y = matmul(rows, swap_last_axes(weight))
        return y if bias is None else y + unsqueeze(bias, axes=(1,))

    rows = reshape(n.x, shape=(1, tokens, dim))
    hidden = project(rows, n.up, n.up_bias)  # [experts, tokens, hidden]
    if n.gate is None:
        hidden = activate(hidden, n.activation)
    else:
        gate_input = project(rows, n.gate, n.gate_bias)
        hidden = glu(gate_input, hidden, activation=n.activation, limit=n.limit, shift=n.shift)
    weights = unsqueeze(swap_last_axes(reshape(n.combine, shape=(tokens, experts))), axes=(2,))
    mixed = add_up(weights * project(hidden, n.down, n.down_bias), axes=(0,))
    return reshape(mixed, shape=n.x.shape)
