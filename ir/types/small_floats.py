"""Floats of 4 bits, and the floats of 8 bits that scale groups of them, as bytes and as numbers.

E2M1 has a sign, two bits of exponent and one of fraction: ±0, 0.5, 1, 1.5, 2, 3, 4, 6, no infinities and no NaN. A
scale is a power of two, E8M0 (OCP Microscaling Formats 1.0), or a positive E4M3 (arXiv 2209.05433), whose largest is
448.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # by code: the highest of the 4 bits is the sign
LARGEST_E2M1 = np.float32(6)
LARGEST_E4M3, SMALLEST_E4M3 = np.float32(448), np.float32(2.0**-9)
BIAS = 127  # of the exponent that an E8M0 is
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - BIAS), np.float32(np.nan))  # by byte; 2^-127 is subnormal


def nearest_e2m1(numbers: Array) -> Array:
    """The codes u8 of the E2M1 nearest to `numbers`, ties to even; ±6 for larger ones."""
    clipped = numbers.clip(-LARGEST_E2M1, LARGEST_E2M1)
    codes: Array = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(15)
    return codes


def power_scales(largest: Array) -> Array:
    """The scales of groups whose largest magnitudes are `largest`: 2^(⌊log2 largest⌋ − 2), the exponent of 6 being 2,
    and no less than the least E8M0, which groups of zeros get."""
    _, exponents = np.frexp(largest)  # of numbers in [0.5, 1)
    scales: Array = _E8M0[np.where(largest > 0, exponents - 3 + BIAS, 0).clip(0, 254)]
    return scales


def e4m3_scales(largest: Array, whole: Array | np.float32) -> Array:
    """The E4M3 nearest to `largest` / 6 / `whole`, as numbers; a group that is not zero gets the least one at least."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exact = np.where(largest > 0, largest / LARGEST_E2M1 / whole, np.float32(0))
    kept = exact.clip(np.where(largest > 0, SMALLEST_E4M3, np.float32(0)), LARGEST_E4M3)
    scales: Array = kept.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return scales


def scale_bytes(scales: Array, powers: bool, whole: Array | None = None) -> Array:
    """The bytes of the E8M0 that `scales` are, if they are `powers` of two, or of the E4M3 nearest to them over
    `whole`, if it is given."""
    if powers:
        _, exponents = np.frexp(scales)
        return np.asarray(exponents - 1 + BIAS).astype(np.uint8)
    if whole is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = np.where(scales == 0, np.float32(0), scales / whole)
    made: Array = scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return made


def scale_numbers(raw: Array, powers: bool, whole: Array | None = None) -> Array:
    """The scales f32 that the bytes `raw` stand for, times `whole`, if it is given: the inverse of `scale_bytes`. NaN
    where a byte is none."""
    scales: Array = _E8M0[raw] if powers else np.ascontiguousarray(raw).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return scales if whole is None else scales * whole
