"""Short causal convolutions over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the causal depthwise convolution of x [batch, seq, channels] by weight [channels, width], plus bias."""
    padded = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).mT


def causal_conv_from(
    past: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `causal_conv` of x [batch, seq, channels] preceded by past [batch, width − 1, channels] (None: zeros), and
    the last width − 1 inputs, the next `past`."""
    if past is None:
        past = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    seen = torch.cat((past, x), 1)
    if x.shape[1] == 1:
        y = (wide(seen) * wide(weight).mT).sum(1, keepdim=True)
        y = (y if bias is None else y + bias).to(x.dtype)
    else:
        y = F.conv1d(seen.mT, weight[:, None], bias, groups=weight.shape[0]).mT
    return y, seen[:, x.shape[1] :].clone()
