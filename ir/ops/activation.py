"""Activations and gated units (Shazeer 2020)."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ..op import Array, TensorType, Trait, Value, case, normal, op, want
from .elementwise import _erf, _sigmoid, add, affine, clip, erf, exp, maximum, minimum, mul, sigmoid, tanh

_ANY = [case(normal(2, 3, 5)), case(normal(7, scale=4.0))]


@op(traits=[Trait.ELEMENTWISE], cases=_ANY)
def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0)


@op(traits=[Trait.ELEMENTWISE], cases=[*_ANY, *(case(normal(2, 9), approximate=a) for a in ("tanh", "sigmoid"))])
def gelu(x: Array, *, approximate: str = "none") -> Array:
    """x·Φ(x) (Hendrycks & Gimpel 2016); `approximate`: none (erf), tanh, or sigmoid (x·σ(1.702x), "quick")."""
    if approximate == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    if approximate == "sigmoid":
        return x * _sigmoid(1.702 * x)
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


@gelu.infer
def _(x: TensorType, *, approximate: str) -> TensorType:
    want(approximate in ("none", "tanh", "sigmoid"), f"approximate={approximate!r} is not none, tanh or sigmoid")
    return x


@gelu.body
def _(x: Value, *, approximate: str) -> Value:
    if approximate == "sigmoid":
        return mul(x, sigmoid(affine(x, by=1.702)))
    if approximate == "tanh":
        inner = add(x, affine(mul(x, mul(x, x)), by=0.044715))
        return affine(mul(x, affine(tanh(affine(inner, by=math.sqrt(2 / math.pi))), plus=1.0)), by=0.5)
    return affine(mul(x, affine(erf(affine(x, by=1 / math.sqrt(2))), plus=1.0)), by=0.5)


@op(traits=[Trait.ELEMENTWISE], cases=[*_ANY, case(normal(2, 9), beta=1.7)])
def swish(x: Array, *, beta: float = 1.0) -> Array:
    """x·σ(βx) (Ramachandran 2017); SiLU for β = 1."""
    return x * _sigmoid(beta * x)


@swish.body
def _(x: Value, *, beta: float) -> Value:
    return mul(x, sigmoid(x if beta == 1 else affine(x, by=beta)))


@op(traits=[Trait.ELEMENTWISE], cases=[*_ANY, case(normal(2, 9), alpha=0.3)])
def elu(x: Array, *, alpha: float = 1.0) -> Array:
    """x for x > 0, else α(e^x − 1) (Clevert 2015)."""
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@elu.body
def _(x: Value, *, alpha: float) -> Value:
    zero = affine(x, by=0.0)
    return add(maximum(x, zero), affine(exp(minimum(x, zero)), by=alpha, plus=-alpha))


@op(traits=[Trait.ELEMENTWISE], cases=_ANY)
def relu2(x: Array) -> Array:
    """max(x, 0)² (So 2021, Primer)."""
    return np.square(np.maximum(x, 0))


@relu2.body
def _(x: Value) -> Value:
    r = relu(x)
    return mul(r, r)


for _unary in (relu, relu2):

    @_unary.infer
    def _(x: TensorType) -> TensorType:
        return x


@swish.infer
def _(x: TensorType, *, beta: float) -> TensorType:
    return x


@elu.infer
def _(x: TensorType, *, alpha: float) -> TensorType:
    return x


# The gate functions by the names that configs use: op and attributes; None is the bilinear unit.
ACTIVATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "relu": (relu, {}),
    "relu2": (relu2, {}),
    "gelu": (gelu, {}),
    "gelu_tanh": (gelu, {"approximate": "tanh"}),
    "gelu_quick": (gelu, {"approximate": "sigmoid"}),
    "silu": (swish, {}),
    "sigmoid": (sigmoid, {}),
    "tanh": (tanh, {}),
    "elu": (elu, {}),
}


_SWISH = re.compile(r"swish\([+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\)")


def activate(x: Value, name: str) -> Value:
    """Emit the activation called `name`, a key of ACTIVATIONS, ``identity``, or ``swish(beta)``."""
    if name == "identity":
        return x
    if name.startswith("swish("):
        return swish(x, beta=float(name[6:-1]))
    known_activation(name)
    fn, attrs = ACTIVATIONS[name]
    result: Value = fn(x, **attrs)
    return result


def known_activation(name: str) -> None:
    """Check that `activate` knows `name`.

    Raises:
        WeftError: if it does not.
    """
    known = name in ACTIVATIONS or name == "identity" or _SWISH.fullmatch(name) is not None
    want(known, f"unknown activation {name!r}; known are identity, swish(β), {', '.join(ACTIVATIONS)}")


def apply_activation(x: Array, name: str) -> Array:
    """The reference twin of `activate`."""
    if name == "identity":
        return x
    if name.startswith("swish("):
        return x * _sigmoid(float(name[6:-1]) * x)
    fn, attrs = ACTIVATIONS[name]
    result: Array = fn.reference(x, **attrs)
    return result


@op(
    traits=[Trait.ELEMENTWISE],
    cases=[case(normal(2, 3, 5), normal(2, 3, 5), activation=a) for a in ("identity", "swish(0.7)", *ACTIVATIONS)]
    + [case(normal(2, 9, scale=3.0), normal(2, 9, scale=3.0), limit=1.5)]
    + [case(normal(2, 9), normal(2, 9), activation="swish(1.702)", limit=1.1, shift=1.0)],
)
def glu(gate: Array, up: Array, *, activation: str = "silu", limit: float | None = None, shift: float = 0.0) -> Array:
    """act(gate) ⊙ (up + shift): GLU (sigmoid), bilinear (identity), ReGLU, GEGLU, SwiGLU (silu) (Shazeer 2020).

    With `limit`, gate is first capped at limit and up clipped to ±limit (gpt-oss, with shift 1 and swish(1.702)).
    """
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return apply_activation(gate, activation) * (up + shift)


@glu.infer
def _(gate: TensorType, up: TensorType, *, activation: str, limit: float | None, shift: float) -> TensorType:
    want(gate == up, f"gate {gate} and up {up} differ")
    known_activation(activation)
    return gate


@glu.body
def _(gate: Value, up: Value, *, activation: str, limit: float | None, shift: float) -> Value:
    if limit is not None:
        gate, up = clip(gate, high=limit), clip(up, low=-limit, high=limit)
    return mul(activate(gate, activation), affine(up, plus=shift) if shift else up)
