"""Mixers of hybrid models beside state spaces: short convolutions, and attention with a recurrence at its side."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value

from .build import Layer, fill, module, param, uniform
from .checks import need_modules, need_whole
from .layers import linear


@module
class ShortConv:
    """A causal convolution over `conv` tokens between two gates: (C ⊙ conv(B ⊙ x)) W_out (LFM2, Liquid AI 2025).

    B, C and x come from ``in.weight`` [3·dim, dim], in this order. Further parameters: ``conv.weight`` [dim, conv],
    ``out.weight`` [dim, dim]; `bias` adds ``in.bias``, ``conv.bias`` and ``out.bias``.
    """

    conv: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        need_whole(self, "conv", least=2)

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        dim = x.width
        parts = ops.split.emit(linear(x, 3 * dim, "in", self.bias), sizes=(dim, dim, dim), name=("b", "c", "u"))
        before, after, u = parts
        y = convolved(ops.mul(before, u, name="gated"), self.conv, self.bias)
        return linear(ops.mul(after, y, name="mixed"), dim, "out", self.bias)


@module
class ParallelHybrid:
    """attention(x) + ssm(x): attention beside a recurrence in one layer (Falcon-H1, 2025; Hymba, Dong 2024)."""

    attention: Layer
    ssm: Layer

    def __post_init__(self) -> None:
        need_modules(self, "attention", "ssm")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        ssm, attention = self.ssm(x), self.attention(x)
        if ssm.type != attention.type:
            raise WeftError(f"ssm makes {ssm.type} where attention makes {attention.type}; both must be as wide as x")
        return ops.add(ssm, attention, name="mixed")


def convolved(u: Value, width: int, with_bias: bool, activation: str = "identity") -> Value:
    """`activation` of the causal convolution with ``conv.weight`` [channels, width]."""
    bias = param("conv.bias", (u.width,), fill(0.0)) if with_bias else None
    weight = param("conv.weight", (u.width, width), uniform(width**-0.5))
    return ops.causal_conv(u, weight, bias, activation=activation, name="conv")
