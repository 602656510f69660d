"""Layers whose past is a state of constant size: linear attention and the delta rule; `state_space` has Mamba's.

Every op takes the past as optional operands and then also returns the present, so that a sequence may be cut anywhere:
running the pieces one after the other equals one run. Recurrences are defined by their step, over `scan`. States that
add up all tokens may be f32 beside narrower operands: sums of thousands of terms have no place in 8 or 11 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ..graph.step import Step
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
    positive,
    want,
)
from ..types import dtypes, sizes
from .activation import relu
from .declaration import composed
from .elementwise import add, cast, clip, div, exp, mul, sub
from .loops import scan, step_of
from .products import matmul
from .reduce import cumsum
from .reduce import sum as add_up
from .rotary import rope
from .tensor import (
    expand,
    flat,
    per_head,
    reshape,
    squeeze,
    swap,
    unsqueeze,
)

_GATED = (normal(2, 7, 6), normal(2, 7, 6), normal(2, 7, 20))


def carried(past: TensorType | None, wanted: TensorType) -> tuple[TensorType, ...]:
    """Return the type of the present state, that of `past`, which must be `wanted` or `wanted` in f32; () without a
    past."""
    fits = past is None or past in (wanted, wanted.with_dtype(dtypes.f32))
    want(fits, f"the past {past} must be {wanted}")
    return () if past is None else (past,)


def in_dtype(dtype: dtypes.DType, x: Value) -> Value:
    """Return `x` cast to `dtype`, unless it has it."""
    return x if x.type.dtype == dtype else cast(x, to=dtype)


@functools.lru_cache(maxsize=256)
def _matrix_step(heads: int, groups: int, keys: int, values: int, gates: int, changes: bool) -> Step:
    """Return the step of linear attention or, if it `changes` what the state has under a key, of the delta rule;
    `gates` is the number of gates of a head: none, one, or one for each of its keys."""

    def step(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        q, k, v, *others = tokens
        if groups < heads:
            spread = (
                expand(unsqueeze(t, axes=(2,)), shape=(t.shape[0], groups, heads // groups, keys)) for t in (q, k)
            )
            q, k = (reshape(t, shape=(t.shape[0], heads, keys)) for t in spread)
        state = mul(unsqueeze(exp(others.pop()), axes=(3,)), states[0]) if gates else states[0]
        if changes:
            v = mul(unsqueeze(others.pop(), axes=(2,)), sub(v, _read(k, state)))
        state = add(state, mul(unsqueeze(k, axes=(3,)), unsqueeze(v, axes=(2,))))
        return [state], [_read(q, state)]

    tokens: dict[str, tuple[int, ...]] = {"q": (groups, keys), "k": (groups, keys), "v": (heads, values)}
    tokens |= {"beta": (heads,)} if changes else {}
    return step_of(step, {"state": (heads, keys, values)}, tokens | ({"decay": (heads, gates)} if gates else {}))


def _read(q: Value, state: Value) -> Value:
    """Sᵀ q [batch, heads, dv] of q [batch, heads, d]."""
    return squeeze(matmul(unsqueeze(q, axes=(2,)), state), axes=(2,))


def _by_step(
    q: Value, k: Value, v: Value, beta: Value | None, decay: Value | None, past: Value | None, heads: int, groups: int
) -> tuple[Value, ...]:
    """Emit a recurrence whose state is a matrix of each head, in f32."""
    wide = [in_dtype(dtypes.f32, t) for t in (q, k, v)]
    tokens = [
        reshape(t, shape=(*t.shape[:2], n, t.width // n)) for t, n in zip(wide, (groups, groups, heads), strict=True)
    ]
    tokens += [] if beta is None else [in_dtype(dtypes.f32, beta)]
    gates = 0 if decay is None else decay.width // heads
    if decay is not None:
        tokens.append(reshape(in_dtype(dtypes.f32, decay), shape=(*decay.shape[:2], heads, gates)))
    step = _matrix_step(heads, groups, q.width // groups, v.width // heads, gates, beta is not None)
    y, *present = scan.emit(*tokens, *([] if past is None else [in_dtype(dtypes.f32, past)]), step=step)
    y = in_dtype(v.type.dtype, reshape(y, shape=v.shape))
    return (y,) if past is None else (y, in_dtype(past.type.dtype, present[0]))


@composed(
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
    q: Value, k: Value, v: Value, decay: Value | None = None, past: Value | None = None, *, heads: int, groups: int = 1
) -> tuple[Value, ...]:
    """S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t per head, with gates g ≤ 0 (Yang 2023).

    q, k [batch, seq, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, seq, heads·dv], `decay` g
    [batch, seq, heads·d] for every key, [batch, seq, heads] for every head, or none (0) → y like v. The state before
    them is `past` [batch, heads, d, dv], then the one after them is returned too; or zero.
    """
    return _by_step(q, k, v, None, decay, past, heads, groups)


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


@composed(
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
    q: Value,
    k: Value,
    v: Value,
    beta: Value,
    decay: Value | None = None,
    past: Value | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> tuple[Value, ...]:
    """S = diag(e^{g_t}) S_{t−1}, S_t = S + β_t k_t (v_t − Sᵀ k_t)ᵀ, y_t = S_tᵀ q_t per head, with gates g ≤ 0.

    Gated DeltaNet (Yang 2024, arXiv 2412.06464); DeltaNet without gates (Schlag 2021), Kimi Linear (2025) with a gate
    for every key.

    q, k [batch, seq, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, seq, heads·dv], `beta` β
    [batch, seq, heads], `decay` g [batch, seq, heads·d] for every key, [batch, seq, heads] for every head, or none (0)
    → y like v. The state before them is `past` [batch, heads, d, dv], then the one after them is returned too; or zero.
    States stay bounded while β |k|² ≤ 2: models norm their keys.
    """
    return _by_step(q, k, v, beta, decay, past, heads, groups)


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


_QKV = (normal(2, 7, 12), normal(2, 7, 12), normal(2, 7, 9))
_ROPE = (ints(2, 7, high=99), normal(2))
_PAST = (normal(2, 3, 4, 3), positive(2, 3, 4))


@composed(
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
    causal: bool = False,
    interleaved: bool = False,
) -> tuple[Value, ...]:
    """Σ_m φ(q_n)·φ(k_m) v_m / Σ_m φ(q_n)·φ(k_m) per head, φ = elu + 1 (Katharopoulos 2020); m ≤ n if `causal`.

    q, k [batch, seq, heads·d], v [batch, seq, heads·dv] → [batch, seq, heads·dv]. Keys where `key_mask` [batch, seq] is
    0 are left out. With `positions` [batch, seq] and `frequencies` [pairs] the φ of the numerator, not those of the
    denominator, are rotated as `rope` does (Su 2021). With past_state [batch, heads, d, dv] = Σ φ(k) vᵀ and past_norm
    [batch, heads, d] = Σ φ(k) of earlier keys (causal only) the present ones are returned too.
    """
    batch, seq, _ = q.shape
    fq, fk = (add(exp(clip(t, high=0.0)), relu(t)) for t in (q, k))
    if key_mask is not None:
        fk = mul(fk, unsqueeze(cast(cast(key_mask, to=dtypes.bool_), to=fk.type.dtype), axes=(2,)))
    rq, rk = fq, fk
    if positions is not None:
        rq, rk = (rope(t, positions, frequencies, heads=heads, interleaved=interleaved) for t in (fq, fk))
    terms = in_dtype(dtypes.f32, fk)
    norm = add_up(terms, axes=(1,), keepdims=True)  # [batch, 1, heads·d]
    present: tuple[Value, ...] = ()
    if causal:
        y, *state = gated_linear_attention.emit(rq, rk, v, None, past_state, heads=heads, groups=heads)
        seen = cumsum(terms, axis=1)
        if past_norm is not None:
            before = reshape(in_dtype(dtypes.f32, past_norm), shape=norm.shape)
            seen, norm = add(seen, before), reshape(add(norm, before), shape=past_norm.shape)
            present = *state, in_dtype(past_norm.type.dtype, norm)
    else:
        y, seen = flat(matmul(per_head(rq, heads), matmul(swap(per_head(rk, heads)), per_head(v, heads)))), norm
    shared = reshape(mul(in_dtype(dtypes.f32, fq), seen), shape=(batch, seq, heads, fq.width // heads))
    apart = reshape(in_dtype(dtypes.f32, y), shape=(batch, seq, heads, y.width // heads))
    y = reshape(div(apart, add_up(shared, axes=(3,), keepdims=True)), shape=y.shape)
    return in_dtype(v.type.dtype, y), *present


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
