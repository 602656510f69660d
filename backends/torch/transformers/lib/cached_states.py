"""States of recurrences and convolutions in a cache of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache


def count_tokens(cache: Cache, x: Tensor) -> None:
    """Let `cache` count the new tokens x [batch, seq, width] by an update with keys of width 1: states do not count."""
    layer_idx = next(i for i, layer in enumerate(cache.layers) if hasattr(layer, "keys"))
    nothing = x.new_zeros(x.shape[0], 1, x.shape[1], 1)
    cache.update(nothing, nothing, layer_idx)


def mask_hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [batch, seq, width] with zeros where `mask` [batch, seq] hides a token; None hides nothing."""
    return x if mask is None else x.masked_fill(mask[..., None] == 0, 0)


def past_states(cache: Cache | None, layer_idx: int, first: int = 0, count: int = 1) -> Any:
    """Return a layer's states `first` to first + count − 1 (a tuple if several); None if nothing is cached yet."""
    if cache is None:
        return None
    layer = cache.layers[layer_idx]
    if not layer.has_previous_state[first]:
        return None
    states = [layer.recurrent_states[i] for i in range(first, first + count)]
    return states[0] if count == 1 else tuple(states)


def keep_states(cache: Cache | None, layer_idx: int, made: tuple[Tensor, Any], first: int = 0) -> Tensor:
    """Store the states in `made` = (result, states) in `cache`, if given, from index `first` on; return the result."""
    y, after = made
    if cache is not None:
        for i, state in enumerate(after if isinstance(after, tuple) else (after,), first):
            cache.update_recurrent_state(state, layer_idx, i)
            cache.layers[layer_idx].has_previous_state[i] = True
    return y
