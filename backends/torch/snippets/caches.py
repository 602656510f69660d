"""Caches of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..kernels.shared.float8 import as_bytes, from_bytes


class Cache(list[Any]):
    """Caches of all layers, for texts of at most `capacity` tokens; `length` of them are in use."""

    def __init__(self, layers: list[Any], capacity: int) -> None:
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


def earlier_keys(positions: Tensor, keys: Tensor, first: int | None) -> Tensor:
    """The mask of a call with tokens at `positions` [batch or 1, seq], which see the `keys` [batch or 1, n] up to their
    own. `first` is the position of the first token, where rows go on together: on a GPU flash attention is told so."""
    if first is not None and positions.is_cuda and positions.shape[1] > 1:
        return causal_lower_right(positions.shape[1], keys.shape[1])
    return positions[:, None, :, None] >= keys[:, None, None, :]


def write_slots(held: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write `new` [batch, heads, seq, width] into the `slots` [batch or 1, seq] of `held` [batch, heads, capacity,
    width], in the dtype of that: torch.autocast may have made others."""
    rows = torch.arange(len(held), device=held.device)[:, None]
    held[rows, :, slots] = new.transpose(1, 2).to(held.dtype)


class KVCache:
    """Keys and values of the tokens so far, [batch, heads, capacity, width]; position p is in slot p."""

    growth = "text"

    def __init__(self, batch: int, heads: int, capacity: int, width: int, value_width: int, like: Tensor) -> None:
        self.k = like.new_zeros(batch, heads, capacity, width)
        self.v = like.new_zeros(batch, heads, capacity, value_width)

    def update(self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write k, v [batch, heads, seq, width] at `positions`; all that `mask` tells of, or they alone."""
        write_slots(self.k, k, positions)
        write_slots(self.v, v, positions)
        if mask is None:
            return k, v
        return self.k[:, :, : mask.shape[-1]], self.v[:, :, : mask.shape[-1]]


class KeyCache:
    """Keys, whose first numbers are the values too, of the tokens so far: [batch, heads, capacity, width]."""

    growth = "text"

    def __init__(self, batch: int, heads: int, capacity: int, width: int, like: Tensor) -> None:
        self.k = like.new_zeros(batch, heads, capacity, width)

    def update(self, k: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Write k [batch, heads, seq, width] at `positions`; all keys that `mask` tells of, or k if it is None."""
        write_slots(self.k, k, positions)
        return k if mask is None else self.k[:, :, : mask.shape[-1]]


def held_positions(newest: Tensor, slots: int, keep: int = 0) -> Tensor:
    """The positions [batch, slots] whose keys a rolling cache holds after `newest` [batch, 1]; negative: none yet.

    The first `keep` positions stay in slots of their own, position p of the others is in the slot that is p modulo
    those left.
    """
    slot = torch.arange(slots, device=newest.device)
    rolled = newest - (newest - slot) % max(slots - keep, 1)
    held = torch.where(slot < keep, slot, torch.where(rolled < keep, -1, rolled))
    return torch.where(held > newest, -1, held)


def rolling_positions(positions: Tensor, start: int, cache: Cache | None, slots: int, keep: int = 0) -> Tensor:
    """The positions [batch or 1, keys] of the keys that a rolling cache of `slots` gives back in a call at `positions`
    [batch or 1, seq]: those of the call, before them what was held; one behind all others stands for an empty slot."""
    if cache is None or start == 0:
        return positions
    slots, first = min(slots, cache.capacity), positions[:, :1]
    if positions.shape[1] == 1:
        known = held_positions(first, slots, keep)
    else:
        known = torch.cat((held_positions(first - 1, slots, keep), positions), 1)
    return torch.where(known < 0, cache.capacity, known)


def positions_up_to(positions: Tensor, last: Tensor) -> Tensor:
    """`positions` [batch or 1, seq], −1 behind the token numbered `last` [batch] of each row: there is padding."""
    behind = torch.arange(positions.shape[1], device=positions.device) > last[:, None]
    return torch.where(behind, -1, positions)


def roll_in(held: Tensor, new: Tensor, positions: Tensor, keep: int) -> None:
    """Write `new` [batch, heads, seq, width] of `positions` [batch or 1, seq] (padding, if negative, at the end) into
    `held` [batch, heads, slots, width], over what has left the window."""
    slots, first = held.shape[2], positions[:, :1]
    if positions.shape[1] == 1:
        slot = torch.where(first < keep, first, keep + (first - keep) % max(slots - keep, 1))
        write_slots(held, new, slot)
        return
    token = held_positions(positions.amax(1, keepdim=True), slots, keep) - first  # of the call, in every slot
    source = token.clamp(min=0).expand(len(held), -1)[:, None, :, None]
    held.copy_(torch.where((token >= 0)[:, None, :, None], new.take_along_dim(source, 2), held))


def rolled(held: Tensor, new: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
    """The keys or values that `mask` [..., keys] tells of: in the first call of a text `new` alone, for one token what
    is `held` with it, else also what was held before; `new` is written (see `roll_in`)."""
    keys = new.shape[2] if mask is None else mask.shape[-1]
    seen = torch.cat((held, new), 2) if keys == held.shape[2] + new.shape[2] else new
    roll_in(held, new, positions, keep)
    return seen if keys == seen.shape[2] else held


class RollingKVCache:
    """Keys and values of the first `keep` tokens and of the last ones, [batch, heads, slots, width]."""

    growth = "window"

    def __init__(
        self, batch: int, heads: int, slots: int, width: int, value_width: int, like: Tensor, keep: int = 0
    ) -> None:
        self.k = like.new_zeros(batch, heads, slots, width)
        self.v = like.new_zeros(batch, heads, slots, value_width)
        self.keep = keep

    def update(self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write k, v [batch, heads, seq, width] of `positions`; the keys and values that `mask` tells of."""
        return rolled(self.k, k, positions, mask, self.keep), rolled(self.v, v, positions, mask, self.keep)


class RollingKeyCache:
    """Keys, whose first numbers are the values too, of the first `keep` tokens and of the last ones."""

    growth = "window"

    def __init__(self, batch: int, heads: int, slots: int, width: int, like: Tensor, keep: int = 0) -> None:
        self.k = like.new_zeros(batch, heads, slots, width)
        self.keep = keep

    def update(self, k: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Write k [batch, heads, seq, width] of `positions`; the keys that `mask` tells of."""
        return rolled(self.k, k, positions, mask, self.keep)


def through_bytes(
    cache: KVCache | RollingKVCache,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The keys and values that `cache` gives back, which holds the bytes of FP8 numbers, to be multiplied by the scales
    of heads [heads]. Those of the call are rounded, too, so that it does not matter how a text is cut into calls."""
    k_bytes, v_bytes = cache.update(as_bytes(k, k_scale), as_bytes(v, v_scale), positions, mask)
    return from_bytes(k_bytes, k_scale, k.dtype), from_bytes(v_bytes, v_scale, v.dtype)


class CrossCache:
    """Keys and values of an encoded text, and where it is none, from the first call on."""

    growth = "source"

    def __init__(self) -> None:
        self.kept: tuple[Tensor | None, ...] = ()


def remembered(cache: CrossCache | None, made: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
    """`made` of an encoded text, which `cache` keeps; what it keeps already in calls that come without one."""
    known = made or (() if cache is None else cache.kept)
    if not known:
        raise ValueError("there is no encoded text: the first call needs the inputs of the encoder")
    if cache is not None:
        cache.kept = known
    return known
