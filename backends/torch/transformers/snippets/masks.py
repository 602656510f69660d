"""Positions in left-padded rows, for masks that transformers does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_shown(inputs_embeds: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the index [batch] of the first token of each row of inputs_embeds [batch, seq, width] that is not hidden
    by `attention_mask`."""
    if attention_mask is None:
        return torch.zeros(len(inputs_embeds), dtype=torch.long, device=inputs_embeds.device)
    return attention_mask.long().argmax(-1)


def visible(mask: Tensor | None, distance: Tensor, causal: bool = True) -> Tensor:
    """Return which keys queries see, as booleans [batch or 1, 1, seq, n]. `mask` is boolean or additive; None shows all
    earlier keys if `causal`, by their `distance` [1, seq, n], or all keys."""
    if mask is None:
        return distance[:, None] <= 0 if causal else torch.ones_like(distance[:, None], dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask == 0


def given_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the padding mask unchanged: the model computes its masks from it in each call."""
    return attention_mask
