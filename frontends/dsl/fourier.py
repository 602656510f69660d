"""Mixing of tokens by the Fourier transform."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.recipes.frequencies import Fourier
from weft.ir.types import dtypes

from .build import computed, module
from .layers import is_causal


@module
class FourierMixing:
    """The real part of the Fourier transform of x along tokens and along features (Lee-Thorp 2021, FNet).

    It has no parameters. Re(F_seq x F_dim) = C_seq (x C_dim) − S_seq (x S_dim), C and S the cosines and sines of
    2π·i·j/n. Padding is mixed in like any token.
    """

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        if is_causal():
            raise WeftError("the Fourier transform mixes all tokens: it belongs into an Encoder")
        dim = x.width
        cosines, sines = (computed(f"fourier.{fn}", (dim, dim), Fourier(dim, fn)) for fn in ("cos", "sin"))
        at = ops.iota(x, axis=1)
        total = ops.affine(ops.max(at, axes=(0,), keepdims=True), plus=1)
        count = ops.cast(total, to=dtypes.f32)
        products = ops.mul(ops.unsqueeze(at, axes=(1,)), ops.unsqueeze(at, axes=(0,)))
        # Whole turns are taken off in whole numbers: f32 would lose the fractions of many.
        turns = ops.cast(ops.floor(ops.div(ops.cast(products, to=dtypes.f32), count)), to=dtypes.i64)
        rest = ops.cast(ops.sub(products, ops.mul(turns, total)), to=dtypes.f32)
        angles = ops.affine(ops.div(rest, count), by=2 * math.pi)
        real = ops.matmul(ops.cos(angles), ops.matmul(x, cosines))
        return ops.sub(real, ops.matmul(ops.sin(angles), ops.matmul(x, sines)), name="fourier")
