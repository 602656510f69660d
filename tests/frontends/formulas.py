"""Helpers for tests of the declarative language: run a module on random numbers, and formulas to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.frontends.dsl import trace
from weft.ir import TensorType, interpret, parse, verify
from weft.ir.types import dtypes, sizes

Array = np.ndarray[Any, Any]
X = TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), 16))
TOLERANCE = 64 * float(np.finfo(np.float64).eps)


def run(model: Any, rng: np.random.Generator, length: int = 6, **more: Array) -> tuple[Array, Array, dict[str, Array]]:
    """x [2, length, 16], model(x) and the randomized parameters; graph inputs besides x come from `more`."""
    x, found, params = outputs(model, rng, length, **more)
    return x, found["output"], params


def outputs(
    model: Any, rng: np.random.Generator, length: int = 6, **more: Array
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """`run` with all outputs. Parameters that follow from a formula keep their values."""
    graph = trace(model, {"x": X})
    verify(graph, recipes=True)
    assert parse(str(graph)) == graph
    params = {n: rng.standard_normal(p.shape) for n, p in graph.params.items() if not p.recipe.constant}
    x = rng.standard_normal((2, length, 16))
    inputs = {"x": x, "position_ids": np.broadcast_to(np.arange(length), (2, length)), **more}
    return x, interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs}, params=params), params


def close(ours: Array, theirs: Array, factor: float = 1) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=factor * TOLERANCE * max(1, np.abs(theirs).max()))


def softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def rms(x: Array, weight: Array | float = 1.0, eps: float = 1e-6) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)


def turned(x: Array, theta: float = 10_000.0, interleaved: bool = False) -> Array:
    """x [..., seq, d] rotated by its position, pair by pair, as complex numbers."""
    seq, d = x.shape[-2:]
    frequencies = (theta ** -(np.arange(0, d, 2) / d)).astype(np.float32)  # as they are stored
    angles = np.outer(np.arange(seq), frequencies.astype(np.float64))
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., : d // 2] + 1j * x[..., d // 2 :]
    spun = pairs * np.exp(1j * angles)
    if interleaved:
        return np.stack([spun.real, spun.imag], -1).reshape(x.shape)
    return np.concatenate([spun.real, spun.imag], -1)
