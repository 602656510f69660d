"""Errors of a compiled model: how large they are, and how large rounding makes them."""

from __future__ import annotations

import math

import numpy as np

from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes


def tolerated(dtype: str, layers: int, reduction: int, rounded: bool = False, bits: int | None = None) -> float:
    """The largest relative error that rounding explains: 4 √(2·layers) · (ε(f32) √reduction + ε(dtype)).

    Where activations are `rounded` to 8 bits for products by quantized weights, ε is 1/127: each is off by half of that
    part of the largest of its group.

    Sums of `reduction` products are kept in f32 and err like a random walk; what is stored in `dtype` between them, and
    the weights, are rounded once; each of the two sublayers of a layer adds its error to the residual independently.

    With a cache of codes of `bits` bits a number that lies between two codes falls to either. An error η of numbers up
    to n = 2^{bits−1} − 1 steps moves a share 2ηn of them by a step, 1/n: √(2η/n) in the root mean square. That is an
    error of the numbers of later layers, of which it moves some in turn.
    """
    stored = 1 / 127 if rounded else 0.0 if dtype == "f32" else dtypes.parse(dtype).eps
    error = dtypes.f32.eps * math.sqrt(reduction) + stored
    if bits is not None:
        steps = (1 << bits - 1) - 1
        error += math.sqrt(2 * math.sqrt(2 * error / steps) / steps)
    return 4 * math.sqrt(2 * max(layers, 1)) * error


def relative_error(got: Array, want: Array) -> float:
    """The largest difference over the largest number of `want`."""
    return float(np.abs(got - want).max() / max(np.abs(want).max(), np.finfo(np.float64).tiny))


def divergences(want: Array, got: Array) -> Array:
    """KL divergence of softmax(got) from softmax(want), per row, in nats."""
    p, q = log_softmax(want), log_softmax(got)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def log_softmax(x: Array) -> Array:
    """In float64, along the last axis."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))
