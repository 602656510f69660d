"""Weights of several linears as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pack(*linears: nn.Linear) -> Tensor:
    """The weights of `linears`, one under the other; the modules keep views of it, so nothing is held twice."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    for linear, own in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = own
    return weight


def pack_bias(*linears: nn.Linear) -> Tensor:
    """The biases of `linears`, one behind the other."""
    return torch.cat([linear.bias.detach() for linear in linears])
