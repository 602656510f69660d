"""Embeddings that are more than a table."""

from __future__ import annotations

from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """A table whose rows are multiplied by `embed_scale`, the name by which engines look for it."""

    def __init__(self, num_embeddings: int, embedding_dim: int, embed_scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.embed_scale = embed_scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale
