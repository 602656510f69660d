"""Projections per head, and the two forms of multi-head latent attention."""

from __future__ import annotations

import pytest
import torch

from .oracles import Oracles, X, Y, assert_equals_torch

ORACLES: Oracles = {
    "head_linear": [
        ((X, Y.reshape(12, 2)[:9]), {"heads": 3}, lambda x, w: x @ torch.block_diag(*w.chunk(3)).T),
        ((X, Y.reshape(12, 2)[:6]), {"heads": 3, "inverse": True}, lambda x, w: x @ torch.block_diag(*w.chunk(3))),
    ],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)
