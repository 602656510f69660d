"""Layers whose past is a state of constant size: linear attention and short convolutions; `state_space` has Mamba's.

Every op takes the past as optional operands and then also returns the present, so that a sequence may be cut anywhere:
running the pieces one after the other equals one run. Linear attention, Mamba and Mamba-2 are made of one recurrence,
`gated_linear_attention`; its body is the parallel form, quadratic in the length. States that add up all tokens may be
f32 beside narrower operands: sums of thousands of terms have no place in 8 or 11 bits.
"""

from __future__ import annotations

import functools

import numpy as np

from ..op import (
    Array,
    OpCall,
    Size,
    StateKind,
    StateSpec,
    TensorType,
    Trait,
    Value,
    case,
    constant_state,
    fixed,
    ints,
    normal,
    op,
    positive,
    want,
)
from ..types import dtypes, sizes
from .activation import activate, apply_activation, known_activation, relu
from .elementwise import add, affine, cast, clip, div, exp, less_equal, masked, mul, sub
from .products import matmul
from .reduce import cumsum
from .reduce import max as greatest
from .reduce import sum as add_up
from .rotary import rope, rotate
from .tensor import concat, expand, flat, gather, iota, pad, per_head, reshape, slice_, swap, transpose, unsqueeze

_GATED = (normal(2, 7, 6), normal(2, 7, 6), normal(2, 7, 20))


@op(
    outputs="gated_linear_attention present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_GATED, heads=4, groups=2),
        case(*_GATED, np.linspace(-9, 0, 56).reshape(2, 7, 4), heads=4, groups=2),
        case(*_GATED, np.linspace(-1, 0, 56).reshape(2, 7, 4), normal(2, 4, 6, 5), heads=4),
        case(*_GATED, None, normal(2, 2, 3, 10), heads=2, groups=2),
        case(normal(1, 150, 3), normal(1, 150, 3), normal(1, 150, 4), -np.arange(300.0).reshape(1, 150, 2), heads=2),
        case(normal(3, 1, 2), normal(3, 1, 2), normal(3, 1, 4), -np.ones((3, 1, 2)), normal(3, 2, 2, 2), heads=2),
        case(*_GATED, np.linspace(-9, 0, 168).reshape(2, 7, 12), heads=4, groups=2),
        case(*_GATED, np.linspace(-1, 0, 168).reshape(2, 7, 12), normal(2, 4, 3, 5), heads=4, groups=2),
    ],
)
def gated_linear_attention(
    q: Array, k: Array, v: Array, decay: Array | None = None, past: Array | None = None, *, heads: int, groups: int = 1
) -> Array | tuple[Array, Array]:
    """S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t per head, with gates g ≤ 0 (Yang 2023).

    q, k [batch, seq, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, seq, heads·dv], `decay` g
    [batch, seq, heads·d] for every key, [batch, seq, heads] for every head, or none (0) → y like v. The state before
    them is `past` [batch, heads, d, dv], then the one after them is returned too; or zero.
    """
    batch, seq, _ = v.shape
    qh, kh = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (q, k))
    vh = v.reshape(batch, seq, heads, -1)
    state = np.zeros((batch, heads, qh.shape[3], vh.shape[3])) if past is None else past
    y = np.zeros_like(vh)
    for t in range(seq):
        kept = state if decay is None else np.exp(decay[:, t].reshape(batch, heads, -1, 1)) * state
        state = kept + kh[:, t, :, :, None] * vh[:, t, :, None]
        y[:, t] = np.einsum("bhde,bhd->bhe", state, qh[:, t])
    return y.reshape(v.shape) if past is None else (y.reshape(v.shape), state)


def carried(past: TensorType | None, wanted: TensorType) -> tuple[TensorType, ...]:
    """The type of a present state: that of `past`, which must be `wanted`, maybe in f32; nothing without a past."""
    fits = past is None or past in (wanted, wanted.with_dtype(dtypes.f32))
    want(fits, f"the past {past} must be {wanted}")
    return () if past is None else (past,)


def in_dtype(dtype: dtypes.DType, x: Value) -> Value:
    """Return `x` cast to `dtype`, unless it has it."""
    return x if x.type.dtype == dtype else cast(x, to=dtype)


