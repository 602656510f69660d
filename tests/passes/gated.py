"""Gated units: a product of two projections, with each activation."""

from __future__ import annotations

from collections.abc import Callable

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.ops.activation import ACTIVATIONS, activate
from weft.ir.types import dtypes

from .models import BATCH, SEQ, weight

HIDDEN = TensorType(dtypes.f32, (BATCH, SEQ, 6))


Gate = Callable[[Value, Value], Value]


def unit(gate: Gate, packed: bool = False, same: bool = True) -> Graph:
    """Two projections, of one value if `same`, and what `gate` makes of them."""
    g = Graph("unit")
    x, z = g.add_input("x", HIDDEN), g.add_input("z", HIDDEN)
    if packed:
        a, b = ops.split.emit(ops.linear(x, weight(g, "both", 18, 6), weight(g, "bias", 18)), sizes=(9, 9))
    else:
        a, b = ops.linear(x, weight(g, "gate", 9, 6)), ops.linear(x if same else z, weight(g, "up", 9, 6))
    y = ops.linear(gate(a, b), weight(g, "down", 6, 9))
    g.add_output("y", y if same else ops.add(y, ops.mul(z, y)))
    return g


def clamped(a: Value, b: Value) -> Value:
    """The gated unit of gpt-oss."""
    a, b = ops.clip(a, high=0.7), ops.clip(b, low=-0.7, high=0.7)
    return ops.mul(ops.affine(b, plus=1.0), ops.mul(a, ops.sigmoid(ops.affine(a, by=1.702))))


UNITS: dict[str, Gate] = {
    **{name: lambda a, b, name=name: ops.mul(activate(a, name), b) for name in ACTIVATIONS},
    "identity": ops.mul,
    "swish(1.3)": lambda a, b: ops.mul(b, ops.swish(a, beta=1.3)),
    "silu, spelled out": lambda a, b: ops.mul(ops.mul(ops.sigmoid(a), a), b),
    "relu2, spelled out": lambda a, b: ops.mul(b, ops.square(ops.relu(a))),
    "swish(1.702)": clamped,
}
