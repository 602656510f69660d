"""Layers whose past is a state of constant size: linear attention and short convolutions; `state_space` has Mamba's.

Every op takes the past as optional operands and then also returns the present, so that a sequence may be cut anywhere:
running the pieces one after the other equals one run. Bodies are the parallel forms.
"""

from __future__ import annotations

import functools

import numpy as np

from .. import dtypes
from ..op import Array, Bound, Size, TensorType, Value, case, fixed, ints, normal, op, positive, want
from .activation import activate, apply_activation, elu, known_activation
from .elementwise import add, affine, cast, div, less_equal, masked, mul
from .products import matmul
from .reduce import max as greatest
from .reduce import sum as add_up
from .rotary import rope, rotate
from .tensor import concat, flat, gather, iota, pad, per_head, reshape, slice_, swap, unsqueeze

_QKV = (normal(2, 7, 12), normal(2, 7, 12), normal(2, 7, 9))
_ROPE = (ints(2, 7, high=99), normal(2))
_PAST = (normal(2, 3, 4, 3), positive(2, 3, 4))


@op(
    outputs="linear_attention present_state present_norm",
    cases=[
        case(*_QKV, heads=3),
        case(*_QKV, heads=3, causal=True),
        case(*_QKV, None, *_ROPE, heads=3, causal=True),
        case(*_QKV, np.arange(14).reshape(2, 7) % 7 < [[7], [4]], *_ROPE, heads=3),
        case(*_QKV, None, None, None, *_PAST, heads=3, causal=True),
        case(*_QKV, None, *_ROPE, *_PAST, heads=3, causal=True, interleaved=True),
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
def _(n: Bound) -> tuple[TensorType, ...]:
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
    want(n.past_state == state, f"past_state {n.past_state} does not fit {q}, {v}")
    want(n.past_norm == norm, f"past_norm {n.past_norm} does not fit q {q}")
    return v, state, norm


@linear_attention.cost
def _(n: Bound) -> Size:
    rows: Size = n.q.elements + n.k.elements
    dv: int = n.v.shape[2] // n.heads
    return rows * (dv * 2 + 4)


@linear_attention.body
def _(n: Bound) -> Value | tuple[Value, Value, Value]:
    fq, fk = (affine(elu(t), plus=1.0) for t in (n.q, n.k))
    if n.key_mask is not None:
        fk = mul(fk, unsqueeze(cast(cast(n.key_mask, to=dtypes.bool_), to=fk.type.dtype), axes=(2,)))
    rq, rk = fq, fk
    if n.positions is not None:
        rq, rk = (rope(t, n.positions, n.frequencies, heads=n.heads, interleaved=n.interleaved) for t in (fq, fk))
    fq, fk, rq, rk, vh = (per_head(t, n.heads) for t in (fq, fk, rq, rk, n.v))
    state, norm = matmul(swap(rk), vh), add_up(fk, axes=(2,))  # of all keys
    if n.causal:
        at = iota(n.q, axis=1)
        seen = less_equal(unsqueeze(at, axes=(0,)), unsqueeze(at, axes=(1,)))
        scores, shares = matmul(rq, swap(rk)), matmul(fq, swap(fk))
        y = matmul(masked(seen, scores), vh)
        share = add_up(masked(seen, shares), axes=(3,), keepdims=True)
        if n.past_state is not None:
            y = add(y, matmul(rq, n.past_state))
            share = add(share, matmul(fq, unsqueeze(n.past_norm, axes=(3,))))
            state, norm = add(state, n.past_state), add(norm, n.past_norm)
    else:
        y, share = matmul(rq, state), matmul(fq, unsqueeze(norm, axes=(3,)))
    y = flat(div(y, share))
    return y if n.past_state is None else (y, state, norm)


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
def _(n: Bound) -> tuple[TensorType, ...]:
    x, weight, bias, past = n.x, n.weight, n.bias, n.past
    width = weight.shape[-1]
    want(isinstance(width, int) and width >= 2, f"weight {weight} must be [channels, width], width ≥ 2")
    want(x.rank == 3 and weight == x.with_shape(x.shape[2], width), f"weight {weight} does not fit x {x}")
    want(bias is None or bias == x.with_shape(x.shape[2]), f"bias {bias} does not fit x {x}")
    want(past is None or past == x.with_shape(x.shape[0], width - 1, x.shape[2]), f"past {past} does not fit x {x}")
    known_activation(n.activation)
    return (x,) if past is None else (x, past)


@causal_conv.cost
def _(n: Bound) -> Size:
    x: TensorType = n.x
    taps: int = n.weight.shape[1]
    return x.elements * taps * 2


@causal_conv.body
def _(n: Bound) -> Value | tuple[Value, Value]:
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
