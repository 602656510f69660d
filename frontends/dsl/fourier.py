"""Mixing of tokens by the Fourier transform."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value

from .build import module
from .layers import is_causal


@module
class FourierMixing:
    """The real part of the Fourier transform of x along tokens and along features (Lee-Thorp 2021, FNet).

    It has no parameters. Padding is mixed in like any token.
    """

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        if is_causal():
            raise WeftError("the Fourier transform mixes all tokens: it belongs into an Encoder")
        return ops.fourier(x, name="fourier")
