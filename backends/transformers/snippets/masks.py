"""Positions in rows that are padded on the left, for masks that transformers does not have."""

from __future__ import annotations

import torch
from torch import Tensor


def first_tokens(inputs_embeds: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The slot of the first token of each row of inputs_embeds [batch, seq, width] that `attention_mask` does not hide:
    [batch]."""
    if attention_mask is None:
        return torch.zeros(len(inputs_embeds), dtype=torch.long, device=inputs_embeds.device)
    return attention_mask.long().argmax(-1)
