"""Positions in float64: sinusoids, rotations with every extension of the context, biases by distance."""

from __future__ import annotations

import math

import numpy as np

from weft.frontends.dsl import RelativeTable, RoPE

from .elementary import Array

BASE = 10_000.0


def sinusoids(positions: Array, dim: int) -> Array:
    """Return sin(pos/10000^(2i/d)) in column 2i and its cosine in column 2i + 1 (Vaswani 2017)."""
    angles = np.outer(positions, frequencies(dim))
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(positions), dim)


# -- angles per position of the d/2 pairs


def frequencies(d: int, base: float = BASE) -> Array:
    """Return θ_k = base^(−2k/d) (Su 2021)."""
    return np.asarray(base ** (-2 * np.arange(d // 2) / d))


def ntk(d: int, factor: float) -> Array:
    """Return the frequencies of base' = base·s^(d/(d − 2)): the fastest stays, the slowest is divided by s (bloc97)."""
    return frequencies(d, BASE * factor ** (d / (d - 2)))


def dynamic_ntk(d: int, factor: float, original: int, length: int) -> Array:
    """Return NTK-aware frequencies for the excess of the length over the original context, unchanged below it."""
    return ntk(d, max(1.0, factor * length / original - (factor - 1)))


def yarn(d: int, factor: float, original: int, fast: float, slow: float) -> Array:
    """Return frequencies by wavelength (Peng 2023, section 3.2).

    A pair that rotates more than `fast` times within the original context stays, one that rotates less than `slow`
    times is interpolated, with a ramp over the pairs between.
    """

    def pair(rotations: float) -> float:
        """Return the fractional k at which 2π·base^(2k/d), the wavelength, fits `rotations` times into the context."""
        return math.log(original / (2 * math.pi * rotations), BASE) * d / 2

    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), d - 1)
    share = np.clip((np.arange(d // 2) - first) / (last - first), 0, 1)
    return np.asarray((1 - share) * frequencies(d) + share * frequencies(d) / factor)


def in_float32(angles: Array) -> Array:
    """Return `angles` as models store them."""
    return angles.astype(np.float32).astype(np.float64)


# -- rotations


def rotate(x: Array, positions: Array, angles: Array, interleaved: bool = False, amplitude: float = 1.0) -> Array:
    """Rotate pair k of the first 2·len(angles) features of x [length, d] by position · angles[k]."""
    n, y = len(angles), x.copy()
    a, b = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    t = np.outer(positions, angles)
    y[:, a] = amplitude * (x[:, a] * np.cos(t) - x[:, b] * np.sin(t))
    y[:, b] = amplitude * (x[:, a] * np.sin(t) + x[:, b] * np.cos(t))
    return y


def rope(x: Array, settings: RoPE | None, positions: Array | None = None) -> Array:
    """Rotate one head x [length, d] by `settings` without scaling, at `positions` (by default 0, 1, …)."""
    if settings is None:
        return x
    positions = np.arange(len(x)) if positions is None else positions
    d = settings.dim or int(x.shape[1] * settings.fraction)
    return rotate(x, positions, in_float32(frequencies(d, settings.theta)), settings.interleaved)


# -- biases


def alibi_slope(heads: int, h: int) -> float:
    """Return 2^(−8h/heads) for h from 1 (Press 2022).

    If `heads` is not a power of two: first the slopes of the power below, then every other one of the power above.
    """
    below = 1 << (heads.bit_length() - 1)
    return 2.0 ** (-8 * (h + 1) / below) if h < below else 2.0 ** (-8 * (2 * (h - below) + 1) / (2 * below))


def t5_bucket(relative: int, buckets: int, max_distance: int, causal: bool) -> int:
    """Return the bucket of j − i (Raffel 2020), with logarithms compared as integers."""
    count, first = (buckets, 0) if causal else (buckets // 2, buckets // 2 if relative > 0 else 0)
    distance = max(-relative, 0) if causal else abs(relative)
    exact = count // 2
    if distance < exact:
        return first + distance
    wide = count - exact
    # distance/exact ≥ (max_distance/exact)^(t/wide) for the largest t, at most the last bucket
    reached = [t for t in range(wide) if distance**wide * exact**t >= exact**wide * max_distance**t]
    return first + exact + max(reached)


def relative_row(distance: int, table: RelativeTable) -> int:
    """Return the row of a key `distance` tokens before its query (He 2021)."""
    exact = table.span // 2
    if table.max_distance is not None and abs(distance) > exact:
        steps = math.log(abs(distance) / exact) / math.log((table.max_distance - 1) / exact) * (exact - 1)
        distance = int(math.copysign(exact + math.ceil(round(steps, 9)), distance))
    return min(max(distance + table.span, 0), 2 * table.span - 1)
