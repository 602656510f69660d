"""KV caches of layers: of fixed capacity, rolling, FP8, and of an encoder's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..kernels.shared.float8 import as_bytes, from_bytes


class Cache(list[Any]):
    """The list of the layers' caches, for sequences of at most `capacity` tokens, of which `length` are cached."""

    def __init__(self, layers: list[Any], capacity: int) -> None:
        super().__init__(layers)
        self.capacity = capacity
        self.length = 0

    def advance(self, tokens: int) -> int:
        """Add the number of new `tokens` to `length` (ValueError above `capacity`); return the previous length."""
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens, not {self.length} + {tokens}: create one with a larger length"
            )
        self.length += tokens
        return self.length - tokens


def earlier_keys(positions: Tensor, keys: Tensor, first: int | None) -> Tensor:
    """Return the causal mask [batch or 1, 1, seq, n] of queries at `positions` [batch or 1, seq] over keys at `keys`
    [batch or 1, n]. On a GPU, if `first` (the start of all rows) is not None and seq > 1, return torch's CausalBias."""
    if first is not None and positions.is_cuda and positions.shape[1] > 1:
        return causal_lower_right(positions.shape[1], keys.shape[1])
    return positions[:, None, :, None] >= keys[:, None, None, :]


def write_slots(held: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write `new` [batch, heads, seq, width] into the `slots` [batch or 1, seq] of `held` [batch, heads, capacity,
    width], cast to the dtype of `held`, because torch.autocast may have produced another."""
    rows = torch.arange(len(held), device=held.device)[:, None]
    held[rows, :, slots] = new.transpose(1, 2).to(held.dtype)


class KVCache:
    """A KV cache of fixed capacity, [batch, heads, capacity, width]; position p is in slot p."""

    growth = "text"

    def __init__(self, batch: int, heads: int, capacity: int, width: int, value_width: int, like: Tensor) -> None:
        self.k = like.new_zeros(batch, heads, capacity, width)
        self.v = like.new_zeros(batch, heads, capacity, value_width)

    def update(self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write k, v [batch, heads, seq, width] at `positions`; return mask.shape[-1] slots of each (None: k, v)."""
        write_slots(self.k, k, positions)
        write_slots(self.v, v, positions)
        if mask is None:
            return k, v
        return self.k[:, :, : mask.shape[-1]], self.v[:, :, : mask.shape[-1]]


class KeyCache:
    """A cache of keys [batch, heads, capacity, width]; the first elements of a key are also its value."""

    growth = "text"

    def __init__(self, batch: int, heads: int, capacity: int, width: int, like: Tensor) -> None:
        self.k = like.new_zeros(batch, heads, capacity, width)

    def update(self, k: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Write k [batch, heads, seq, width] at `positions`; return the first mask.shape[-1] keys (mask None: k)."""
        write_slots(self.k, k, positions)
        return k if mask is None else self.k[:, :, : mask.shape[-1]]


def slot_positions(newest: Tensor, slots: int, keep: int = 0) -> Tensor:
    """Return the position in each slot of a rolling cache, [batch, slots], given the last written position, `newest`
    [batch, 1]; −1 if the slot is empty. The first `keep` positions are never overwritten; position p ≥ keep is in slot
    keep + (p − keep) mod (slots − keep)."""
    slot = torch.arange(slots, device=newest.device)
    rolled = newest - (newest - slot) % max(slots - keep, 1)
    positions_held = torch.where(slot < keep, slot, torch.where(rolled < keep, -1, rolled))
    return torch.where(positions_held > newest, -1, positions_held)


def rolling_positions(positions: Tensor, start: int, cache: Cache | None, slots: int, keep: int = 0) -> Tensor:
    """Return the positions [batch or 1, keys] of the keys that a rolling cache returns for new tokens at `positions`
    [batch or 1, seq]. Without earlier tokens (`start` 0) or cache: `positions`. For one token: those of all slots,
    min(`slots`, `cache.capacity`). Else both, slots first. Empty slots have the position `cache.capacity`."""
    if cache is None or start == 0:
        return positions
    slots, first = min(slots, cache.capacity), positions[:, :1]
    if positions.shape[1] == 1:
        key_positions = slot_positions(first, slots, keep)
    else:
        key_positions = torch.cat((slot_positions(first - 1, slots, keep), positions), 1)
    return torch.where(key_positions < 0, cache.capacity, key_positions)


def mask_padding(positions: Tensor, last: Tensor) -> Tensor:
    """Return `positions` [batch or 1, seq] as [batch, seq] with −1 after index `last` [batch] of each row (padding)."""
    behind = torch.arange(positions.shape[1], device=positions.device) > last[:, None]
    return torch.where(behind, -1, positions)


def write_rolling(held: Tensor, new: Tensor, positions: Tensor, keep: int) -> None:
    """Write `new` [batch, heads, seq, width], keys or values of tokens at `positions` [batch or 1, seq] (negative:
    padding at the end), into the rolling cache `held` [batch, heads, slots, width], over the oldest ones."""
    slots, first = held.shape[2], positions[:, :1]
    if positions.shape[1] == 1:
        slot = torch.where(first < keep, first, keep + (first - keep) % max(slots - keep, 1))
        write_slots(held, new, slot)
        return
    token = slot_positions(positions.amax(1, keepdim=True), slots, keep) - first  # index in the call
    source = token.clamp(min=0).expand(len(held), -1)[:, None, :, None]
    held.copy_(torch.where((token >= 0)[:, None, :, None], new.take_along_dim(source, 2), held))


def update_rolling(held: Tensor, new: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
    """Write `new` by `write_rolling`; return the keys or values of the columns of `mask` [..., keys]: `new` without
    earlier tokens, all of `held` for one new token, else `held` before the write and then `new`."""
    keys = new.shape[2] if mask is None else mask.shape[-1]
    seen = torch.cat((held, new), 2) if keys == held.shape[2] + new.shape[2] else new
    write_rolling(held, new, positions, keep)
    return seen if keys == seen.shape[2] else held


class RollingKVCache:
    """A rolling KV cache [batch, heads, slots, width] of the first `keep` and the last slots − `keep` tokens."""

    growth = "window"

    def __init__(
        self, batch: int, heads: int, slots: int, width: int, value_width: int, like: Tensor, keep: int = 0
    ) -> None:
        self.k = like.new_zeros(batch, heads, slots, width)
        self.v = like.new_zeros(batch, heads, slots, value_width)
        self.keep = keep

    def update(self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write k, v [batch, heads, seq, width] at `positions`; return the keys and values of the mask's columns."""
        return update_rolling(self.k, k, positions, mask, self.keep), update_rolling(
            self.v, v, positions, mask, self.keep
        )


class RollingKeyCache:
    """A rolling cache of the first `keep` and last slots − `keep` keys; the first elements of a key are its value."""

    growth = "window"

    def __init__(self, batch: int, heads: int, slots: int, width: int, like: Tensor, keep: int = 0) -> None:
        self.k = like.new_zeros(batch, heads, slots, width)
        self.keep = keep

    def update(self, k: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Write k [batch, heads, seq, width] at `positions`; return the keys of the mask's columns."""
        return update_rolling(self.k, k, positions, mask, self.keep)


def update_float8(
    cache: KVCache | RollingKVCache,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the new k and v into an FP8 `cache`, divided by the scales [heads]; return the dequantized keys and values
    of the mask's columns. New ones are also rounded: the result must not depend on how a sequence is split into
    calls."""
    k_bytes, v_bytes = cache.update(as_bytes(k, k_scale), as_bytes(v, v_scale), positions, mask)
    return from_bytes(k_bytes, k_scale, k.dtype), from_bytes(v_bytes, v_scale, v.dtype)


class CrossCache:
    """A cross-attention cache: keys, values and padding mask of an encoded sequence, stored by `cache_source`."""

    growth = "source"

    def __init__(self) -> None:
        self.kept: tuple[Tensor | None, ...] = ()


def cache_source(cache: CrossCache | None, made: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
    """Store `made`, (keys, values, padding mask or None) of an encoded sequence, in `cache` (if given), and return it;
    without `made`, return the tuple stored before (ValueError if there is none)."""
    source = made or (() if cache is None else cache.kept)
    if not source:
        raise ValueError("no encoder output is cached: the first call needs the inputs of the encoder")
    if cache is not None:
        cache.kept = source
    return source
