"""Cache writes and other helpers around the kernels of a decode step, which read full caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..kernels.matrix_step import matrix_step
from ..kernels.shared.float8 import as_bytes


def update_cache(cache: Any, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Write k, v [batch, heads, seq, width] of new tokens at positions [batch, seq] into `cache`; return (keys, values)
    of all its slots."""
    cache.update(k, v, positions, None)
    return cache.k, cache.v


def update_cache_float8(
    cache: Any, k: Tensor, v: Tensor, positions: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Write k and v, divided by the scales [heads], as FP8 at positions [batch, seq]; return all slots as bytes."""
    cache.update(as_bytes(k, k_scale), as_bytes(v, v_scale), positions, None)
    return cache.k, cache.v


def update_latent_cache(cache: Any, k: Tensor, positions: Tensor) -> Tensor:
    """Write k [batch, heads, 1, width] of one token per batch row at positions [batch, 1]; return all cached keys."""
    cache.update(k, positions, None)
    return cache.k


def linear_step(state: Any, q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Return y [batch, 1, heads·dv] of `causal_linear_attention` for one token, and update its `state` in place. The
    kernel also computes Σ k, as a matrix state with one column."""
    matrix, norm = state.values
    read = (turned_q, turned_k, v[:, 0], matrix), (q, k, q.new_ones(len(q), heads), norm[..., None])
    y, share = (
        matrix_step(q[:, 0], k[:, 0], values, past, past, heads=heads, groups=heads)[0] for q, k, values, past in read
    )
    return (y.unflatten(1, (heads, -1)) / share[..., None]).flatten(1)[:, None].to(v.dtype)


def step_products(
    function: Callable[..., tuple[Tensor, ...]],
    states: tuple[Tensor, ...],
    tokens: tuple[Tensor, ...],
    constants: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Return function(*states, *tokens, *constants), each result as [batch, 1, ...], for states [batch, ...] and tokens
    [batch or 1, 1, ...]. Arguments are cast to the dtype of the last constant; the token axis is dropped."""
    like, batch = constants[-1], max(len(x) for x in (*states, *tokens))
    rows = (x[:, 0].expand(batch, *x.shape[2:]) for x in tokens)
    return tuple(y[:, None] for y in function(*(x.to(like.dtype) for x in (*states, *rows, *constants))))
