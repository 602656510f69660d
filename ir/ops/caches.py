"""Contents of caches: positions in the slots of a rolling one, codes in those of a quantized one.

Rolling: the first `keep` positions have slots of their own, if there are such; of all later ones position j is in the
slot that is j modulo the `capacity` − keep others, where it replaces what has left the window.

Quantized: a number is code · scale, with scales that do not change. The code is number / scale rounded to the nearest,
half to even, and at least −2^{bits−1}, at most 2^{bits−1} − 1. Scales are those of channels [heads · width], or one of
all [1].
"""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, TensorType, Value, want
from ..schema.states import CODES
from ..types import dtypes
from .elementwise import add, affine, cast, clip, div, filled, less, logical_or, minimum, mod, mul, round_, sub
from .elementwise import where as choose
from .reduce import max as greatest
from .tensor import gather_rows, iota, reshape, transpose, unsqueeze


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


def limits(bits: int) -> tuple[int, int]:
    """The smallest and the largest code."""
    return -(1 << bits - 1), (1 << bits - 1) - 1


def by_channel(scale: Array, heads: int) -> Array:
    """`scale` [heads · width] or [1] as it multiplies [batch, heads, slots, width]."""
    return scale if scale.size == 1 else scale.reshape(1, heads, 1, -1)


def rounded(x: Array, scale: Array, bits: int) -> Array:
    """The codes, int64, of x [batch, heads, slots, width]."""
    return np.clip(np.rint(x / by_channel(scale, x.shape[1])), *limits(bits)).astype(np.int64)


def codes_value(x: Value, scale: Value, bits: int) -> Value:
    """The codes of x [batch, keys, heads · width], in ops."""
    low, high = limits(bits)
    wide = cast(x, to=scale.type.dtype)
    return cast(clip(round_(div(wide, scale)), low=low, high=high), to=CODES[bits])


def numbers_value(codes: Value, scale: Value, heads: int, like: Value) -> Value:
    """The numbers that `codes` [batch, heads, slots, width] stand for, in ops and in the dtype of `like`."""
    if scale.shape != (1,):
        scale = reshape(scale, shape=(1, heads, 1, scale.width // heads))
    return cast(mul(cast(codes, to=scale.type.dtype), scale), to=like.type.dtype)


def check(
    bits: int | None,
    k: TensorType,
    v: TensorType | None,
    scales: dict[str, TensorType | None],
    causal: bool,
    heads: int,
) -> None:
    """Check bits and scales of an attention with `heads` KV heads.

    Raises:
        WeftError: if they do not fit.
    """
    if bits is None:
        want(not any(scales.values()), "scales of a cache go with cache_bits")
        return
    want(bits in CODES, f"cache_bits={bits}: codes have {' or '.join(map(str, CODES))} bits")
    want(causal, "only the cache of causal attention is quantized")
    for (name, scale), x in zip(scales.items(), (k, v), strict=True):
        if x is None:
            want(scale is None, f"{name} goes with v")
            continue
        fits = scale is not None and scale.dtype.is_float and scale.shape in ((1,), (x.shape[2],))
        want(fits, f"{name} {scale} must be [1] or [{x.shape[2]}], for the channels of {x}")
        width = x.shape[2]
        even = bits == 8 or (isinstance(width, int) and width // heads % 2 == 0)
        want(even, f"{x}: two codes of 4 bits are a byte, so heads must have an even size")
