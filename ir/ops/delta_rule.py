"""The delta rule: linear attention that replaces what its state holds under a key instead of adding to it.

The body is the parallel form over the whole text: the updates of all tokens are one triangular system, whose inverse
is found block by block (the UT transform of Yang 2024, arXiv 2406.06484, in blocks of 1, 2, 4, … tokens).
"""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, Size, TensorType, Trait, Value, case, normal, op, want
from ..types import dtypes, sizes
from .elementwise import add, cast, clip, equal, exp, floordiv, less, less_equal, logical_and, logical_not, mul, sub
from .products import matmul
from .recurrences import by_head, in_dtype, keys_and_values, matrix_state
from .reduce import cumsum
from .reduce import sum as add_up
from .tensor import flat, iota, per_head, swap, unsqueeze

_DOUBLINGS = 20  # of blocks of the triangular inverse: for a million tokens
_RNG = np.random.default_rng(11)


def _unit(seq: int, groups: int, d: int, batch: int = 2) -> Array:
    """Keys of length 1: with longer ones states may grow from token to token."""
    keys = _RNG.standard_normal((batch, seq, groups, d))
    return np.asarray((keys / np.linalg.norm(keys, axis=-1, keepdims=True)).reshape(batch, seq, groups * d))


def _rates(*shape: int) -> Array:
    """Numbers between 0 and 1."""
    return _RNG.random(shape)


_GROUPED = (normal(2, 7, 6), _unit(7, 2, 3), normal(2, 7, 20), _rates(2, 7, 4))
_EACH = (normal(2, 7, 6), _unit(7, 1, 6), normal(2, 7, 20), _rates(2, 7, 4))


@op(
    outputs="gated_delta_rule present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_GROUPED, heads=4, groups=2),
        case(*_GROUPED, np.linspace(-9, 0, 56).reshape(2, 7, 4), heads=4, groups=2),
        case(*_EACH, np.linspace(-1, 0, 56).reshape(2, 7, 4), normal(2, 4, 6, 5), heads=4),
        case(*_GROUPED, None, normal(2, 4, 3, 5), heads=4, groups=2),
        case(
            *(normal(1, 150, 3), _unit(150, 1, 3, 1), normal(1, 150, 4), _rates(1, 150, 2)),
            -np.arange(300.0).reshape(1, 150, 2) / 300,
            heads=2,
        ),
        case(
            *(normal(3, 1, 2), _unit(1, 1, 2, 3), normal(3, 1, 4), _rates(3, 1, 2)),
            *(-np.ones((3, 1, 2)), normal(3, 2, 2, 2)),
            heads=2,
        ),
        case(*_GROUPED, np.linspace(-9, 0, 168).reshape(2, 7, 12), heads=4, groups=2),
        case(*_GROUPED, np.linspace(-1, 0, 168).reshape(2, 7, 12), normal(2, 4, 3, 5), heads=4, groups=2),
        case(
            *(normal(1, 40, 3), _unit(40, 1, 3, 1), normal(1, 40, 4), 2 * _rates(1, 40, 2)),
            -3 * _rates(1, 40, 6),
            heads=2,
        ),
    ],
)
def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    decay: Array | None = None,
    past: Array | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> Array | tuple[Array, Array]:
    """S = diag(e^{g_t}) S_{t−1}, S_t = S + β_t k_t (v_t − Sᵀ k_t)ᵀ, y_t = S_tᵀ q_t per head, with gates g ≤ 0.

    Gated DeltaNet (Yang 2024, arXiv 2412.06464); DeltaNet without gates (Schlag 2021), Kimi Linear (2025) with a gate
    for every key.

    q, k [batch, seq, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, seq, heads·dv], `beta` β
    [batch, seq, heads], `decay` g [batch, seq, heads·d] for every key, [batch, seq, heads] for every head, or none (0)
    → y like v. The state before them is `past` [batch, heads, d, dv], then the one after them is returned too; or zero.
    States stay bounded while β |k|² ≤ 2: models norm their keys.
    """
    batch, seq, _ = v.shape
    qh, kh = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (q, k))
    vh = v.reshape(batch, seq, heads, -1)
    state = np.zeros((batch, heads, qh.shape[3], vh.shape[3])) if past is None else past
    y = np.zeros_like(vh)
    for t in range(seq):
        kept = state if decay is None else np.exp(decay[:, t].reshape(batch, heads, -1, 1)) * state
        known = np.einsum("bhde,bhd->bhe", kept, kh[:, t])
        change = beta[:, t, :, None] * (vh[:, t] - known)
        state = kept + kh[:, t, :, :, None] * change[:, :, None]
        y[:, t] = np.einsum("bhde,bhd->bhe", state, qh[:, t])
    return y.reshape(v.shape) if past is None else (y.reshape(v.shape), state)


