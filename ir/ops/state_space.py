"""State-space layers: the recurrences of Mamba and Mamba-2.

What surrounds them is composed: a projection into x, gate and step, `causal_conv` with silu, Δ = softplus(step + bias),
A = −e^A_log (recipe ``map(…, fn="neg_exp")``), then y ⊙ silu(gate); in Mamba-2 an `rms_norm` over each of its groups
follows (reshape, norm without weight, reshape, times weight). Both take the past as an optional operand and then also
return the present state. Bodies are the parallel forms, quadratic in the length: fit for short pieces.
"""

from __future__ import annotations

import numpy as np

from .. import sizes
from ..op import Array, Bound, Size, TensorType, Value, case, fixed, normal, op, positive, want
from .elementwise import add, exp, less_equal, masked, mul, sub
from .products import matmul
from .reduce import cumsum
from .reduce import sum as add_up
from .tensor import expand, iota, reshape, swap, transpose, unsqueeze

_A = -np.arange(1.0, 13.0).reshape(4, 3) / 5  # decay rates are negative
_SCAN = (normal(2, 7, 4), positive(2, 7, 4), _A, normal(2, 7, 3), normal(2, 7, 3))
_SSD = (normal(2, 7, 20), positive(2, 7, 4), _A[:, 0], normal(2, 7, 6), normal(2, 7, 6))


@op(
    outputs="selective_scan present",
    cases=[case(*_SCAN), case(*_SCAN, normal(4)), case(*_SCAN, normal(4), normal(2, 4, 3))],
)
def selective_scan(
    x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array | None = None, past: Array | None = None
) -> Array | tuple[Array, Array]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t per channel (Gu & Dao 2023, Mamba).

    x, delta [batch, seq, channels], a [channels, states], b, c [batch, seq, states], d [channels] → y like x. The state
    before x is `past` [batch, channels, states], then the one after x is returned too; or zero.
    """
    state = np.zeros((len(x), *a.shape)) if past is None else past
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        step = delta[:, t, :, None]
        state = np.exp(step * a) * state + step * b[:, t, None] * x[:, t, :, None]
        y[:, t] = np.einsum("bcn,bn->bc", state, c[:, t])
    y = y if d is None else y + d * x
    return y if past is None else (y, state)


@selective_scan.infer
def _(n: Bound) -> tuple[TensorType, ...]:
    x, a, b, c = n.x, n.a, n.b, n.c
    want(x.rank == 3 and n.delta == x, f"delta {n.delta} must be [batch, seq, channels] like x {x}")
    want(a == x.with_shape(x.shape[2], a.shape[-1]), f"a {a} must be [channels, states] for x {x}")
    want(b == c == x.with_shape(*x.shape[:2], a.shape[1]), f"b {b} and c {c} must be [batch, seq, states] for a {a}")
    want(n.d is None or n.d == x.with_shape(x.shape[2]), f"d {n.d} does not fit x {x}")
    state = x.with_shape(x.shape[0], *a.shape)
    want(n.past is None or n.past == state, f"past {n.past} does not fit x {x} and a {a}")
    return (x,) if n.past is None else (x, state)


@selective_scan.cost
def _(n: Bound) -> Size:
    x: TensorType = n.x
    states: Size = n.a.shape[1]
    return x.elements * states * 9


def _parallel(delta: Value) -> tuple[Value, Value, Value]:
    """From steps [batch, seq, n]: their sum so far, what passes from time s to t as [batch, t, s, n] (0 if s > t), and
    whether s ≤ t as [t, s, 1]."""
    at = iota(delta, axis=1)
    seen = unsqueeze(less_equal(unsqueeze(at, axes=(0,)), unsqueeze(at, axes=(1,))), axes=(2,))
    so_far = cumsum(delta, axis=1)
    gap = sub(unsqueeze(so_far, axes=(2,)), unsqueeze(so_far, axes=(1,)))
    return so_far, masked(seen, gap), seen


@selective_scan.body
def _(n: Bound) -> Value | tuple[Value, Value]:
    x, delta, a, past = n.x, n.delta, n.a, n.past
    so_far, gap, seen = _parallel(delta)
    read = mul(unsqueeze(n.c, axes=(2,)), unsqueeze(n.b, axes=(1,)))  # [batch, t, s, states]
    kernel = add_up(mul(exp(mul(unsqueeze(gap, axes=(4,)), a)), unsqueeze(read, axes=(3,))), axes=(4,))
    driven = mul(delta, x)
    y = add_up(mul(masked(seen, kernel), unsqueeze(driven, axes=(1,))), axes=(2,))
    if past is not None:
        fading = mul(exp(mul(unsqueeze(so_far, axes=(3,)), a)), unsqueeze(past, axes=(1,)))
        y = add(y, add_up(mul(fading, unsqueeze(n.c, axes=(2,))), axes=(3,)))
    if n.d is not None:
        y = add(y, mul(x, n.d))
    if past is None:
        return y
    whole = add_up(delta, axes=(1,), keepdims=True)  # [batch, 1, channels]
    left = exp(mul(unsqueeze(sub(whole, so_far), axes=(3,)), a))
    written = mul(mul(left, unsqueeze(driven, axes=(3,))), unsqueeze(n.b, axes=(2,)))
    kept = mul(exp(mul(reshape(whole, shape=(*past.shape[:2], 1)), a)), past)
    return y, add(kept, add_up(written, axes=(1,)))


@op(
    outputs="ssd present",
    cases=[
        case(*_SSD, heads=4),
        case(*_SSD, normal(4), heads=4, groups=2),
        case(*_SSD, normal(4), normal(2, 4, 5, 3), heads=4, groups=2),
        case(*_SSD, None, normal(2, 4, 5, 6), heads=4),
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
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D x_t per head, A, D scalars (Dao & Gu 2024, Mamba-2).

    x [batch, seq, heads·p], delta [batch, seq, heads], a and d [heads], b and c [batch, seq, groups·states] (head h
    reads group ⌊h·groups/heads⌋) → y like x. The state before x is `past` [batch, heads, p, states], then the one after
    x is returned too; or zero.
    """
    batch, seq, _ = x.shape
    xh = x.reshape(batch, seq, heads, -1)
    bh, ch = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (b, c))
    state = np.zeros((batch, heads, xh.shape[3], bh.shape[3])) if past is None else past
    y = np.zeros_like(xh)
    for t in range(seq):
        step = delta[:, t, :, None, None]
        state = np.exp(step * a[:, None, None]) * state + step * xh[:, t, :, :, None] * bh[:, t, :, None]
        y[:, t] = np.einsum("bhpn,bhn->bhp", state, ch[:, t])
    y = y if d is None else y + d[:, None] * xh
    return y.reshape(x.shape) if past is None else (y.reshape(x.shape), state)


