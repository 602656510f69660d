"""What a layer keeps from call to call."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache(list):
    """What every layer keeps of the tokens so far: texts of at most `capacity` tokens, `length` of them in use."""

    def __init__(self, layers: list, capacity: int) -> None:
        super().__init__(layers)
        self.capacity = capacity
        self.length = 0

    def advance(self, tokens: int) -> int:
        """Count the `tokens` of a call; how many there were before."""
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens, not {self.length} + {tokens}: make one with a larger length"
            )
        self.length += tokens
        return self.length - tokens


class KVCache:
    """Keys and values of the tokens so far, [batch, heads, capacity, width]; position p is in slot p."""

    def __init__(self, batch: int, heads: int, capacity: int, width: int, value_width: int, like: Tensor) -> None:
        self.k = like.new_zeros(batch, heads, capacity, width)
        self.v = like.new_zeros(batch, heads, capacity, value_width)

    def update(self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write k, v [batch, heads, seq, width] at `positions`; all that `mask` tells of, or they alone if it is None."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[rows, :, positions] = k.transpose(1, 2)
        self.v[rows, :, positions] = v.transpose(1, 2)
        if mask is None:
            return k, v
        return self.k[:, :, : mask.shape[-1]], self.v[:, :, : mask.shape[-1]]