def keys_and_values(n: OpCall) -> tuple[TensorType, ...]:
    """The types of the outputs of a recurrence of q, k, v, `decay` and `past`, whose state is a matrix per head."""
    q, v, heads, groups = n.q, n.v, n.heads, n.groups
    want(q.rank == v.rank == 3 and n.k == q, f"q {q}, k {n.k} and v {v} must be [batch, seq, width], q and k alike")
    wide, width = (fixed(t.shape[2], f"q {q} and v {v} must have fixed widths") for t in (q, v))
    want(heads >= 1 and groups >= 1 and heads % groups == 0, f"heads={heads} is no multiple of groups={groups}")
    fits = v.shape[:2] == q.shape[:2] and width % heads == 0 and wide % groups == 0
    want(fits, f"q {q} and v {v} do not fit heads={heads} and groups={groups}")
    gates = [v.with_shape(*v.shape[:2], heads * keys) for keys in (1, wide // groups)]
    want(n.decay is None or n.decay in gates, f"decay {n.decay} must be {gates[0]} or {gates[1]}")
    return v, *carried(n.past, v.with_shape(v.shape[0], heads, wide // groups, width // heads))


gated_linear_attention.infer(keys_and_values)


@gated_linear_attention.cost
def _(n: OpCall) -> Size:
    v: TensorType = n.v
    return v.elements * sizes.floordiv(n.q.shape[2], n.groups) * (4 if n.decay is None else 5)


def matrix_state(n: OpCall) -> tuple[StateSpec, ...]:
    """The state [heads, d, dv] of a recurrence of q, k and v."""
    matrix = n.heads, n.q.shape[2] // n.groups, n.v.shape[2] // n.heads
    return (constant_state(StateKind.RECURRENT, n.v, *matrix, part="state"),)


gated_linear_attention.states(matrix_state)


def by_head(t: Value, heads: int, groups: int) -> Value:
    """t [batch, seq, groups·d] as f32 [batch, heads, seq, d]; head h reads group ⌊h·groups/heads⌋."""
    (batch, seq, _), d = t.shape, t.width // groups
    grouped = transpose(reshape(in_dtype(dtypes.f32, t), shape=(batch, seq, groups, 1, d)), axes=(0, 2, 3, 1, 4))
    spread = expand(grouped, shape=(batch, groups, heads // groups, seq, d))
    return reshape(spread, shape=(batch, heads, seq, d))


@gated_linear_attention.body
def _(n: OpCall) -> Value | tuple[Value, Value]:
    heads, groups = n.heads, n.groups
    decay, past = (None if t is None else in_dtype(dtypes.f32, t) for t in (n.decay, n.past))
    q, k, v = by_head(n.q, heads, groups), by_head(n.k, heads, groups), per_head(in_dtype(dtypes.f32, n.v), heads)
    at = iota(n.v, axis=1)
    seen = less_equal(unsqueeze(at, axes=(0,)), unsqueeze(at, axes=(1,)))
    pairs = mul(unsqueeze(q, axes=(3,)), unsqueeze(k, axes=(2,)))  # [batch, heads, t, s, d]
    if decay is not None:
        so_far = per_head(cumsum(decay, axis=1), heads)  # [batch, heads, t, d or 1]
        gap = sub(unsqueeze(so_far, axes=(3,)), unsqueeze(so_far, axes=(2,)))
        pairs = mul(pairs, exp(clip(gap, high=0.0)))
    y = matmul(masked(seen, add_up(pairs, axes=(4,))), v)
    if past is None:
        return in_dtype(n.v.type.dtype, flat(y))
    if decay is None:
        y, present = add(y, matmul(q, past)), add(past, matmul(swap(k), v))
    else:
        whole = per_head(add_up(decay, axes=(1,), keepdims=True), heads)
        y = add(y, matmul(mul(q, exp(so_far)), past))
        written = matmul(swap(mul(k, exp(sub(whole, so_far)))), v)
        present = add(mul(swap(exp(whole)), past), written)
    return in_dtype(n.v.type.dtype, flat(y)), in_dtype(n.past.type.dtype, present)


_QKV = (normal(2, 7, 12), normal(2, 7, 12), normal(2, 7, 9))
_ROPE = (ints(2, 7, high=99), normal(2))
_PAST = (normal(2, 3, 4, 3), positive(2, 3, 4))


@op(
    outputs="linear_attention present_state present_norm",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_QKV, heads=3),
        case(*_QKV, heads=3, causal=True),
        case(*_QKV, None, *_ROPE, heads=3, causal=True),
        case(*_QKV, np.arange(14).reshape(2, 7) % 7 < [[7], [4]], *_ROPE, heads=3),
        case(*_QKV, None, None, None, *_PAST, heads=3, causal=True),
        case(*_QKV, None, *_ROPE, *_PAST, heads=3, causal=True, interleaved=True),
        case(normal(1, 150, 4), normal(1, 150, 4), normal(1, 150, 6), heads=2, causal=True),
    ],
)
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    key_mask: Array | None = None,
    positions: Array | None = None,
    frequencies: Array | None = None,
    past_state: Array | None = None,
    past_norm: Array | None = None,
    *,
    heads: int,
    causal: bool = False,
    interleaved: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """Σ_m φ(q_n)·φ(k_m) v_m / Σ_m φ(q_n)·φ(k_m) per head, φ = elu + 1 (Katharopoulos 2020); m ≤ n if `causal`.

    q, k [batch, seq, heads·d], v [batch, seq, heads·dv] → [batch, seq, heads·dv]. Keys where `key_mask` [batch, seq] is
    0 are left out. With `positions` [batch, seq] and `frequencies` [pairs] the φ of the numerator, not those of the
    denominator, are rotated as `rope` does (Su 2021). With past_state [batch, heads, d, dv] = Σ φ(k) vᵀ and past_norm
    [batch, heads, d] = Σ φ(k) of earlier keys (causal only) the present ones are returned too.
    """
    batch, seq, _ = q.shape
    fq, fk = (np.where(t > 0, t + 1, np.exp(np.minimum(t, 0))) for t in (q, k))
    if key_mask is not None:
        fk = fk * (key_mask != 0)[..., None]
    rq, rk = fq, fk
    if positions is not None and frequencies is not None:
        angles = positions[..., None] * frequencies
        rq, rk = (rotate(t, angles, heads=heads, interleaved=interleaved, amplitude=1.0) for t in (fq, fk))
    qn, kn, rq, rk, vh = (t.reshape(batch, -1, heads, t.shape[2] // heads) for t in (fq, fk, rq, rk, v))
    state = np.einsum("bshd,bshe->bshde", rk, vh)
    norm = kn
    if causal:
        state, norm = np.cumsum(state, 1), np.cumsum(norm, 1)
    else:
        state, norm = state.sum(1, keepdims=True), norm.sum(1, keepdims=True)
    if past_state is not None and past_norm is not None:
        state, norm = state + past_state[:, None], norm + past_norm[:, None]
    share = np.sum(qn * norm, -1, keepdims=True)
    y = np.asarray(np.einsum("bshd,bshde->bshe", rq, np.broadcast_to(state, (batch, seq, *state.shape[2:]))) / share)
    y = y.reshape(batch, seq, -1)
    return y if past_state is None else (y, state[:, -1], norm[:, -1])


@linear_attention.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k, v, heads = n.q, n.k, n.v, n.heads
    width, dv = (fixed(t.shape[-1], f"q {q} and v {v} must have fixed widths") for t in (q, v))
    want(q.rank == 3 and q.dtype == k.dtype == v.dtype, f"q {q}, k {k} and v {v} must be [batch, seq, heads·d]")
    whole = heads >= 1 and width % heads == 0 and dv % heads == 0
    want(whole, f"widths of q {q} and v {v} are no multiples of {heads}")
    want(k.shape == (q.shape[0], k.shape[1], width) and k.shape[:2] == v.shape[:2], f"k {k} and v {v} do not fit q {q}")
    want(n.key_mask is None or n.key_mask.shape == k.shape[:2], f"key_mask {n.key_mask} does not fit k {k}")
    want((n.positions is None) == (n.frequencies is None), "positions and frequencies go together")
    want(q.shape == k.shape or not (n.causal or n.positions is not None), f"q {q} and k {k} must be equally long")
    if n.positions is not None:
        rope.types([q, n.positions, n.frequencies], rope.check_attrs({"heads": heads}))
    want((n.past_state is None) == (n.past_norm is None), "past_state and past_norm go together")
    if n.past_state is None:
        return (v.with_shape(*q.shape[:2], dv),)
    want(n.causal, "a past needs causal=true")
    norm = q.with_shape(q.shape[0], heads, width // heads)
    state = norm.with_shape(*norm.shape, dv // heads)
    return v, *carried(n.past_state, state), *carried(n.past_norm, norm)


@linear_attention.cost
def _(n: OpCall) -> Size:
    rows: Size = n.q.elements + n.k.elements
    dv: int = n.v.shape[2] // n.heads
    return rows * (dv * 2 + 4)


@linear_attention.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    if not n.causal:
        return ()
    keys, values = (n.heads, n.q.shape[2] // n.heads), n.v.shape[2] // n.heads
    return (
        constant_state(StateKind.RECURRENT, n.v, *keys, values, part="state", suffix="_state"),
        constant_state(StateKind.NORM, n.v, *keys, suffix="_norm"),
    )


@linear_attention.body
def _(n: OpCall) -> tuple[Value, ...]:
    heads, (batch, seq, _) = n.heads, n.q.shape
    fq, fk = (add(exp(clip(t, high=0.0)), relu(t)) for t in (n.q, n.k))
    if n.key_mask is not None:
        fk = mul(fk, unsqueeze(cast(cast(n.key_mask, to=dtypes.bool_), to=fk.type.dtype), axes=(2,)))
    rq, rk = fq, fk
    if n.positions is not None:
        rq, rk = (rope(t, n.positions, n.frequencies, heads=heads, interleaved=n.interleaved) for t in (fq, fk))
    terms = in_dtype(dtypes.f32, fk)
    norm = add_up(terms, axes=(1,), keepdims=True)  # [batch, 1, heads·d]
    present: tuple[Value, ...] = ()
    if n.causal:
        y, *state = gated_linear_attention.emit(rq, rk, n.v, None, n.past_state, heads=heads, groups=heads)
        seen = cumsum(terms, axis=1)
        if n.past_norm is not None:
            before = reshape(in_dtype(dtypes.f32, n.past_norm), shape=norm.shape)
            seen, norm = add(seen, before), reshape(add(norm, before), shape=n.past_norm.shape)
            present = *state, in_dtype(n.past_norm.type.dtype, norm)
    else:
        y, seen = flat(matmul(per_head(rq, heads), matmul(swap(per_head(rk, heads)), per_head(n.v, heads)))), norm
    shared = reshape(mul(in_dtype(dtypes.f32, fq), seen), shape=(batch, seq, heads, fq.width // heads))
    apart = reshape(in_dtype(dtypes.f32, y), shape=(batch, seq, heads, y.width // heads))
    y = reshape(div(apart, add_up(shared, axes=(3,), keepdims=True)), shape=y.shape)
    return in_dtype(n.v.type.dtype, y), *present


@op(
    outputs="causal_conv present",
    cases=[
        case(normal(2, 7, 5), normal(5, 4)),
        case(normal(2, 7, 5), normal(5, 4), normal(5), activation="silu"),
        case(normal(2, 7, 5), normal(5, 4), normal(5), normal(2, 3, 5), activation="silu"),
        case(normal(2, 1, 5), normal(5, 3), None, normal(2, 2, 5)),
    ],
)
def causal_conv(
    x: Array, weight: Array, bias: Array | None = None, past: Array | None = None, *, activation: str = "identity"
) -> Array | tuple[Array, Array]:
    """Depthwise causal convolution over time: y_t = activation(Σ_j weight[:, j] x_{t − width + 1 + j} + bias).

    x [batch, seq, channels], weight [channels, width], bias [channels] → [batch, seq, channels]. What precedes x is
    `past` [batch, width − 1, channels], then the present one — the last rows seen — is returned too; or zeros.
    """
    width, seq = weight.shape[1], x.shape[1]
    before = np.zeros((len(x), width - 1, x.shape[2])) if past is None else past
    padded = np.concatenate([before, x], 1)
    y = sum(padded[:, j : j + seq] * weight[:, j] for j in range(width)) + (0 if bias is None else bias)
    y = apply_activation(np.asarray(y), activation)
    return y if past is None else (y, padded[:, seq:])


@causal_conv.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    x, weight, bias, past = n.x, n.weight, n.bias, n.past
    width = weight.shape[-1]
    want(isinstance(width, int) and width >= 2, f"weight {weight} must be [channels, width], width ≥ 2")
    want(x.rank == 3 and weight == x.with_shape(x.shape[2], width), f"weight {weight} does not fit x {x}")
    want(bias is None or bias == x.with_shape(x.shape[2]), f"bias {bias} does not fit x {x}")
    want(past is None or past == x.with_shape(x.shape[0], width - 1, x.shape[2]), f"past {past} does not fit x {x}")
    known_activation(n.activation)
    return (x,) if past is None else (x, past)


@causal_conv.cost
def _(n: OpCall) -> Size:
    x: TensorType = n.x
    taps: int = n.weight.shape[1]
    return x.elements * taps * 2


@causal_conv.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    channels, taps = n.weight.shape
    return (constant_state(StateKind.CONV, n.x, taps - 1, channels),)


@causal_conv.body
def _(n: OpCall) -> Value | tuple[Value, Value]:
    width, channels = n.weight.width, n.x.width
    padded = pad(n.x, axis=1, before=width - 1) if n.past is None else concat(n.past, n.x, axis=1)
    at = iota(n.x, axis=1)

    def tap(j: int) -> Value:
        column = reshape(slice_(n.weight, axis=1, start=j, stop=j + 1), shape=(channels,))
        return mul(gather(padded, affine(at, plus=j) if j else at, axis=1), column)

    y = functools.reduce(add, map(tap, range(width)))
    y = activate(y if n.bias is None else add(y, n.bias), n.activation)
    if n.past is None:
        return y
    seq = affine(greatest(at, axes=(0,), keepdims=True), plus=1)
    return y, gather(padded, add(iota(n.past, axis=1), seq), axis=1)
