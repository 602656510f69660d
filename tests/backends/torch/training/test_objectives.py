"""The loss of the next token, and auxiliary losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from weft.backends.torch.training.batches import WindowBatch
from weft.backends.torch.training.objectives import MaskedTokens, NextToken, split_outputs


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


def test_masked_tokens_have_the_shares_of_bert() -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 1000, (400, 100)))
    ids[:, 0], ids[:, -1] = 2, 3
    objective = MaskedTokens(4, 1000, special=(2, 3))
    hidden, targets = objective.hide(ids)
    chosen = targets >= 0
    assert (chosen.sum(1) == 15).all() and not chosen[:, [0, -1]].any()
    assert torch.equal(targets[chosen], ids[chosen]) and torch.equal(hidden[~chosen], ids[~chosen])
    assert ((hidden[chosen] == 4).sum(), (hidden[chosen] == ids[chosen]).sum()) == pytest.approx((4800, 400), abs=15)
    assert chosen[:, 1:-1].sum(0).max() < 100  # no place is preferred: 61 of 400 on average
    parts = [objective.hide(part) for part in ids.split(7)]
    assert torch.equal(torch.cat([part for part, _ in parts]), hidden)  # whatever the batch


def test_loss_of_masked_tokens_counts_only_those() -> None:
    class Uniform(nn.Module):
        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = torch.full((*ids.shape, 10), -50.0).scatter(2, ids[..., None], 50.0)  # sure that all stay
            return ids[..., None].float(), logits, torch.tensor(0.5)

    ids = torch.arange(5, 9).repeat(3, 25)
    objective = MaskedTokens(4, 10, index=1)
    losses = objective(Uniform(), WindowBatch(ids, torch.arange(3)))
    hidden, targets = objective.hide(ids)
    wrong = (hidden != targets)[targets >= 0].float().mean()
    assert float(losses["loss"]) == pytest.approx(100 * float(wrong)) and float(losses["aux_loss"]) == 0.5
    assert float(MaskedTokens(4, 10, (5, 6, 7, 8), 1)(Uniform(), WindowBatch(ids, torch.arange(3)))["loss"]) == 0
