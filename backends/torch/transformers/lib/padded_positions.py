"""Positions in left-padded batch rows, for masks that transformers does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_visible(inputs_embeds: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the index [batch] of the first visible token of each batch row of inputs_embeds [batch, seq, width];
    `attention_mask` [batch, past + seq] is 0 at padding (None: no padding)."""
    if attention_mask is None:
        return torch.zeros(len(inputs_embeds), dtype=torch.long, device=inputs_embeds.device)
    return attention_mask.long().argmax(-1)


def visible(mask: Tensor | None, distance: Tensor, causal: bool = True) -> Tensor:
    """Return visible keys as booleans [batch or 1, 1, seq, n]: where `mask` is True or, if additive, 0. Without a mask,
    all keys, or if `causal` only keys at a `distance` [1, seq, n] of at most 0. A given mask is not made causal."""
    if mask is None:
        return distance[:, None] <= 0 if causal else torch.ones_like(distance[:, None], dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask == 0


def given_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the padding mask unchanged: the model computes its masks from it in each forward pass."""
    return attention_mask
