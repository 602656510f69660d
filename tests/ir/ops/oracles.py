"""Operands that tests of references share, and the comparison of references with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from weft.ir.op import OPS

_RNG = np.random.default_rng(11)
X = _RNG.standard_normal((3, 4, 6)) * 2
Y = _RNG.standard_normal((4, 6))
POSITIVE = np.abs(X) + 0.1
N, J = _RNG.integers(-9, 9, (3, 5)), _RNG.integers(1, 5, (3, 5))
W, BIAS = _RNG.standard_normal((5, 6)), _RNG.standard_normal(5)
G, H = _RNG.standard_normal(6), _RNG.standard_normal(6)
BITS = X > 0

# Calls of ops by name: the operands, the attributes, and the function of PyTorch that computes the same.
Oracles = dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]]]


def to_torch(x: Any) -> Any:
    """Convert an array to a tensor; None stays None."""
    return None if x is None else torch.from_numpy(np.asarray(x))


def assert_equals_torch(name: str, oracles: Oracles) -> None:
    """Check that the reference of the op `name` has the results and shapes of its functions of PyTorch, in float64."""
    for operands, attrs, oracle in oracles[name]:
        wanted = oracle(*map(to_torch, operands))
        results = OPS[name].run_reference(operands, attrs)
        for result, w in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            assert result.shape == tuple(w.shape)
            np.testing.assert_allclose(result, w.numpy(), rtol=1e-12, atol=1e-14)
