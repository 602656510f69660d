"""An op."""

import numpy as np

from weft.ir.op import Array, OpCall, Trait, Value, case, normal, op
from weft.ir.ops import affine, maximum, minimum


@op(traits=[Trait.ELEMENTWISE], cases=[case(normal(2, 7))])
def hard_sigmoid(x: Array) -> Array:
    """x / 6 + ½, cut off below 0 and above 1 (Courbariaux 2015)."""
    return np.clip(x / 6 + 0.5, 0, 1)


@hard_sigmoid.body
def _(n: OpCall) -> Value:
    zero = affine(n.x, by=0.0)
    return minimum(maximum(affine(n.x, by=1 / 6, plus=0.5), zero), affine(zero, by=0.0, plus=1.0))
