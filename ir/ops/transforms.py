"""The discrete Fourier transform of tokens and features."""

from __future__ import annotations

import math

import numpy as np

from ..op import Array, OpCall, Size, Value, case, normal, op, want
from ..types import sizes
from .elementwise import affine, cast, cos, div, mod, mul, sin, sub
from .products import matmul
from .reduce import max as greatest
from .tensor import iota, unsqueeze


@op(cases=[case(normal(2, 5, 6)), case(normal(1, 1, 4)), case(normal(2, 12, 3)), case(normal(4, 7))])
def fourier(x: Array) -> Array:
    """The real part of the discrete Fourier transform of x [..., n, m] along its last two axes (Lee-Thorp 2021, FNet).

    Re(F_n x F_m) = C_n (x C_m) − S_n (x S_m), with C and S the cosines and sines of 2π·i·j/n.
    """
    return np.asarray(np.fft.fft2(x).real)


@fourier.infer
def _(n: OpCall) -> None:
    want(n.x.rank >= 2, f"x {n.x} must have two axes to transform")


@fourier.cost
def _(n: OpCall) -> Size:
    count, width = n.x.shape[-2:]
    flops: Size = sizes.product(n.x.shape) * (count + width) * 4
    return flops


@fourier.body
def _(n: OpCall) -> Value:
    (c_rows, s_rows), (c_columns, s_columns) = (_parts(n.x, axis) for axis in (n.x.type.rank - 2, n.x.type.rank - 1))
    real = matmul(c_rows, matmul(n.x, c_columns))
    return sub(real, matmul(s_rows, matmul(n.x, s_columns)))


def _parts(x: Value, axis: int) -> tuple[Value, Value]:
    """The cosines and sines [n, n] of an axis of x; products of indices are reduced as whole numbers, which f32 is not
    precise enough for."""
    at = iota(x, axis=axis)
    size = affine(greatest(at, axes=(0,), keepdims=True), plus=1)
    turns = mod(mul(unsqueeze(at, axes=(1,)), unsqueeze(at, axes=(0,))), size)
    angles = affine(div(cast(turns, to=x.type.dtype), cast(size, to=x.type.dtype)), by=2 * math.pi)
    return cos(angles), sin(angles)
