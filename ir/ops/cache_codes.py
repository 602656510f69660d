"""Codes of quantized caches: keys and values as integers of 8 or 4 bits, times scales that do not change.

A number is code · scale. The code is number / scale rounded to the nearest, half to even, and at least −2^{bits−1}, at
most 2^{bits−1} − 1. Scales are those of channels [heads · width], or one of all [1].
"""

from __future__ import annotations

import numpy as np

from ..op import Array, TensorType, Value, want
from ..schema.states import CODES
from .elementwise import cast, clip, div, mul, round_
from .tensor import reshape


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
