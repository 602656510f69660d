"""Caches in a decode step, whose kernels read them whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def written(cache: Any, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values of `cache`, those of one token per row written: k, v [batch, heads, 1, width], positions
    [batch, 1]."""
    cache.update(k, v, positions, None)
    return cache.k, cache.v


def written_latent(cache: Any, k: Tensor, positions: Tensor) -> Tensor:
    """All keys of `cache`, that of one token per row written: k [batch, heads, 1, width], positions [batch, 1]."""
    cache.update(k, positions, None)
    return cache.k
