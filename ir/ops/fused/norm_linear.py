"""Linear layers fused with the norm before them and the activation, gate or residual addition after them."""

from __future__ import annotations

import numpy as np

from ...op import Array, OpCall, TensorType, Trait, Value, case, normal, op, require, sum_sizes
from ..activation import activate, glu
from ..declaration import fused_op
from ..norm import layer_norm, rms_norm
from ..products import linear
from ..tensor import concat, split

_X, _W, _B = normal(2, 3, 8), normal(6, 8), normal(6)


def apply_norm(x: Value, weight: Value | None, bias: Value | None, kind: str, eps: float) -> Value:
    """Emit the norm of x over the last axis: `kind` none (x itself), rms or layer; weight and bias [width] or None."""
    require(kind in ("none", "rms", "layer"), f"kind={kind!r} must be none, rms or layer")
    require(kind != "none" or weight is None, "norm_weight needs a norm, kind rms or layer")
    require(kind == "layer" or bias is None, f"norm_bias needs kind=layer, not {kind}")
    if kind == "none":
        return x
    return rms_norm(x, weight, eps=eps) if kind == "rms" else layer_norm(x, weight, bias, eps=eps)


@op(traits=[Trait.VIEW], cases=[case(normal(3, 8), normal(2, 8), normal(4, 8)), case(normal(3), normal(5))])
def pack(*weights: Array) -> Array:
    """Concatenation of all `weights` [rows, …] along axis 0. Targets store them adjacently, and copy nothing."""
    return np.concatenate(weights)


@pack.infer
def _(n: OpCall) -> TensorType:
    first, *rest = n.weights
    same_rows = all(w.dtype == first.dtype and w.shape[1:] == first.shape[1:] for w in rest)
    require(same_rows, f"rows of {', '.join(map(str, n.weights))} differ")
    packed: TensorType = first.with_shape(sum_sizes([w.shape[0] for w in n.weights]), *first.shape[1:])
    return packed


pack.body(lambda n: concat(*n.weights, axis=0))


@fused_op(
    traits=[Trait.ROWWISE],
    cases=[
        case(_X, _W, _B, normal(8), eps=1e-2),
        case(_X, _W, None, normal(8), normal(8), kind="layer", eps=1e-2, activation="gelu"),
        case(normal(4, 7), normal(6, 7), kind="none", activation="silu"),
        case(normal(4, 7), normal(6, 7), normal(6), eps=1e-5),
        case(normal(4, 7), normal(6, 7), kind="layer", eps=1e-5),
    ],
)
def norm_linear(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    norm_weight: Value | None = None,
    norm_bias: Value | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-6,
    activation: str = "identity",
) -> Value:
    """act(norm(x) Wᵀ + b): norm and linear in one pass over x (FlashNorm, Graef 2024).

    x [..., in], weight [out, in], bias [out], norm_weight and norm_bias [in] → [..., out]. `kind` is none (no norm),
    rms or layer; act is `activation`, as in `glu`.
    """
    if activation != "identity":
        return activate(norm_linear(x, weight, bias, norm_weight, norm_bias, kind=kind, eps=eps), activation)
    return linear(apply_norm(x, norm_weight, norm_bias, kind, eps), weight, bias)


@fused_op(
    traits=[Trait.ROWWISE],
    cases=[
        case(_X, normal(10, 8), None, normal(8), eps=1e-2),
        case(_X, normal(10, 8), normal(10), normal(8), normal(8), kind="layer", activation="gelu"),
        case(_X, normal(10, 8), kind="none", activation="swish(1.702)", limit=0.7, shift=1.0),
    ],
)
def norm_glu(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    norm_weight: Value | None = None,
    norm_bias: Value | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-6,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
) -> Value:
    """act(gate) ⊙ (up + shift) with [gate, up] = norm(x) Wᵀ + b (GLU: Shazeer 2020).

    x [..., in], weight [2·hidden, in] and bias [2·hidden] with the rows of the gate first → [..., hidden]. The norm is
    that of `norm_linear`; act (`activation`), `limit` and `shift` are those of `glu`.
    """
    gate_up = norm_linear(x, weight, bias, norm_weight, norm_bias, kind=kind, eps=eps)
    require(gate_up.width % 2 == 0, f"weight {weight.type} must have an even number of rows")
    gate, up = split.emit(gate_up, sizes=(gate_up.width // 2,) * 2)
    return glu(gate, up, activation=activation, limit=limit, shift=shift)


@fused_op(
    traits=[Trait.ROWWISE],
    cases=[
        case(_X, _W, normal(2, 3, 6)),
        case(_X, _W, normal(2, 3, 6), _B, normal(6), kind="rms", eps=1e-2, scale=0.5),
        case(_X, _W, normal(2, 3, 6), None, normal(6), normal(6), kind="layer"),
    ],
)
def linear_residual(
    x: Value,
    weight: Value,
    residual: Value,
    bias: Value | None = None,
    norm_weight: Value | None = None,
    norm_bias: Value | None = None,
    *,
    kind: str = "none",
    eps: float = 1e-6,
    scale: float = 1.0,
) -> Value:
    """residual + scale · norm(x Wᵀ + b): x [..., in], weight [out, in], residual [..., out] → [..., out].

    bias [out] is b. `kind`, `eps`, norm_weight and norm_bias [out] set the norm of the product, as in `norm_linear`.
    """
    y = apply_norm(linear(x, weight, bias), norm_weight, norm_bias, kind, eps)
    return residual + (y if scale == 1 else y * scale)
