"""Rotary position embedding (Su 2021); the recipes in `weft.ir.recipes.frequencies` compute its frequencies."""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, TensorType, Trait, Value, case, ints, normal, op, require, require_int
from .elementwise import cast, cos, sin
from .tensor import concat, reshape, slice_, split, unsqueeze


def rotate(x: Array, angles: Array, *, heads: int, interleaved: bool, amplitude: float) -> Array:
    """Return x [batch, seq, heads·d], its pairs rotated by `angles` [batch, seq, pairs] (radians) times `amplitude`."""
    batch, seq, width = x.shape
    xh = x.reshape(batch, seq, heads, width // heads)
    pairs = angles.shape[-1]
    cos, sin = amplitude * np.cos(angles)[:, :, None], amplitude * np.sin(angles)[:, :, None]
    part = xh[..., : 2 * pairs]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    pair = [a * cos - b * sin, b * cos + a * sin]
    mixed = np.stack(pair, -1).reshape(part.shape) if interleaved else np.concatenate(pair, -1)
    return np.concatenate([mixed, xh[..., 2 * pairs :]], -1).reshape(x.shape)


@op(
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 5, 32), ints(2, 5, high=900), normal(4), heads=4),
        case(normal(2, 5, 32), ints(2, 5, high=900), normal(4), heads=4, interleaved=True),
        case(normal(2, 5, 48), ints(2, 5, high=900), normal(4), heads=4, amplitude=1.3),
    ],
)
def rope(
    x: Array, positions: Array, frequencies: Array, *, heads: int, interleaved: bool = False, amplitude: float = 1.0
) -> Array:
    """Rotary positions (Su 2021): pair k of every head is rotated by positions·frequencies[k] radians.

    x [batch, seq, heads·d], positions [batch, seq], frequencies [pairs], 2·pairs ≤ d (the rest of each head passes
    through). Pair k is elements (k, k + pairs), or (2k, 2k + 1) if `interleaved`. `amplitude` multiplies the rotated
    part (in YaRN √(1/t), t the temperature of attention).
    """
    angles = positions[:, :, None] * frequencies
    return rotate(x, angles, heads=heads, interleaved=interleaved, amplitude=amplitude)


@rope.infer
def _(n: OpCall) -> None:
    x: TensorType = n.x
    require(x.rank == 3 and n.positions.shape == x.shape[:2], f"positions {n.positions} do not fit x {x}")
    misfit = f"the width of {x} is not a multiple of heads={n.heads}"
    width, pairs = require_int(x.shape[2], misfit), n.frequencies.shape[-1]
    require(n.heads > 0 and width % n.heads == 0, misfit)
    fits = isinstance(pairs, int) and n.frequencies.rank == 1 and 2 * pairs <= width // n.heads
    require(fits, f"frequencies {n.frequencies} exceed the head size of {x} with heads={n.heads}")


rope.cost(lambda n: n.x.elements * 3)


@rope.body
def _(n: OpCall) -> Value:
    at = unsqueeze(cast(n.positions, to=n.frequencies.type.dtype), axes=(2, 3))
    angles = at * n.frequencies  # [batch, seq, 1, pairs]
    c, s = (f(angles) * n.amplitude for f in (cos, sin))
    return rotate_pairs(n.x, c, s, heads=n.heads, interleaved=n.interleaved)


def rotate_pairs(x: Value, cosines: Value, sines: Value, *, heads: int, interleaved: bool) -> Value:
    """Emit x [batch, seq, heads·d] with the pairs of every head (as in `rope`) rotated; `cosines` and `sines`
    [batch, seq, 1, pairs] are those of the angles, times the amplitude."""
    (batch, seq, width), pairs = x.shape, cosines.width
    d = width // heads
    c, s = (cast(v, to=x.type.dtype) for v in (cosines, sines))
    xh = reshape(x, shape=(batch, seq, heads, d))
    rest: list[Value] = []
    if 2 * pairs < d:
        xh, *rest = split.emit(xh, sizes=(2 * pairs, d - 2 * pairs))
    if interleaved:
        two = reshape(xh, shape=(batch, seq, heads, pairs, 2))
        a, b = (reshape(slice_(two, axis=4, start=i, stop=i + 1), shape=(batch, seq, heads, pairs)) for i in (0, 1))
    else:
        a, b = split.emit(xh, sizes=(pairs, pairs))
    first, second = a * c - b * s, b * c + a * s
    if interleaved:
        halves = [unsqueeze(h, axes=(4,)) for h in (first, second)]
        mixed = reshape(concat(*halves, axis=4), shape=(batch, seq, heads, 2 * pairs))
    else:
        mixed = concat(first, second, axis=3)
    return reshape(concat(mixed, *rest, axis=3) if rest else mixed, shape=(batch, seq, width))
