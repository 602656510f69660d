"""Layers whose past is a state of constant size: linear attention and short convolutions; `state_space` has Mamba's.

Every op takes the past as optional operands and then also returns the present, so that a sequence may be cut anywhere:
running the pieces one after the other equals one run. Bodies are the parallel forms.
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..op import Array, Size, TensorType, Value, case, ints, normal, op, positive, want
from .activation import activate, apply_activation, elu, known_activation
from .elementwise import add, affine, cast, div, filled, less_equal, mul
from .elementwise import where as choose
from .products import matmul
from .reduce import max as greatest
from .reduce import sum as add_up
from .rotary import rope, rotate
from .tensor import concat, gather, iota, pad, reshape, slice_, transpose, unsqueeze

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
def _(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    key_mask: TensorType | None = None,
    positions: TensorType | None = None,
    frequencies: TensorType | None = None,
    past_state: TensorType | None = None,
    past_norm: TensorType | None = None,
    *,
    heads: int,
    causal: bool,
    interleaved: bool,
) -> tuple[TensorType, ...]:
    width, dv = q.shape[-1], v.shape[-1]
    if not (isinstance(width, int) and isinstance(dv, int)):
        want(False, f"q {q} and v {v} must have fixed widths")
        return ()
    want(q.rank == 3 and q.dtype == k.dtype == v.dtype, f"q {q}, k {k} and v {v} must be [batch, seq, heads·d]")
    want(
        heads >= 1 and width % heads == 0 and dv % heads == 0, f"widths of q {q} and v {v} are no multiples of {heads}"
    )
    want(k.shape == (q.shape[0], k.shape[1], width) and k.shape[:2] == v.shape[:2], f"k {k} and v {v} do not fit q {q}")
    want(key_mask is None or key_mask.shape == k.shape[:2], f"key_mask {key_mask} does not fit k {k}")
    want((positions is None) == (frequencies is None), "positions and frequencies go together")
    want(q.shape == k.shape or not (causal or positions is not None), f"q {q} and k {k} must be equally long")
    if positions is not None and frequencies is not None:
        rope.types([q, positions, frequencies], {"heads": heads, "interleaved": interleaved, "amplitude": 1.0})
    if past_state is None or past_norm is None:
        want(past_state is None and past_norm is None, "past_state and past_norm go together")
        return (v.with_shape(*q.shape[:2], dv),)
    d = width // heads
    want(causal, "a past needs causal=true")
    want(
        past_state == q.with_shape(q.shape[0], heads, d, dv // heads), f"past_state {past_state} does not fit {q}, {v}"
    )
    want(past_norm == q.with_shape(q.shape[0], heads, d), f"past_norm {past_norm} does not fit q {q}")
    return v, past_state, past_norm


@linear_attention.cost
def _(q: TensorType, k: TensorType, v: TensorType, *rest: TensorType | None, heads: int, **attrs: object) -> Size:
    return (q.elements + k.elements) * (v.shape[2] // heads * 2 + 4)


@linear_attention.body
def _(
    q: Value,
    k: Value,
    v: Value,
    key_mask: Value | None = None,
    positions: Value | None = None,
    frequencies: Value | None = None,
    past_state: Value | None = None,
    past_norm: Value | None = None,
    *,
    heads: int,
    causal: bool,
    interleaved: bool,
) -> Value | tuple[Value, Value, Value]:
    def split_heads(x: Value) -> Value:
        shaped = reshape(x, shape=(*x.shape[:2], heads, x.width // heads))
        return transpose(shaped, axes=(0, 2, 1, 3))

    def swapped(x: Value) -> Value:
        return transpose(x, axes=(0, 1, 3, 2))

    fq, fk = (affine(elu(t), plus=1.0) for t in (q, k))
    if key_mask is not None:
        fk = mul(fk, unsqueeze(cast(cast(key_mask, to=dtypes.bool_), to=fk.type.dtype), axes=(2,)))
    rq, rk = fq, fk
    if positions is not None and frequencies is not None:
        rq, rk = (rope(t, positions, frequencies, heads=heads, interleaved=interleaved) for t in (fq, fk))
    fq, fk, rq, rk, vh = map(split_heads, (fq, fk, rq, rk, v))
    state, norm = matmul(swapped(rk), vh), add_up(fk, axes=(2,))  # of all keys
    if causal:
        at = iota(q, axis=1)
        seen = less_equal(unsqueeze(at, axes=(0,)), unsqueeze(at, axes=(1,)))
        scores, shares = matmul(rq, swapped(rk)), matmul(fq, swapped(fk))
        y = matmul(choose(seen, scores, filled(scores, 0)), vh)
        share = add_up(choose(seen, shares, filled(shares, 0)), axes=(3,), keepdims=True)
        if past_state is not None and past_norm is not None:
            y = add(y, matmul(rq, past_state))
            share = add(share, matmul(fq, unsqueeze(past_norm, axes=(3,))))
            state, norm = add(state, past_state), add(norm, past_norm)
    else:
        y, share = matmul(rq, state), matmul(fq, unsqueeze(norm, axes=(3,)))
    y = reshape(transpose(div(y, share), axes=(0, 2, 1, 3)), shape=(*q.shape[:2], v.width))
    return y if past_state is None else (y, state, norm)


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
def _(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    past: TensorType | None = None,
    *,
    activation: str,
) -> tuple[TensorType, ...]:
    width = weight.shape[-1]
    want(isinstance(width, int) and width >= 2, f"weight {weight} must be [channels, width], width ≥ 2")
    want(x.rank == 3 and weight == x.with_shape(x.shape[2], width), f"weight {weight} does not fit x {x}")
    want(bias is None or bias == x.with_shape(x.shape[2]), f"bias {bias} does not fit x {x}")
    want(past is None or past == x.with_shape(x.shape[0], width - 1, x.shape[2]), f"past {past} does not fit x {x}")
    known_activation(activation)
    return (x,) if past is None else (x, past)


@causal_conv.cost
def _(x: TensorType, weight: TensorType, *rest: TensorType | None, activation: str) -> Size:
    return x.elements * weight.shape[1] * 2


@causal_conv.body
def _(
    x: Value, weight: Value, bias: Value | None = None, past: Value | None = None, *, activation: str
) -> Value | tuple[Value, Value]:
    width, channels = weight.width, x.width
    padded = pad(x, axis=1, before=width - 1) if past is None else concat(past, x, axis=1)
    at = iota(x, axis=1)

    def tap(j: int) -> Value:
        column = reshape(slice_(weight, axis=1, start=j, stop=j + 1), shape=(channels,))
        return mul(gather(padded, affine(at, plus=j) if j else at, axis=1), column)

    y = tap(0)
    for j in range(1, width):
        y = add(y, tap(j))
    y = activate(y if bias is None else add(y, bias), activation)
    if past is None:
        return y
    seq = affine(greatest(at, axes=(0,), keepdims=True), plus=1)
    return y, gather(padded, add(iota(past, axis=1), seq), axis=1)
