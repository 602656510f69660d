"""Recurrences fused with the step sizes, norms and decays before them and the gates and norms after them."""

from __future__ import annotations

from ...op import Trait, Value, case, normal
from ..activation import swish
from ..declaration import fused_op
from ..elementwise import exp
from ..elementwise import softplus as soften
from ..norm import rms_norm
from ..recurrences import gated_delta_rule, gated_linear_attention
from ..state_space import selective_scan, ssd
from ..tensor import reshape
from .norm_linear import norm_linear

_X, _STATES = normal(2, 5, 4), (normal(2, 5, 3), normal(2, 5, 3))
_HEADS = normal(2, 5, 8), normal(2, 5, 2), normal(2), normal(2, 5, 6), normal(2, 5, 6)
_QKV = normal(2, 5, 6), normal(2, 5, 6), normal(2, 5, 8)


def _emit_decay_rate(a: Value, log_a: bool) -> Value:
    return -exp(a) if log_a else a


def _norm_slices(y: Value, weight: Value | None, parts: int, eps: float) -> Value:
    """Emit the RMS norm of each of `parts` equal slices of y [batch, seq, width], times weight [width / parts]."""
    if parts == 1:
        return rms_norm(y, weight, eps=eps)
    slices = reshape(y, shape=(*y.shape[:2], parts, y.width // parts))
    return reshape(rms_norm(slices, weight, eps=eps), shape=y.shape)


@fused_op(
    outputs="gated_selective_scan present",
    traits=[Trait.RECURRENT],
    cases=[
        case(_X, _X, normal(4, 3), *_STATES, normal(4), None, None, normal(4), _X, softplus=True, log_a=True),
        case(
            *(_X, normal(2, 5, 2), normal(4, 3), *_STATES, None, normal(2, 3, 4), normal(4, 2), normal(4), _X),
            *(normal(2), normal(3)),
            **{"softplus": True, "log_a": True, "kind": "rms", "b_norm": True, "c_norm": True, "b_eps": 1e-2},
        ),
    ],
)
def gated_selective_scan(
    x: Value,
    delta: Value,
    a: Value,
    b: Value,
    c: Value,
    d: Value | None = None,
    past: Value | None = None,
    weight: Value | None = None,
    bias: Value | None = None,
    gate: Value | None = None,
    norm_weight: Value | None = None,
    b_weight: Value | None = None,
    c_weight: Value | None = None,
    *,
    softplus: bool = False,
    log_a: bool = False,
    kind: str = "none",
    eps: float = 1e-6,
    b_norm: bool = False,
    b_eps: float = 1e-6,
    c_norm: bool = False,
    c_eps: float = 1e-6,
) -> tuple[Value, ...]:
    """`selective_scan`(x, Δ, A, b, c) ⊙ silu(gate) (Gu & Dao 2023, Mamba; norms: Jamba, Lieber 2024).

    x and gate (absent: no factor) [batch, seq, channels]. Δ is z, or softplus(z) with `softplus`. z is `delta` [batch,
    seq, channels] + `bias` [channels] or, with `weight` W [channels, rank], norm(delta) Wᵀ + bias for `delta` [batch,
    seq, rank], with a norm of `kind` none or rms (`eps`, norm_weight [rank]). A is a, or −exp(a) with `log_a`. With
    `b_norm` b is RMS-normed (`b_eps`, b_weight [states]), and with `c_norm` c likewise. d, past, present and the shapes
    of a, b and c are those of `selective_scan`.
    """
    if weight is not None:
        delta = norm_linear(delta, weight, bias, norm_weight, kind=kind, eps=eps)
    elif bias is not None:
        delta = delta + bias
    delta = soften(delta) if softplus else delta
    b = rms_norm(b, b_weight, eps=b_eps) if b_norm else b
    c = rms_norm(c, c_weight, eps=c_eps) if c_norm else c
    y, *present = selective_scan.emit(x, delta, _emit_decay_rate(a, log_a), b, c, d, past)
    return (y if gate is None else y * swish(gate), *present)


@fused_op(
    outputs="gated_ssd present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_HEADS, normal(2), None, normal(2), normal(2, 5, 8), heads=2, softplus=True, log_a=True),
        case(
            *(*_HEADS, None, normal(2, 2, 3, 4), None, normal(2, 5, 8), normal(8)),
            **{"heads": 2, "groups": 2, "norm": True, "norm_groups": 2, "eps": 1e-2},
        ),
    ],
)
def gated_ssd(
    x: Value,
    delta: Value,
    a: Value,
    b: Value,
    c: Value,
    d: Value | None = None,
    past: Value | None = None,
    bias: Value | None = None,
    gate: Value | None = None,
    norm_weight: Value | None = None,
    *,
    heads: int,
    groups: int = 1,
    softplus: bool = False,
    log_a: bool = False,
    norm: bool = False,
    eps: float = 1e-6,
    norm_groups: int = 1,
) -> tuple[Value, ...]:
    """norm(`ssd`(x, Δ, A, b, c) ⊙ silu(gate)) (Dao & Gu 2024, Mamba-2).

    x and gate (absent: no factor) [batch, seq, heads·p]. Δ is delta [batch, seq, heads] + `bias` [heads], or with
    `softplus` the softplus of that. A is a, or −exp(a) with `log_a`. With `norm`, each of `norm_groups` equal slices of
    the last axis is RMS-normed (`eps`), and the result multiplied by norm_weight [heads·p]. d, past, present and the
    shapes of a, b and c are as in `ssd`.
    """
    delta = delta if bias is None else delta + bias
    delta = soften(delta) if softplus else delta
    y, *present = ssd.emit(x, delta, _emit_decay_rate(a, log_a), b, c, d, past, heads=heads, groups=groups)
    y = y if gate is None else y * swish(gate)
    if norm and norm_groups > 1:
        y = _norm_slices(y, None, norm_groups, eps)
        return (y if norm_weight is None else y * norm_weight, *present)
    return (rms_norm(y, norm_weight, eps=eps) if norm else y, *present)


@fused_op(
    outputs="matrix_recurrence present",
    traits=[Trait.RECURRENT],
    cases=[
        case(*_QKV, None, normal(2, 5, 2), heads=2, unit=True, q_scale=0.5),
        case(
            *(*_QKV, normal(2, 5, 2), None, None, normal(2), normal(2), _QKV[2], normal(4)),
            **{"heads": 2, "norm": True, "norm_groups": 2},
        ),
        case(*_QKV, normal(2, 5, 12, scale=0.1), None, normal(2, 2, 6, 4), heads=2, k_scale=0.5),
    ],
)
def matrix_recurrence(
    q: Value,
    k: Value,
    v: Value,
    decay: Value | None = None,
    beta: Value | None = None,
    past: Value | None = None,
    a_log: Value | None = None,
    bias: Value | None = None,
    gate: Value | None = None,
    norm_weight: Value | None = None,
    *,
    heads: int,
    groups: int = 1,
    unit: bool = False,
    unit_eps: float = 1e-6,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    beta_scale: float = 1.0,
    norm: bool = False,
    eps: float = 1e-6,
    norm_groups: int = 1,
) -> tuple[Value, ...]:
    """norm(y) ⊙ gate, y the output of `gated_delta_rule` or, without `beta`, `gated_linear_attention` (Yang 2024).

    q, k and `beta` are multiplied by `q_scale`, `k_scale` and `beta_scale`; with `unit` q and k are first RMS-normed
    per head (`groups` heads, `unit_eps`). With a_log [heads] the decay is −e^a_log · softplus(decay + bias), for decay
    [batch, seq, n] and bias [n], n = heads or heads·d. With `norm`, each of `norm_groups` equal slices of y is
    RMS-normed (`eps`) and multiplied by norm_weight [dv·heads / norm_groups]. gate (absent: no factor) has the shape of
    v. The other operands, past and present are as in `gated_delta_rule`.
    """
    if unit:
        q, k = (_norm_slices(t, None, groups, unit_eps) for t in (q, k))
    q, k = (t if scale == 1 else t * scale for t, scale in ((q, q_scale), (k, k_scale)))
    if a_log is not None and decay is not None:
        soft = soften(decay if bias is None else decay + bias)
        count, width = a_log.width, decay.width
        by_head = reshape(soft, shape=(*soft.shape[:2], count, width // count))
        rate = reshape(-exp(a_log), shape=(count, 1))
        decay = reshape(by_head * rate, shape=soft.shape)
    if beta is None:
        y, *present = gated_linear_attention.emit(q, k, v, decay, past, heads=heads, groups=groups)
    else:
        beta = beta if beta_scale == 1 else beta * beta_scale
        y, *present = gated_delta_rule.emit(q, k, v, beta, decay, past, heads=heads, groups=groups)
    y = _norm_slices(y, norm_weight, norm_groups, eps) if norm else y
    return (y if gate is None else y * gate, *present)
