"""Elementwise ops against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import ops

from .oracles import BITS, POSITIVE, J, N, Oracles, X, Y, assert_equals_torch

ORACLES: Oracles = {
    "add": [((X, Y), {}, torch.add), ((N, J), {}, torch.add)],
    "sub": [((X, Y), {}, torch.sub)],
    "mul": [((X, Y), {}, torch.mul)],
    "div": [((X, np.abs(Y) + 1), {}, torch.div)],
    "pow": [((POSITIVE, Y), {}, torch.pow)],
    "minimum": [((X, Y), {}, torch.minimum)],
    "maximum": [((X, Y), {}, torch.maximum)],
    "floordiv": [((N, J), {}, lambda i, j: torch.div(i, j, rounding_mode="floor"))],
    "mod": [((N, J), {}, torch.remainder)],
    "less": [((X, Y), {}, torch.lt)],
    "less_equal": [((N, J), {}, torch.le)],
    "equal": [((N, J), {}, torch.eq)],
    "logical_and": [((BITS, BITS[:1]), {}, torch.logical_and)],
    "logical_or": [((BITS, BITS[:1]), {}, torch.logical_or)],
    "logical_not": [((BITS,), {}, torch.logical_not)],
    **{name: [((X,), {}, getattr(torch, name))] for name in ("neg", "abs", "square", "exp", "sin", "cos", "tanh")},
    **{name: [((POSITIVE,), {}, getattr(torch, name))] for name in ("log", "sqrt", "rsqrt", "reciprocal")},
    **{name: [((X,), {}, getattr(torch, name))] for name in ("floor", "ceil", "round", "erf", "sigmoid", "relu")},
    "softplus": [((X,), {}, F.softplus), ((np.array([-800.0, 800.0]),), {}, F.softplus)],
    "dropout": [((X,), {"share": 0.3}, lambda x: F.dropout(x, 0.3, training=False))],
    "cast": [((X,), {"to": ops.cast.attrs["to"].default}, lambda x: x)],
    "clip": [
        ((X,), {"low": -0.3, "high": None}, lambda x: x.clip(-0.3)),
        ((N,), {"low": -2.0, "high": 3.0}, lambda i: i.clip(-2, 3)),
    ],
    "affine": [
        ((X,), {"by": 0.3, "plus": -2.0}, lambda x: x * 0.3 - 2),
        ((N,), {"by": 3.0, "plus": 1.0}, lambda i: 3 * i + 1),
    ],
    "where": [((BITS, X, Y), {}, torch.where)],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)
