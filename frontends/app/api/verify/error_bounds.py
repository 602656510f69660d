"""Errors of a compiled model: how large they are, and how large rounding can make them."""

from __future__ import annotations

import math

import numpy as np

from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes


def compute_tolerance(dtype: str, layers: int, reduction: int, rounded: bool = False, bits: int | None = None) -> float:
    """Return the largest relative error that rounding explains: 4 √(2·layers) · (ε(f32) √reduction + ε(dtype)).

    If activations are `rounded` to 8 bits for products with quantized weights, ε(dtype) is 1/127: an activation is
    off by up to half of 1/127 of its group's maximum. Otherwise ε(dtype) is 0 for f32.

    Sums of `reduction` products are kept in f32 and err like a random walk; values stored in `dtype` between them, and
    the weights, are rounded once; each of the two sublayers of a layer adds its error to the residual independently.

    With a cache of `bits`-bit codes, the largest value is n = 2^{bits−1} − 1 steps. An error η rounds a share 2ηn of
    values to a neighbouring code, 1/n away: an error of √(2η/n) in the root mean square. Later layers cache values with
    that error, so the formula is applied twice. Its result is added to the ε terms.
    """
    stored = 1 / 127 if rounded else 0.0 if dtype == "f32" else dtypes.parse(dtype).eps
    error = dtypes.f32.eps * math.sqrt(reduction) + stored
    if bits is not None:
        steps = (1 << bits - 1) - 1
        error += math.sqrt(2 * math.sqrt(2 * error / steps) / steps)
    return 4 * math.sqrt(2 * max(layers, 1)) * error


def compute_divergences(expected: Array, actual: Array) -> Array:
    """Return KL(softmax(expected) ‖ softmax(actual)) over the last axis, in nats."""
    p, q = compute_log_softmax(expected), compute_log_softmax(actual)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def compute_log_softmax(x: Array) -> Array:
    """Return the logarithm of softmax along the last axis, in float64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))
