"""Positions in the slots of a rolling cache, and the caches after a call.

The first `keep` positions have slots of their own, if there are such; of all later ones position j is in the slot that
is j modulo the `capacity` − keep others, where it replaces what has left the window.
"""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, Value
from ..types import dtypes
from .elementwise import add, affine, cast, filled, less, logical_or, minimum, mod, mul, sub
from .elementwise import where as choose
from .reduce import max as greatest
from .tensor import gather_rows, iota, transpose, unsqueeze


def held(newest: Array, capacity: int, keep: int) -> Array:
    """The positions [batch, capacity] that slots hold when `newest` [batch, 1] was the last; below 0 or above `newest`
    if none."""
    slot = np.arange(capacity)[None]
    rolled = newest - (newest - slot) % (capacity - keep)
    return np.where(slot < keep, slot, np.where(rolled < keep, -1, rolled))


def write(past: Array, new: Array, positions: Array, last: int, keep: int) -> Array:
    """One row: the cache `past` [kv_heads, capacity, d] with the keys `new` [kv_heads, seq, d] at their `positions`
    [seq], none of them behind `last`."""
    others = past.shape[1] - keep
    taken = (positions <= last) & ((positions < keep) | (positions > last - others))
    at = positions[taken]
    present = past.copy()
    present[:, np.where(at < keep, at, keep + (at - keep) % others)] = new[:, taken]
    return present


def held_value(slot: Value, newest: Value, keep: int) -> Value:
    """`held`, in ops; `slot` [1, capacity] counts the slots."""
    others = affine(greatest(slot, axes=(1,), keepdims=True), plus=1 - keep)
    rolled = sub(newest, mod(sub(newest, slot), others))
    if not keep:
        return rolled
    later = choose(less(rolled, filled(rolled, keep)), filled(rolled, -1), rolled)
    return choose(less(slot, filled(slot, keep)), slot, later)


def present_values(joined: list[Value], slot: Value, first: Value, n: OpCall) -> list[Value]:
    """The rolling caches after a call of the attention `n`, out of past and call `joined` [batch, kv_heads, capacity +
    seq, width]; `first` [batch, 1] are the positions where the call begins.

    They are gathered, not scattered: a runtime that keeps past and present in one memory then reads all of the past
    before it writes.
    """
    capacity = affine(greatest(slot, axes=(1,), keepdims=True), plus=1)
    newest = greatest(n.positions, axes=(1,), keepdims=True)
    if n.key_mask is not None:
        ones = cast(cast(n.key_mask, to=dtypes.bool_), to=newest.type.dtype)
        at = affine(unsqueeze(cast(iota(n.key_mask, axis=1), to=newest.type.dtype), axes=(0,)), plus=1)
        newest = minimum(newest, affine(greatest(mul(ones, at), axes=(1,), keepdims=True), plus=-1))
    target = held_value(slot, newest, n.keep_first)
    stays = less(target, first)
    if n.keep_first:
        stays = logical_or(stays, less(newest, target))
    source = choose(stays, add(slot, filled(first, 0)), add(sub(target, first), capacity))
    tokens_first = (transpose(x, axes=(0, 2, 1, 3)) for x in joined)
    return [transpose(gather_rows(x, source), axes=(0, 2, 1, 3)) for x in tokens_first]
