"""Activations and gated units (Shazeer 2020)."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ..op import Array, Op, OpCall, Trait, Value, case, normal, op, require
from .declaration import composed_op
from .elementwise import _erf, _sigmoid, affine, clip, erf, exp, maximum, minimum, sigmoid, tanh

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
def _(n: OpCall) -> None:
    is_supported = n.approximate in ("none", "tanh", "sigmoid")
    require(is_supported, f"approximate={n.approximate!r} must be none, tanh or sigmoid")


@gelu.body
def _(n: OpCall) -> Value:
    x: Value = n.x
    if n.approximate == "sigmoid":
        return x * sigmoid(x * 1.702)
    if n.approximate == "tanh":
        inner = x + x * (x * x) * 0.044715
        return x * (tanh(inner * math.sqrt(2 / math.pi)) + 1.0) * 0.5
    return x * (erf(x * (1 / math.sqrt(2))) + 1.0) * 0.5


@op(traits=[Trait.ELEMENTWISE], cases=[*_ANY, case(normal(2, 9), beta=1.7)])
def swish(x: Array, *, beta: float = 1.0) -> Array:
    """x·σ(βx) (Ramachandran 2017); SiLU for β = 1."""
    return x * _sigmoid(beta * x)


swish.body(lambda n: n.x * sigmoid(n.x if n.beta == 1 else n.x * n.beta))


@op(traits=[Trait.ELEMENTWISE], cases=[*_ANY, case(normal(2, 9), alpha=0.3)])
def elu(x: Array, *, alpha: float = 1.0) -> Array:
    """x for x > 0, else α(e^x − 1) (Clevert 2015)."""
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@elu.body
def _(n: OpCall) -> Value:
    zero = affine(n.x, by=0.0)
    return maximum(n.x, zero) + affine(exp(minimum(n.x, zero)), by=n.alpha, plus=-n.alpha)


@op(traits=[Trait.ELEMENTWISE], cases=_ANY)
def relu2(x: Array) -> Array:
    """max(x, 0)² (So 2021, Primer)."""
    return np.square(np.maximum(x, 0))


@relu2.body
def _(n: OpCall) -> Value:
    r = relu(n.x)
    return r * r


# Activations by the names that configs use: op and attributes.
ACTIVATIONS: dict[str, tuple[Op, dict[str, Any]]] = {
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
    """Emit the activation called `name`: a key of ACTIVATIONS, ``identity``, or ``swish(β)`` with a number β."""
    if name == "identity":
        return x
    fn, attrs = _find_activation(name)
    return fn(x, **attrs)


def _find_activation(name: str) -> tuple[Op, dict[str, Any]]:
    check_activation(name)
    return (swish, {"beta": float(name[6:-1])}) if name.startswith("swish(") else ACTIVATIONS[name]


def check_activation(name: str) -> None:
    """Check that `activate` knows the activation `name`; raise WeftError if not."""
    is_activation = name in ACTIVATIONS or name == "identity" or _SWISH.fullmatch(name) is not None
    require(is_activation, f"unknown activation {name!r}; known are identity, swish(β), {', '.join(ACTIVATIONS)}")


def apply_activation(x: Array, name: str) -> Array:
    """Return x with the activation called `name` applied, in NumPy: the reference of `activate`."""
    if name == "identity":
        return x
    fn, attrs = _find_activation(name)
    return np.asarray(fn.reference(x, **attrs))


@composed_op(
    traits=[Trait.ELEMENTWISE],
    cases=[case(normal(2, 3, 5), normal(2, 3, 5), activation=a) for a in ("identity", "swish(0.7)", *ACTIVATIONS)]
    + [case(normal(2, 9, scale=3.0), normal(2, 9, scale=3.0), limit=1.5)]
    + [case(normal(2, 9), normal(2, 9), activation="swish(1.702)", limit=1.1, shift=1.0)],
)
def glu(gate: Value, up: Value, *, activation: str = "silu", limit: float | None = None, shift: float = 0.0) -> Value:
    """act(gate) ⊙ (up + shift): GLU (sigmoid), bilinear (identity), ReGLU, GEGLU, SwiGLU (silu) (Shazeer 2020).

    With `limit`, gate is first capped at limit and up clipped to ±limit (gpt-oss, with shift 1 and swish(1.702)).
    """
    if limit is not None:
        gate, up = clip(gate, high=limit), clip(up, low=-limit, high=limit)
    return activate(gate, activation) * (up + shift if shift else up)


@glu.infer
def _(n: OpCall) -> None:
    require(n.gate == n.up, f"gate {n.gate} and up {n.up} differ")
    check_activation(n.activation)