@gated_delta_rule.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    types = keys_and_values(n)
    each = n.v.with_shape(*n.v.shape[:2], n.heads)
    want(n.beta == each, f"beta {n.beta} must be {each}")
    return types


@gated_delta_rule.cost
def _(n: OpCall) -> Size:
    v: TensorType = n.v
    return v.elements * sizes.floordiv(n.q.shape[2], n.groups) * (6 if n.decay is None else 7)


gated_delta_rule.states(matrix_state)


@gated_delta_rule.body
def _(n: OpCall) -> Value | tuple[Value, Value]:
    heads, groups = n.heads, n.groups
    decay, past = (None if t is None else in_dtype(dtypes.f32, t) for t in (n.decay, n.past))
    q, k = by_head(n.q, heads, groups), by_head(n.k, heads, groups)
    v, beta = (per_head(in_dtype(dtypes.f32, t), heads) for t in (n.v, n.beta))
    at = iota(n.v, axis=1)
    t, s = unsqueeze(at, axes=(1,)), unsqueeze(at, axes=(0,))
    left = whole = None  # of a state when a token comes, and at the end
    if decay is not None:
        so_far = per_head(cumsum(decay, axis=1), heads)  # [batch, heads, t, d or 1]
        gap = sub(unsqueeze(so_far, axes=(3,)), unsqueeze(so_far, axes=(2,)))
        between = exp(clip(gap, high=0.0))
        left, whole = exp(so_far), per_head(add_up(decay, axes=(1,), keepdims=True), heads)

    def pairs(x: Value) -> Value:
        """x_t · what is left of k_s at t, [batch, heads, t, s]."""
        products = mul(unsqueeze(x, axes=(3,)), unsqueeze(k, axes=(2,)))
        return add_up(products if decay is None else mul(products, between), axes=(4,))

    def in_state(x: Value, state: Value) -> Value:
        """Return what the state before the first token holds under x_t when it comes."""
        return matmul(x if left is None else mul(x, left), state)

    links = mul(cast(less(s, t), to=dtypes.f32), mul(beta, pairs(k)))
    new = v if past is None else sub(v, in_state(k, past))
    changes = matmul(_inverse(links, t, s), mul(beta, new))  # what each token writes under its key
    y = matmul(mul(cast(less_equal(s, t), to=dtypes.f32), pairs(q)), changes)
    if past is None:
        return in_dtype(n.v.type.dtype, flat(y))
    y = add(y, in_state(q, past))
    if whole is None:
        present = add(past, matmul(swap(k), changes))
    else:
        written = matmul(swap(mul(k, exp(sub(whole, so_far)))), changes)
        present = add(mul(swap(exp(whole)), past), written)
    return in_dtype(n.v.type.dtype, flat(y)), in_dtype(n.past.type.dtype, present)


def _inverse(links: Value, t: Value, s: Value) -> Value:
    """(I + links)⁻¹ of `links` [..., t, s] strictly below the diagonal, from blocks on the diagonal that double.

    Of two neighbours [[A, 0], [C, B]] the inverse is [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]. A sum of powers of `links` is the
    same, but grows beyond f32 on the way.
    """
    same = equal(t, s)
    inverse = cast(same, to=dtypes.f32)
    length = links.shape[-1]
    count = (length - 1).bit_length() if isinstance(length, int) else _DOUBLINGS
    for i in range(count):
        wide = equal(floordiv(t, 2 ** (i + 1)), floordiv(s, 2 ** (i + 1)))
        corner = cast(logical_and(wide, logical_not(same)), to=dtypes.f32)
        inverse = sub(inverse, matmul(inverse, matmul(mul(corner, links), inverse)))
        same = wide
    return inverse
