"""Ops that move data against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .oracles import J, Oracles, X, Y, assert_equals_torch

ORACLES: Oracles = {
    "reshape": [((X,), {"shape": (12, 6)}, lambda x: x.reshape(12, 6))],
    "transpose": [((X,), {"axes": (2, 0, 1)}, lambda x: x.permute(2, 0, 1))],
    "squeeze": [((X[:, :1],), {"axes": (1,)}, lambda x: x.squeeze(1))],
    "unsqueeze": [((X,), {"axes": (0, 4)}, lambda x: x[None, ..., None])],
    "expand": [((Y[:1],), {"shape": (2, 4, 6)}, lambda y: y.expand(2, 4, 6))],
    "concat": [((X, X[:, :1]), {"axis": -2}, lambda x, y: torch.cat([x, y], 1))],
    "split": [((X,), {"sizes": (1, 2, 3), "axis": -1}, lambda x: x.split([1, 2, 3], -1))],
    "slice": [((X,), {"axis": 2, "start": 1, "stop": 6, "step": 2}, lambda x: x[..., 1:6:2])],
    "gather": [((X, J - 1), {"axis": 1}, lambda x, j: x[:, j]), ((Y, J - 1), {"axis": 0}, lambda y, j: y[j])],
    "gather_rows": [((X, J - 1), {}, lambda x, j: x.gather(1, j[..., None].expand(-1, -1, 6)))],
    "scatter_rows": [
        (
            (X, -X[:, :2], J[:, :2] - 1),
            {"axis": 1},
            lambda x, rows, j: torch.stack([a.index_put((i,), r) for a, r, i in zip(x, rows, j, strict=True)]),
        )
    ],
    "iota": [((X,), {"axis": 1}, lambda x: torch.arange(4))],
    "one_hot": [((J,), {"depth": 7}, lambda j: F.one_hot(j, 7).double())],
    "pad": [((X,), {"axis": 1, "before": 1, "after": 2, "value": 0.5}, lambda x: F.pad(x, (0, 0, 1, 2), value=0.5))],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)
