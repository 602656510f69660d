"""Recurrences with a state of constant size: linear attention and the delta rule (Mamba's are in `state_space`).

An op that gets the optional past state also returns the present state. So a sequence may be cut anywhere: running the
pieces in order equals one run. Recurrences are defined by a step for one token, run by `scan`. States may be f32 while
the operands are narrower: sums of thousands of terms lose too much in 8 or 11 bits of mantissa.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ..graph.step import Step
from ..op import Array, OpCall, Size, StateKind, StateSpec, TensorType, Trait, Value, build_fixed_size_spec
from ..schema.cases import case, ints, normal, positive
from ..schema.checks import require, require_int
from ..types import dtypes, sizes
from .activation import relu
from .declaration import composed_op
from .elementwise import cast, clip, exp
from .loops import build_step, scan
from .products import matmul
from .reduce import cumsum
from .reduce import sum as add_up
from .rotary import rope
from .tensor import expand, merge_heads, reshape, split_heads, squeeze, swap_last_axes, unsqueeze

_GATED = (normal(2, 7, 6), normal(2, 7, 6), normal(2, 7, 20))


def infer_present_type(past: TensorType | None, wanted: TensorType) -> tuple[TensorType, ...]:
    """Return (`past`,), the type of the present state, or () if `past` is None.

    Raises:
        WeftError: if `past` is neither `wanted` nor `wanted` in f32.
    """
    fits = past is None or past in (wanted, wanted.with_dtype(dtypes.f32))
    require(fits, f"the past {past} must be {wanted}")
    return () if past is None else (past,)


def cast_to(dtype: dtypes.DType, x: Value) -> Value:
    """Emit `x` cast to `dtype`; return `x` itself if it has that dtype."""
    return x if x.type.dtype == dtype else cast(x, to=dtype)


@functools.lru_cache(maxsize=256)
def _matrix_step(heads: int, groups: int, keys: int, values: int, gates: int, delta_rule: bool) -> Step:
    """Return the step of linear attention or, with `delta_rule`, of the delta rule, for states [heads, keys, values].

    q and k have `groups` heads. `gates` is the number of decay gates per head: 0, 1, or `keys` (one per key channel).
    """

    def step(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        q, k, v, *gate_inputs = tokens
        if groups < heads:
            repeated = (
                expand(unsqueeze(t, axes=(2,)), shape=(t.shape[0], groups, heads // groups, keys)) for t in (q, k)
            )
            q, k = (reshape(t, shape=(t.shape[0], heads, keys)) for t in repeated)
        state = unsqueeze(exp(gate_inputs.pop()), axes=(3,)) * states[0] if gates else states[0]
        if delta_rule:
            v = unsqueeze(gate_inputs.pop(), axes=(2,)) * (v - _read_state(k, state))
        state = state + unsqueeze(k, axes=(3,)) * unsqueeze(v, axes=(2,))
        return [state], [_read_state(q, state)]

    tokens: dict[str, tuple[int, ...]] = {"q": (groups, keys), "k": (groups, keys), "v": (heads, values)}
    tokens |= {"beta": (heads,)} if delta_rule else {}
    return build_step(step, {"state": (heads, keys, values)}, tokens | ({"decay": (heads, gates)} if gates else {}))


def _read_state(q: Value, state: Value) -> Value:
    """Emit Sᵀ q [batch, heads, dv] for q [batch, heads, d] and S = `state` [batch, heads, d, dv]."""
    return squeeze(matmul(unsqueeze(q, axes=(2,)), state), axes=(2,))


def _emit_recurrence(
    q: Value, k: Value, v: Value, beta: Value | None, decay: Value | None, past: Value | None, heads: int, groups: int
) -> tuple[Value, ...]:
    """Emit the delta rule or, without `beta`, linear attention, computed in f32: (y,), or (y, present) with `past`."""
    wide = [cast_to(dtypes.f32, t) for t in (q, k, v)]
    tokens = [
        reshape(t, shape=(*t.shape[:2], n, t.width // n)) for t, n in zip(wide, (groups, groups, heads), strict=True)
    ]
    tokens += [] if beta is None else [cast_to(dtypes.f32, beta)]
    gates = 0 if decay is None else decay.width // heads
    if decay is not None:
        tokens.append(reshape(cast_to(dtypes.f32, decay), shape=(*decay.shape[:2], heads, gates)))
    step = _matrix_step(heads, groups, q.width // groups, v.width // heads, gates, beta is not None)
    y, *present = scan.emit(*tokens, *([] if past is None else [cast_to(dtypes.f32, past)]), step=step)
    y = cast_to(v.type.dtype, reshape(y, shape=v.shape))
    return (y,) if past is None else (y, cast_to(past.type.dtype, present[0]))


@composed_op(
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

    q, k [batch, seq, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, seq, heads·dv]; g is `decay`:
    [batch, seq, heads·d] with a gate per key channel, [batch, seq, heads] with one per head, or absent (g = 0) → y with
    the shape of v. The initial state is `past` [batch, heads, d, dv] or zero; with `past` the final state is also
    returned.
    """
    return _emit_recurrence(q, k, v, None, decay, past, heads, groups)