@ssd.infer
def _(n: Bound) -> tuple[TensorType, ...]:
    x, a, b, heads, groups = n.x, n.a, n.b, n.heads, n.groups
    width, wide = (fixed(t.shape[-1], f"x {x} and b {b} must have fixed widths") for t in (x, b))
    want(heads >= 1 and groups >= 1 and heads % groups == 0, f"heads={heads} is no multiple of groups={groups}")
    want(x.rank == 3 and width % heads == 0, f"x {x} must be [batch, seq, {heads}·p]")
    want(n.delta == x.with_shape(*x.shape[:2], heads), f"delta {n.delta} must be [batch, seq, {heads}] for x {x}")
    want(a == x.with_shape(heads), f"a {a} must be [{heads}]")
    fits = b == n.c == x.with_shape(*x.shape[:2], wide) and wide % groups == 0
    want(fits, f"b {b}, c {n.c} do not fit groups={groups}")
    want(n.d is None or n.d == a, f"d {n.d} differs from a {a}")
    state = x.with_shape(x.shape[0], heads, width // heads, wide // groups)
    want(n.past is None or n.past == state, f"past {n.past} must be {state}")
    return (x,) if n.past is None else (x, state)


@ssd.cost
def _(n: Bound) -> Size:
    x: TensorType = n.x
    return x.elements * sizes.floordiv(n.b.shape[2], n.groups) * 7


@ssd.body
def _(n: Bound) -> Value | tuple[Value, Value]:
    delta, a, heads, groups, past = n.delta, n.a, n.heads, n.groups, n.past
    (batch, seq, width), states = n.x.shape, n.b.width // groups

    def by_head(t: Value) -> Value:
        """b or c as [batch, heads, seq, states]."""
        grouped = transpose(reshape(t, shape=(batch, seq, groups, 1, states)), axes=(0, 2, 3, 1, 4))
        spread = expand(grouped, shape=(batch, groups, heads // groups, seq, states))
        return reshape(spread, shape=(batch, heads, seq, states))

    bh, ch = by_head(n.b), by_head(n.c)
    xh = reshape(n.x, shape=(batch, seq, heads, width // heads))
    driven = transpose(mul(xh, unsqueeze(delta, axes=(3,))), axes=(0, 2, 1, 3))  # [batch, heads, seq, p]
    so_far, gap, seen = _parallel(delta)
    decay = transpose(masked(seen, exp(mul(gap, a))), axes=(0, 3, 1, 2))  # [batch, heads, t, s]
    y = matmul(mul(decay, matmul(ch, swap(bh))), driven)
    fading = swap(exp(mul(so_far, a)))  # [batch, heads, t]
    if past is not None:
        y = add(y, matmul(mul(ch, unsqueeze(fading, axes=(3,))), swap(past)))
    y = transpose(y, axes=(0, 2, 1, 3))
    if n.d is not None:
        y = add(y, mul(xh, unsqueeze(n.d, axes=(1,))))
    y = reshape(y, shape=(batch, seq, width))
    if past is None:
        return y
    whole = add_up(delta, axes=(1,), keepdims=True)  # [batch, 1, heads]
    left = swap(exp(mul(sub(whole, so_far), a)))
    written = matmul(swap(mul(driven, unsqueeze(left, axes=(3,)))), bh)
    kept = mul(reshape(exp(mul(whole, a)), shape=(batch, heads, 1, 1)), past)
    return y, add(kept, written)
