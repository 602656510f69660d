"""Linear maps, activations, norms and causal convolutions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
Formula = Callable[..., Array]  # of one sequence x [length, dim], the weights by name, and further inputs by name


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "relu2": lambda x: relu(x) ** 2,
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "silu": silu,
    "swish(0.5)": lambda x: x * sigmoid(0.5 * x),
    "swish(1.702)": lambda x: x * sigmoid(1.702 * x),
    "elu": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "identity": lambda x: x,
}


def softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def rms_norm(x: Array, weight: Array | float = 1.0, eps: float = 1e-6) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)


def layer_norm(x: Array, weight: Array | float = 1.0, bias: Array | float = 0.0, eps: float = 1e-6) -> Array:
    return rms_norm(x - x.mean(-1, keepdims=True), weight, eps) + bias


def linear(x: Array, w: Weights, name: str, bias: bool = False) -> Array:
    return np.asarray(x @ w[f"{name}.weight"].T + (w[f"{name}.bias"] if bias else 0.0))


def in_scope(w: Weights, scope: str) -> Weights:
    """Return the weights of `scope`, by their names in it."""
    return {name.removeprefix(scope): array for name, array in w.items() if name.startswith(scope)}


def head_slices(heads: int, size: int) -> list[slice]:
    """Return the columns of each of `heads` heads of `size` features."""
    return [slice(h * size, (h + 1) * size) for h in range(heads)]


def causal_conv(u: Array, w: Weights, bias: bool = False) -> Array:
    """Return Σ_i w_i u_{t − taps + 1 + i} for each channel of u [length, channels], with zeros before the first."""
    taps = w["conv.weight"].shape[1]
    padded = np.concatenate([np.zeros((taps - 1, u.shape[1])), u])
    y = sum(padded[i : i + len(u)] * w["conv.weight"][:, i] for i in range(taps))
    return np.asarray(y + (w["conv.bias"] if bias else 0.0))
