"""Normalizations over the last axis."""

from __future__ import annotations

import numpy as np

from ..op import Array, Size, TensorType, Trait, Value, case, normal, op, want
from .elementwise import add, affine, mul, rsqrt, square, sub
from .reduce import mean


def _check(x: TensorType, *vectors: TensorType | None) -> TensorType:
    for v in vectors:
        want(v is None or v == x.with_shape(x.shape[-1]), f"{v} does not fit the last axis of {x}")
    return x


@op(traits=[Trait.ROWWISE], cases=[case(normal(2, 3, 8), normal(8), eps=1e-2), case(normal(4, 6), eps=1e-5)])
def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-6) -> Array:
    """x / √(mean(x²) + ε) ⊙ weight (Zhang & Sennrich 2019); weight [width] or absent."""
    y: Array = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps)
    return y if weight is None else y * weight


@rms_norm.infer
def _(x: TensorType, weight: TensorType | None = None, *, eps: float) -> TensorType:
    return _check(x, weight)


@rms_norm.cost
def _(x: TensorType, weight: TensorType | None = None, *, eps: float) -> Size:
    return x.elements * (3 if weight is None else 4)


@rms_norm.body
def _(x: Value, weight: Value | None = None, *, eps: float) -> Value:
    y = mul(x, rsqrt(affine(mean(square(x), axes=(-1,), keepdims=True), plus=eps)))
    return y if weight is None else mul(y, weight)


@op(
    traits=[Trait.ROWWISE],
    cases=[case(normal(2, 3, 8), normal(8), normal(8), eps=1e-2), case(normal(4, 6), normal(6)), case(normal(4, 6))],
)
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5) -> Array:
    """(x − μ)/√(σ² + ε) ⊙ weight + bias (Ba 2016); weight and bias [width] or absent."""
    centred = x - x.mean(-1, keepdims=True)
    y: Array = centred / np.sqrt(np.mean(np.square(centred), -1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@layer_norm.infer
def _(x: TensorType, weight: TensorType | None = None, bias: TensorType | None = None, *, eps: float) -> TensorType:
    return _check(x, weight, bias)


@layer_norm.cost
def _(x: TensorType, weight: TensorType | None = None, bias: TensorType | None = None, *, eps: float) -> Size:
    return x.elements * (5 + (weight is not None) + (bias is not None))


@layer_norm.body
def _(x: Value, weight: Value | None = None, bias: Value | None = None, *, eps: float) -> Value:
    y = rms_norm(sub(x, mean(x, axes=(-1,), keepdims=True)), weight, eps=eps)
    return y if bias is None else add(y, bias)


@op(
    outputs="normed sum",
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 3, 8), normal(2, 3, 8), normal(8), eps=1e-2),
        case(normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(8), kind="layer", eps=1e-5),
    ],
)
def add_norm(
    x: Array, y: Array, weight: Array | None = None, bias: Array | None = None, *, kind: str = "rms", eps: float = 1e-6
) -> tuple[Array, Array]:
    """The residual step: (norm(x + y), x + y), `kind` rms or layer."""
    total = x + y
    if kind == "rms":
        return rms_norm.reference(total, weight, eps=eps), total
    return layer_norm.reference(total, weight, bias, eps=eps), total


@add_norm.infer
def _(
    x: TensorType,
    y: TensorType,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    *,
    kind: str,
    eps: float,
) -> tuple[TensorType, TensorType]:
    want(x == y, f"operands {x} and {y} differ")
    want(kind in ("rms", "layer"), f"kind={kind!r} is not rms or layer")
    want(kind == "layer" or bias is None, "an RMS norm has no bias")
    _check(x, weight, bias)
    return x, x


@add_norm.cost
def _(x: TensorType, *rest: TensorType | None, kind: str, eps: float) -> Size:
    return x.elements * (5 if kind == "rms" else 8)


@add_norm.body
def _(
    x: Value, y: Value, weight: Value | None = None, bias: Value | None = None, *, kind: str, eps: float
) -> tuple[Value, Value]:
    total = add(x, y)
    if kind == "rms":
        return rms_norm(total, weight, eps=eps), total
    return layer_norm(total, weight, bias, eps=eps), total
