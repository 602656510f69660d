"""Positions in rows that are padded on the left, for masks that transformers does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_shown(inputs_embeds: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The slot of the first token of each row of inputs_embeds [batch, seq, width] that `attention_mask` does not hide:
    [batch]."""
    if attention_mask is None:
        return torch.zeros(len(inputs_embeds), dtype=torch.long, device=inputs_embeds.device)
    return attention_mask.long().argmax(-1)


def visible(mask: Tensor | None, distance: Tensor, causal: bool = True) -> Tensor:
    """The keys that queries see, True or False [batch or 1, 1, seq, n], by a mask of either kind: booleans, or numbers
    to add; None for all earlier ones if `causal`, or all, by their distances [1, seq, n]."""
    if mask is None:
        return distance[:, None] <= 0 if causal else torch.ones_like(distance[:, None], dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask == 0


def given_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of padding as it is given: the model makes its masks of it in each call."""
    return attention_mask
