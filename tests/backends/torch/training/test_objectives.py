"""The loss of the next token, and auxiliary losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.backends.torch.training.batches import WindowBatch
from weft.backends.torch.training.objectives import NextToken, split_outputs


class Fixed(nn.Module):
    """Logits of a table of bigrams, and an auxiliary loss."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table[ids], torch.tensor(0.25)


def test_loss_is_the_mean_negative_log_likelihood_of_each_next_token() -> None:
    table = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    losses = NextToken()(Fixed(table), WindowBatch(torch.tensor([[0, 1, 0]]), torch.tensor([0])))
    assert float(losses["loss"]) == pytest.approx(-float(torch.tensor([0.5, 0.9]).log().mean()))
    assert float(losses["aux_loss"]) == 0.25


def test_a_module_without_auxiliary_losses_has_a_loss_of_zero() -> None:
    logits, auxiliary = split_outputs(torch.ones(2, 3, 4))
    assert logits.shape == (2, 3, 4) and float(auxiliary) == 0
