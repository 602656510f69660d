"""Linear layers with a separate weight per head."""

from __future__ import annotations

import torch
from torch import Tensor


def head_linear(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Return W_h x_h per head: x [batch, n, heads·in], weight [heads·out, in] → [batch, n, heads·out]."""
    y = torch.einsum("bnhi,hoi->bnho", x.unflatten(-1, (heads, -1)), weight.unflatten(0, (heads, -1)))
    return y.flatten(-2)


def head_linear_inverse(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Return W_hᵀ x_h per head: x [batch, n, heads·out], weight [heads·out, in] → [batch, n, heads·in]."""
    y = torch.einsum("bnho,hoi->bnhi", x.unflatten(-1, (heads, -1)), weight.unflatten(0, (heads, -1)))
    return y.flatten(-2)
