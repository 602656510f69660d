"""Embeddings whose rows are scaled."""

from __future__ import annotations

import torch

from weft.backends.torch.transformers.lib.embeddings import ScaledEmbedding


def test_rows_are_scaled_and_weights_are_not() -> None:
    table = ScaledEmbedding(5, 3, 4.0)
    ids = torch.tensor([[0, 4]])
    assert torch.equal(table(ids), 4 * table.weight[ids])
    assert list(table.state_dict()) == ["weight"] and table.embed_scale == 4.0
