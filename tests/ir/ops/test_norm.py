"""Norms against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import ops

from .oracles import G, H, Oracles, X, assert_equals_torch, to_torch

ORACLES: Oracles = {
    "rms_norm": [
        ((X, G), {"eps": 1e-3}, lambda x, w: F.rms_norm(x, (6,), w, 1e-3)),
        ((X,), {"eps": 1e-6}, lambda x: F.rms_norm(x, (6,), None, 1e-6)),
    ],
    "layer_norm": [
        ((X, G, H), {"eps": 1e-3}, lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-3)),
        ((X,), {"eps": 1e-5}, lambda x: F.layer_norm(x, (6,))),
    ],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)


def test_layer_norm_after_relu_feed_forward_equals_torch_encoder_layer() -> None:
    """ReLU FFN with biases and post-norm: the second half of torch.nn.TransformerEncoderLayer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True, dtype=torch.float64)
    w1, b1, w2, b2 = (p.detach().numpy() for p in (*layer.linear1.parameters(), *layer.linear2.parameters()))
    hidden = ops.relu.reference(ops.linear.reference(X, w1, b1))
    residual = X + ops.linear.reference(hidden, w2, b2)
    norm = [p.detach().numpy() for p in layer.norm2.parameters()]
    found = ops.layer_norm.reference(residual, *norm, eps=layer.norm2.eps)
    wanted = layer.norm2(to_torch(X) + layer._ff_block(to_torch(X))).detach()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_add_norm_returns_the_norm_and_the_sum(kind: str) -> None:
    other = X[::-1].copy()
    normed, total = ops.add_norm.reference(X, other, G, H if kind == "layer" else None, kind=kind, eps=1e-4)
    np.testing.assert_array_equal(total, X + other)
    x, weight, bias = map(to_torch, (total, G, H))
    wanted = F.rms_norm(x, (6,), weight, 1e-4) if kind == "rms" else F.layer_norm(x, (6,), weight, bias, 1e-4)
    np.testing.assert_allclose(normed, wanted, rtol=1e-12, atol=1e-13)
