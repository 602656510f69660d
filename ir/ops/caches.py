"""Slots of rolling KV caches and codes of quantized KV caches.

Rolling: the key of position j < `keep` is in slot j. The key of a later position j is in slot `keep` + (j − `keep`) mod
(`capacity` − `keep`), where it replaces the key of a position that has left the window.

Quantized: an element is code · scale, with constant scales. The code is element / scale rounded to nearest, half to
even, and clipped to −2^{bits−1} … 2^{bits−1} − 1. There is a scale per channel [heads · width], or one for all [1].
"""

from __future__ import annotations

import numpy as np

from ..op import Array, TensorType, Value, require
from ..schema.states import CODES
from ..types import dtypes
from ..types.dtypes import DType
from .elementwise import cast, clip, fill_like, minimum, round_, where
from .reduce import max as greatest
from .tensor import gather_rows, iota, reshape, transpose, unsqueeze


def find_slot_positions(newest: Array, capacity: int, keep: int) -> Array:
    """Return the position of the key in each slot, [batch, capacity], after position `newest` [batch, 1] was written.

    The first `keep` slots hold positions 0 to `keep` − 1. A slot that is still empty gets a number below 0 or above
    `newest`.
    """
    slot = np.arange(capacity)[None]
    rolled = newest - (newest - slot) % (capacity - keep)
    return np.where(slot < keep, slot, np.where(rolled < keep, -1, rolled))


def emit_slot_positions(slot: Value, newest: Value, keep: int) -> Value:
    """Emit the result of `find_slot_positions`, [batch, capacity]; `slot` [1, capacity] is 0, 1, …"""
    rolling_slots = greatest(slot, axes=(1,), keepdims=True) + (1 - keep)
    rolled = newest - (newest - slot) % rolling_slots
    if not keep:
        return rolled
    later = where(rolled < keep, fill_like(rolled, -1), rolled)
    return where(slot < keep, slot, later)


def emit_present_caches(
    joined: list[Value], slot: Value, first: Value, positions: Value, key_mask: Value | None, keep: int
) -> list[Value]:
    """Emit rolling caches [batch, kv_heads, capacity, width] after the new tokens at `positions` [batch, seq].

    `joined` has past and new keys concatenated to [batch, kv_heads, capacity + seq, width] and then, unless keys are
    also values, past and new values; return a cache for each. `slot` [1, capacity] is 0, 1, …; `first` [batch, 1] is
    the position of the first new token. The caches are gathered, not scattered: a runtime with past and present in one
    buffer then reads all of the past before it writes.
    """
    capacity = greatest(slot, axes=(1,), keepdims=True) + 1
    newest = greatest(positions, axes=(1,), keepdims=True)
    if key_mask is not None:
        ones = cast(cast(key_mask, to=dtypes.bool_), to=newest.type.dtype)
        at = unsqueeze(cast(iota(key_mask, axis=1), to=newest.type.dtype), axes=(0,)) + 1
        newest = minimum(newest, greatest(ones * at, axes=(1,), keepdims=True) - 1)
    target = emit_slot_positions(slot, newest, keep)
    is_past = target < first
    if keep:
        is_past = is_past | (newest < target)
    source = where(is_past, slot + fill_like(first, 0), target - first + capacity)
    tokens_first = (transpose(x, axes=(0, 2, 1, 3)) for x in joined)
    return [transpose(gather_rows(x, source), axes=(0, 2, 1, 3)) for x in tokens_first]


def get_code_range(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest code of `bits` bits."""
    return -(1 << bits - 1), (1 << bits - 1) - 1


def emit_codes(x: Value, scale: Value, bits: int, dtype: DType) -> Value:
    """Emit the codes of `bits` bits, in `dtype`, of x [batch, keys, heads · width] for `scale` [heads · width] or
    [1]."""
    low, high = get_code_range(bits)
    wide = cast(x, to=scale.type.dtype)
    return cast(clip(round_(wide / scale), low=low, high=high), to=dtype)


def emit_dequantized(codes: Value, scale: Value, heads: int, like: Value) -> Value:
    """Emit `codes` [batch, heads, slots, width] times `scale` [heads · width] or [1], in the dtype of `like`."""
    if scale.shape != (1,):
        scale = reshape(scale, shape=(1, heads, 1, scale.width // heads))
    return cast(cast(codes, to=scale.type.dtype) * scale, to=like.type.dtype)


def check_quantization(
    bits: int | None,
    k: TensorType,
    v: TensorType | None,
    scales: dict[str, TensorType | None],
    causal: bool,
    heads: int,
) -> None:
    """Raise WeftError if the settings of a quantized cache do not fit an attention with `heads` KV heads.

    `bits` is None without quantization; `scales` maps k_scale and v_scale to their types.
    """
    if bits is None:
        require(not any(scales.values()), "k_scale and v_scale are given without cache_bits=, which they need")
        return
    require(bits in CODES, f"cache_bits={bits}: codes have {' or '.join(map(str, CODES))} bits")
    require(causal, "cache_bits= needs causal=true")
    for (name, scale), x in zip(scales.items(), (k, v), strict=True):
        if x is None:
            require(scale is None, f"{name} needs the operand v")
            continue
        fits = scale is not None and scale.dtype.is_float and scale.shape in ((1,), (x.shape[2],))
        require(fits, f"{name} {scale} must be [1] or [{x.shape[2]}], for the channels of {x}")
        width = x.shape[2]
        even = bits == 8 or (isinstance(width, int) and width // heads % 2 == 0)
        require(even, f"{x} with {heads} heads: codes of 4 bits need heads of an even size, two codes per byte")
