"""Softmax attention in the forms that torch has no operator for."""

from __future__ import annotations

import torch
from torch import Tensor

from .indexing import softmax_or_zeros, wide


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v of q [batch, heads, seq, width] and k, v [batch, kv_heads, n, width].

    Scores s become softcap · tanh(s / softcap); `sinks` [heads] add a key of that score with value 0.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = wide(q @ k.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = wide(sinks).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return softmax_or_zeros(scores).to(v.dtype) @ v


def last_rows(x: Tensor, last: Tensor) -> Tensor:
    """Of x [batch, seq, width] the tokens numbered `last` [batch]: [batch, 1, width]."""
    return x[torch.arange(len(x), device=x.device), last][:, None]
