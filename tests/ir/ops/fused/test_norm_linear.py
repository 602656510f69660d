"""Linear layers fused with norms, activations and residuals."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from ..oracles import BIAS, G, H, Oracles, W, X, assert_equals_torch

ORACLES: Oracles = {
    "norm_linear": [
        ((X, W, BIAS), {"eps": 1e-3}, lambda x, w, b: F.linear(F.rms_norm(x, (6,), None, 1e-3), w, b)),
        (
            (X, W - W.mean(1, keepdims=True), BIAS),
            {"kind": "layer", "eps": 1e-3},
            lambda x, w, b: F.linear(F.layer_norm(x, (6,), eps=1e-3), w, b),
        ),
        (
            (X, W, None, G, H),
            {"kind": "layer", "eps": 1e-3, "activation": "gelu"},
            lambda x, w, _, g, h: F.gelu(F.linear(F.layer_norm(x, (6,), g, h, 1e-3), w)),
        ),
    ],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)
