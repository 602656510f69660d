"""Caches in a decode step, whose kernels read them whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels.shared.float8 import as_bytes


def written(cache: Any, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values of `cache`, those of one token per row written: k, v [batch, heads, 1, width], positions
    [batch, 1]."""
    cache.update(k, v, positions, None)
    return cache.k, cache.v


def written_bytes(
    cache: Any, k: Tensor, v: Tensor, positions: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of a cache of bytes, with the scales of heads [heads]."""
    cache.update(as_bytes(k, k_scale), as_bytes(v, v_scale), positions, None)
    return cache.k, cache.v


def written_latent(cache: Any, k: Tensor, positions: Tensor) -> Tensor:
    """All keys of `cache`, that of one token per row written: k [batch, heads, 1, width], positions [batch, 1]."""
    cache.update(k, positions, None)
    return cache.k
