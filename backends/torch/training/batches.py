"""Batches of token windows. A batch depends only on the seed and its number, so a resumed run needs no other state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class WindowBatch:
    """Windows of token ids [n, length], and the number of each window in its text [n]."""

    windows: Tensor
    indices: Tensor

    def split(self, size: int) -> list[WindowBatch]:
        """Return this batch in parts of at most `size` windows."""
        pairs = zip(torch.split(self.windows, size), torch.split(self.indices, size), strict=True)
        return [WindowBatch(*pair) for pair in pairs]


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of `tokens` (ids [tokens], possibly a memory map), each `length` ids long and `stride` after the one
    before. With `shift`, every epoch begins at another offset below `stride`, so that its windows differ. The ids
    `begin` and `end`, which a tokenizer puts around a text, replace the first and the last of each window."""

    tokens: Array
    length: int
    stride: int
    seed: int = 0
    shift: bool = False
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def __len__(self) -> int:
        spare = self.stride - 1 if self.shift else 0
        return max(0, (len(self.tokens) - spare - self.length) // self.stride + 1)

    def draw(self, start: int, count: int) -> WindowBatch:
        """Return `count` windows from number `start` of an endless series: in each epoch every window occurs once, in
        random order."""
        series = np.arange(start, start + count)
        order = [self._order_epoch(epoch) for epoch in range(start // len(self), (start + count - 1) // len(self) + 1)]
        chosen = [order[n // len(self) - start // len(self)] for n in series]
        indices = np.array([windows[n % len(self)] for n, (windows, _) in zip(series, chosen, strict=True)])
        offsets = np.array([offset for _, offset in chosen])
        return self._read(indices, offsets)

    def read(self, indices: Array) -> WindowBatch:
        """Return the windows `indices` [n], in this order, without shift."""
        return self._read(indices, np.zeros_like(indices))

    def _read(self, indices: Array, offsets: Array) -> WindowBatch:
        at = (indices * self.stride + offsets)[:, None] + np.arange(self.length)
        ids = self.tokens[at].astype(np.int64)
        ids[:, : len(self.begin)], ids[:, self.length - len(self.end) :] = self.begin, self.end
        return WindowBatch(torch.from_numpy(ids), torch.from_numpy(indices))

    @lru_cache(2)  # noqa: B019 (a run keeps its few windows until it ends)
    def _order_epoch(self, epoch: int) -> tuple[Array, int]:
        """Return the order of the windows in `epoch`, and the offset of the first."""
        random = np.random.default_rng([self.seed, epoch])
        return random.permutation(len(self)), int(random.integers(self.stride)) if self.shift else 0
