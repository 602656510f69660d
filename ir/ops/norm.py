"""Normalizations over the last axis, alone and fused with a residual addition."""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, TensorType, Trait, Value, case, normal, op, require
from .declaration import composed_op
from .elementwise import rsqrt, square
from .reduce import mean


def _check_widths(x: TensorType, *vectors: TensorType | None) -> None:
    for v in vectors:
        require(v is None or v == x.with_shape(x.shape[-1]), f"{v} does not fit the last axis of {x}")


@op(
    traits=[Trait.ROWWISE, Trait.NORM], cases=[case(normal(2, 3, 8), normal(8), eps=1e-2), case(normal(4, 6), eps=1e-5)]
)
def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-6) -> Array:
    """x / √(mean(x²) + ε) ⊙ weight over the last axis (Zhang & Sennrich 2019); weight [width] or absent."""
    y: Array = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps)
    return y if weight is None else y * weight


rms_norm.infer(lambda n: _check_widths(n.x, n.weight))
rms_norm.cost(lambda n: n.x.elements * (3 if n.weight is None else 4))


@rms_norm.body
def _(n: OpCall) -> Value:
    y: Value = n.x * rsqrt(mean(square(n.x), axes=(-1,), keepdims=True) + n.eps)
    return y if n.weight is None else y * n.weight


@op(
    traits=[Trait.ROWWISE, Trait.NORM],
    cases=[case(normal(2, 3, 8), normal(8), normal(8), eps=1e-2), case(normal(4, 6), normal(6)), case(normal(4, 6))],
)
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5) -> Array:
    """(x − μ)/√(σ² + ε) ⊙ weight + bias over the last axis (Ba 2016); weight and bias [width] or absent."""
    centred = x - x.mean(-1, keepdims=True)
    y: Array = centred / np.sqrt(np.mean(np.square(centred), -1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


layer_norm.infer(lambda n: _check_widths(n.x, n.weight, n.bias))
layer_norm.cost(lambda n: n.x.elements * (5 + (n.weight is not None) + (n.bias is not None)))


@layer_norm.body
def _(n: OpCall) -> Value:
    y = rms_norm(n.x - mean(n.x, axes=(-1,), keepdims=True), n.weight, eps=n.eps)
    return y if n.bias is None else y + n.bias


@composed_op(
    outputs="normed sum",
    traits=[Trait.ROWWISE, Trait.NORM],
    cases=[
        case(normal(2, 3, 8), normal(2, 3, 8), normal(8), eps=1e-2),
        case(normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(8), kind="layer", eps=1e-5),
    ],
)
def add_norm(
    x: Value, y: Value, weight: Value | None = None, bias: Value | None = None, *, kind: str = "rms", eps: float = 1e-6
) -> tuple[Value, Value]:
    """norm(x + y) and x + y (a residual addition); the norm of `kind` is `rms_norm` (rms) or `layer_norm` (layer)."""
    total = x + y
    if kind == "rms":
        return rms_norm(total, weight, eps=eps), total
    return layer_norm(total, weight, bias, eps=eps), total


@add_norm.infer
def _(n: OpCall) -> tuple[TensorType, TensorType]:
    require(n.x == n.y, f"operands {n.x} and {n.y} differ")
    require(n.kind in ("rms", "layer"), f"kind={n.kind!r} must be rms or layer")
    require(n.kind == "layer" or n.bias is None, "bias needs kind=layer, as an RMS norm has none")
    _check_widths(n.x, n.weight, n.bias)
    return n.x, n.x


add_norm.cost(lambda n: n.x.elements * ((4 if n.kind == "rms" else 6) + (n.weight is not None) + (n.bias is not None)))