def infer_matrix_recurrence(n: OpCall) -> tuple[TensorType, ...]:
    """Return the types of y and, with `past`, the present state of `gated_linear_attention` or `gated_delta_rule`;
    raise WeftError if the operand types or attributes do not fit."""
    q, v, heads, groups = n.q, n.v, n.heads, n.groups
    require(q.rank == v.rank == 3 and n.k == q, f"q {q}, k {n.k} and v {v} must be [batch, seq, width], q and k alike")
    wide, width = (require_int(t.shape[2], f"q {q} and v {v} must have fixed widths") for t in (q, v))
    require(heads >= 1 and groups >= 1 and heads % groups == 0, f"heads={heads} is not a multiple of groups={groups}")
    fits = v.shape[:2] == q.shape[:2] and width % heads == 0 and wide % groups == 0
    require(fits, f"q {q} and v {v} do not fit heads={heads} and groups={groups}")
    gates = [v.with_shape(*v.shape[:2], heads * keys) for keys in (1, wide // groups)]
    require(n.decay is None or n.decay in gates, f"decay {n.decay} must be {gates[0]} or {gates[1]}")
    return v, *infer_present_type(n.past, v.with_shape(v.shape[0], heads, wide // groups, width // heads))


gated_linear_attention.infer(infer_matrix_recurrence)


@gated_linear_attention.cost
def _(n: OpCall) -> Size:
    v: TensorType = n.v
    return v.elements * sizes.floordiv(n.q.shape[2], n.groups) * (4 if n.decay is None else 5)


def list_matrix_states(n: OpCall) -> tuple[StateSpec, ...]:
    """Return the spec of the state [batch, heads, d, dv] of `gated_linear_attention` or `gated_delta_rule`."""
    matrix = n.heads, n.q.shape[2] // n.groups, n.v.shape[2] // n.heads
    return (build_fixed_size_spec(StateKind.RECURRENT, n.v, *matrix, part="state"),)


gated_linear_attention.states(list_matrix_states)


_RNG = np.random.default_rng(11)


def _draw_unit_keys(seq: int, groups: int, d: int, batch: int = 2) -> Array:
    """Return random keys [batch, seq, groups·d] of norm 1 per group: states may grow without bound with longer keys."""
    keys = _RNG.standard_normal((batch, seq, groups, d))
    return np.asarray((keys / np.linalg.norm(keys, axis=-1, keepdims=True)).reshape(batch, seq, groups * d))


_GROUPED = (normal(2, 7, 6), _draw_unit_keys(7, 2, 3), normal(2, 7, 20), _RNG.random((2, 7, 4)))
_EACH = (normal(2, 7, 6), _draw_unit_keys(7, 1, 6), normal(2, 7, 20), _RNG.random((2, 7, 4)))


@composed_op(
    outputs="gated_delta_rule present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_GROUPED, heads=4, groups=2),
        case(*_GROUPED, np.linspace(-9, 0, 56).reshape(2, 7, 4), heads=4, groups=2),
        case(*_EACH, np.linspace(-1, 0, 56).reshape(2, 7, 4), normal(2, 4, 6, 5), heads=4),
        case(*_GROUPED, None, normal(2, 4, 3, 5), heads=4, groups=2),
        case(
            *(normal(1, 150, 3), _draw_unit_keys(150, 1, 3, 1), normal(1, 150, 4), _RNG.random((1, 150, 2))),
            -np.arange(300.0).reshape(1, 150, 2) / 300,
            heads=2,
        ),
        case(
            *(normal(3, 1, 2), _draw_unit_keys(1, 1, 2, 3), normal(3, 1, 4), _RNG.random((3, 1, 2))),
            *(-np.ones((3, 1, 2)), normal(3, 2, 2, 2)),
            heads=2,
        ),
        case(*_GROUPED, np.linspace(-9, 0, 168).reshape(2, 7, 12), heads=4, groups=2),
        case(*_GROUPED, np.linspace(-1, 0, 168).reshape(2, 7, 12), normal(2, 4, 3, 5), heads=4, groups=2),
        case(
            *(normal(1, 40, 3), _draw_unit_keys(40, 1, 3, 1), normal(1, 40, 4), 2 * _RNG.random((1, 40, 2))),
            -3 * _RNG.random((1, 40, 6)),
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
    per key channel.

    q, k [batch, seq, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, seq, heads·dv]; β is `beta` [batch,
    seq, heads]; g is `decay`: [batch, seq, heads·d] with a gate per key channel, [batch, seq, heads] with one per head,
    or absent (g = 0) → y with the shape of v. The initial state is `past` [batch, heads, d, dv] or zero; with `past`
    the final state is also returned. States stay bounded while β |k|² ≤ 2, so models normalize their keys.
    """
    return _emit_recurrence(q, k, v, beta, decay, past, heads, groups)


@gated_delta_rule.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    types = infer_matrix_recurrence(n)
    each = n.v.with_shape(*n.v.shape[:2], n.heads)
    require(n.beta == each, f"beta {n.beta} must be {each}")
    return types


gated_delta_rule.cost(lambda n: n.v.elements * sizes.floordiv(n.q.shape[2], n.groups) * (6 if n.decay is None else 7))
gated_delta_rule.states(list_matrix_states)


_QKV = (normal(2, 7, 12), normal(2, 7, 12), normal(2, 7, 9))
_ROPE = (ints(2, 7, high=99), normal(2))
_PAST = (normal(2, 3, 4, 3), positive(2, 3, 4))


@composed_op(
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

    q [batch, seq, heads·d], k [batch, keys, heads·d], v [batch, keys, heads·dv] → [batch, seq, heads·dv]; keys = seq if
    `causal` or with positions. Keys where `key_mask` [batch, keys] is 0 are masked. With `positions` [batch, seq] and
    `frequencies` [pairs] φ(q) and φ(k) are rotated by `rope` in the numerator, but not in the denominator (Su 2021).
    With past_state [batch, heads, d, dv] = Σ φ(k) vᵀ and past_norm [batch, heads, d] = Σ φ(k) over earlier keys (only
    if `causal`) both sums over all keys so far are also returned.
    """
    batch, seq, _ = q.shape
    fq, fk = (exp(clip(t, high=0.0)) + relu(t) for t in (q, k))
    if key_mask is not None:
        fk = fk * unsqueeze(cast(cast(key_mask, to=dtypes.bool_), to=fk.type.dtype), axes=(2,))
    rq, rk = fq, fk
    if positions is not None:
        rq, rk = (rope(t, positions, frequencies, heads=heads, interleaved=interleaved) for t in (fq, fk))
    terms = cast_to(dtypes.f32, fk)
    norm = add_up(terms, axes=(1,), keepdims=True)  # [batch, 1, heads·d]
    present: tuple[Value, ...] = ()
    if causal:
        y, *state = gated_linear_attention.emit(rq, rk, v, None, past_state, heads=heads, groups=heads)
        seen = cumsum(terms, axis=1)
        if past_norm is not None:
            before = reshape(cast_to(dtypes.f32, past_norm), shape=norm.shape)
            seen, norm = seen + before, reshape(norm + before, shape=past_norm.shape)
            present = *state, cast_to(past_norm.type.dtype, norm)
    else:
        queries = split_heads(rq, heads)
        products = matmul(swap_last_axes(split_heads(rk, heads)), split_heads(v, heads))
        y, seen = merge_heads(matmul(queries, products)), norm
    products = reshape(cast_to(dtypes.f32, fq) * seen, shape=(batch, seq, heads, fq.width // heads))
    numerators = reshape(cast_to(dtypes.f32, y), shape=(batch, seq, heads, y.width // heads))
    y = reshape(numerators / add_up(products, axes=(3,), keepdims=True), shape=y.shape)
    return cast_to(v.type.dtype, y), *present


@linear_attention.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k, v, heads = n.q, n.k, n.v, n.heads
    width, dv = (require_int(t.shape[-1], f"q {q} and v {v} must have fixed widths") for t in (q, v))
    require(q.rank == 3 and q.dtype == k.dtype == v.dtype, f"q {q}, k {k} and v {v} must be [batch, seq, heads·d]")
    divides = heads >= 1 and width % heads == 0 and dv % heads == 0
    require(divides, f"widths of q {q} and v {v} are not multiples of {heads}")
    fits = k.shape == (q.shape[0], k.shape[1], width) and k.shape[:2] == v.shape[:2]
    require(fits, f"k {k} and v {v} do not fit q {q}")
    require(n.key_mask is None or n.key_mask.shape == k.shape[:2], f"key_mask {n.key_mask} does not fit k {k}")
    require((n.positions is None) == (n.frequencies is None), "positions and frequencies must be given together")
    require(q.shape == k.shape or not (n.causal or n.positions is not None), f"q {q} and k {k} must be equally long")
    if n.positions is not None:
        rope.types([q, n.positions, n.frequencies], rope.check_attrs({"heads": heads}))
    require((n.past_state is None) == (n.past_norm is None), "past_state and past_norm must both be present or absent")
    if n.past_state is None:
        return (v.with_shape(*q.shape[:2], dv),)
    require(n.causal, "past_state needs causal=true")
    norm = q.with_shape(q.shape[0], heads, width // heads)
    state = norm.with_shape(*norm.shape, dv // heads)
    return v, *infer_present_type(n.past_state, state), *infer_present_type(n.past_norm, norm)


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
        build_fixed_size_spec(StateKind.RECURRENT, n.v, *keys, values, part="state", suffix="_state"),
        build_fixed_size_spec(StateKind.NORM, n.v, *keys, suffix="_norm"),
    )
