"""Reductions, softmax and top-k against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import ops

from .oracles import N, Oracles, X, assert_equals_torch

ORACLES: Oracles = {
    "softmax": [((X,), {"axis": -1}, lambda x: F.softmax(x, -1)), ((X * 400,), {"axis": 1}, lambda x: F.softmax(x, 1))],
    "sum": [((X,), {"axes": (0, 2), "keepdims": False}, lambda x: x.sum((0, 2)))],
    "mean": [((X,), {"axes": (-1,), "keepdims": True}, lambda x: x.mean(-1, keepdim=True))],
    "max": [((X,), {"axes": (1,), "keepdims": False}, lambda x: x.amax(1))],
    "min": [((X,), {"axes": (0, 1), "keepdims": True}, lambda x: x.amin((0, 1), keepdim=True))],
    "prod": [((X,), {"axes": (1,), "keepdims": False}, lambda x: x.prod(1))],
    "cumsum": [
        ((X,), {"axis": 1, "exclusive": False}, lambda x: x.cumsum(1)),
        ((N,), {"axis": -1, "exclusive": True}, lambda i: F.pad(i, (1, 0)).cumsum(-1)[:, :-1]),
    ],
    "top_k": [((X,), {"k": 3}, lambda x: torch.topk(x, 3))],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)


def test_softmax_of_minus_infinities_is_zero() -> None:
    x = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    np.testing.assert_array_equal(ops.softmax.reference(x), [[0, 0], [1, 0]])


def test_top_k_breaks_ties_by_the_lowest_index() -> None:
    values, indices = ops.top_k.reference(np.array([1.0, 3.0, 3.0, 0.0, 3.0]), k=2)
    assert (values.tolist(), indices.tolist()) == ([3, 3], [1, 2])
