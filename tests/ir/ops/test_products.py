"""Linear layers, matrix products and embeddings against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .oracles import BIAS, J, Oracles, W, X, Y, assert_equals_torch

ORACLES: Oracles = {
    "linear": [((X, W), {}, F.linear), ((X, W, BIAS), {}, F.linear)],
    "matmul": [((X, Y.T), {}, torch.matmul), ((X[:, None], X.transpose(0, 2, 1)), {}, torch.matmul)],
    "embedding": [((J, W), {}, F.embedding)],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)
