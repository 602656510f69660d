"""Mixtures of experts in a decode step: the choice of experts, and the weighted sum of their outputs."""

from __future__ import annotations

from typing import Any

from ...op import Trait, Value, case, ints, normal, positive, require
from ..declaration import fused_op
from ..elementwise import cast
from ..experts import moe
from ..reduce import sum as add_up
from ..reduce import top_k
from ..routing import route
from ..tensor import one_hot, unsqueeze
from .norm_linear import apply_norm, norm_linear

_GROUPS = {"groups": 3, "top_groups": 2, "scoring": "sigmoid"}
_EXPERTS = normal(3, 8, 6), normal(3, 6, 8)


@fused_op(
    outputs="chosen weights",
    traits=[Trait.ROWWISE],
    cases=[case(normal(2, 4, 6), k=2), case(normal(2, 4, 6), normal(6), k=3, scale=2.5, **_GROUPS)],
)
def choose_experts(
    logits: Value,
    bias: Value | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
) -> tuple[Value, Value]:
    """The k experts that `route` chooses, i64, and their weights, both [batch, seq, k], largest weight first.

    logits [batch, seq, experts]; `bias` [experts] and attributes are those of `route`.
    """
    scores: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize, "scale": scale}
    combine = route(logits, bias, k=k, groups=groups, top_groups=top_groups, group_score=group_score, **scores)
    weights, chosen = top_k.emit(combine, k=k)
    return chosen, weights


@fused_op(
    outputs="chosen weights",
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 4, 5), normal(6, 5), None, None, normal(5), k=2),
        case(normal(2, 4, 5), normal(6, 5), normal(6), normal(6), k=3, kind="none", scale=2.5, **_GROUPS),
    ],
)
def norm_route(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    correction: Value | None = None,
    norm_weight: Value | None = None,
    norm_bias: Value | None = None,
    *,
    k: int,
    kind: str = "rms",
    eps: float = 1e-6,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
) -> tuple[Value, ...]:
    """`choose_experts` for the logits norm(x) Wᵀ + b, with the norm of `norm_linear`.

    x [batch, seq, in], weight [experts, in], bias [experts]. `correction` [experts] is the bias of `choose_experts`: it
    affects which experts are chosen, but not their weights.
    """
    logits = norm_linear(x, weight, bias, norm_weight, norm_bias, kind=kind, eps=eps)
    scores: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize, "scale": scale, "k": k}
    best: dict[str, Any] = {"groups": groups, "top_groups": top_groups, "group_score": group_score}
    return choose_experts.emit(logits, correction, **scores, **best)


@fused_op(
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 4, 6), ints(2, 4, 1, high=3), positive(2, 4, 1), *_EXPERTS, normal(3, 8, 6)),
        case(
            *(normal(2, 4, 6), ints(2, 4, 1, high=3), positive(2, 4, 1), *_EXPERTS, None, normal(3, 8), normal(3, 6)),
            *(None, normal(2, 4, 6), normal(6)),
            **{"kind": "rms", "activation": "relu2"},
        ),
    ],
)
def mixture(
    x: Value,
    chosen: Value,
    weights: Value,
    up: Value,
    down: Value,
    gate: Value | None = None,
    up_bias: Value | None = None,
    down_bias: Value | None = None,
    gate_bias: Value | None = None,
    residual: Value | None = None,
    norm_weight: Value | None = None,
    norm_bias: Value | None = None,
    *,
    kind: str = "none",
    eps: float = 1e-6,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
) -> Value:
    """residual + Σ_j weights_j · E_e(norm(x)) with e = chosen_j (Shazeer 2017).

    x and residual [batch, seq, in] (without residual: 0), chosen (integers) and weights ≥ 0 [batch, seq, k]; the k
    experts of a token are distinct. The experts E, `activation`, `limit` and `shift` are those of `moe`, the norm is
    that of `norm_linear`.
    """
    experts, k = up.shape[0], chosen.shape[-1]
    require(isinstance(experts, int) and isinstance(k, int), f"up {up.type} must have a fixed number of experts")
    placed = unsqueeze(weights, axes=(3,)) * cast(one_hot(chosen, depth=experts), to=weights.type.dtype)
    combine = add_up(placed, axes=(2,))
    stacks = up, down, gate, up_bias, down_bias, gate_bias
    y = moe(
        *(apply_norm(x, norm_weight, norm_bias, kind, eps), combine, *stacks),
        **{"activation": activation, "limit": limit, "shift": shift, "active": k},
    )
    return y if residual is None else residual + y
