"""Caches in a decode step, whose kernels read them whole, and what else kernels of a step are given or make up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..kernels.matrix_step import matrix_step
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


def linear_step(state: Any, q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor, heads: int) -> Tensor:
    """One token of `causal_linear_attention`, its states changed in place: Σ k is a matrix of one column."""
    matrix, norm = state.values
    read = (turned_q, turned_k, v[:, 0], matrix), (q, k, q.new_ones(len(q), heads), norm[..., None])
    y, share = (
        matrix_step(q[:, 0], k[:, 0], values, past, past, heads=heads, groups=heads)[0] for q, k, values, past in read
    )
    return (y.unflatten(1, (heads, -1)) / share[..., None]).flatten(1)[:, None].to(v.dtype)


def products_of(
    function: Callable[..., tuple[Tensor, ...]],
    states: tuple[Tensor, ...],
    tokens: tuple[Tensor, ...],
    constants: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Call `function` on states [batch, ...], tokens [batch or 1, 1, ...] and weights, in the dtype of these; return
    what it makes, [batch, 1, ...] each."""
    like, batch = constants[-1], max(len(x) for x in (*states, *tokens))
    rows = (x[:, 0].expand(batch, *x.shape[2:]) for x in tokens)
    return tuple(y[:, None] for y in function(*(x.to(like.dtype) for x in (*states, *rows, *constants))))
