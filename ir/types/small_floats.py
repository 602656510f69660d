"""Floats of 4 bits, and the 8-bit floats that scale groups of them: encoding and decoding.

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
BIAS = 127  # of the exponent that an E8M0 byte stores
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - BIAS), np.float32(np.nan))  # by byte; 2^-127 is subnormal


def round_to_e2m1(values: Array) -> Array:
    """Return the codes u8, 0 to 15, of the E2M1 values nearest to `values`, ties to even; ±6 beyond ±6."""
    clipped = values.clip(-LARGEST_E2M1, LARGEST_E2M1)
    return np.asarray(clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(15))


def fit_power_scales(largest: Array) -> Array:
    """Return the E8M0 scales, as f32, of groups whose largest magnitudes are `largest`: 2^(⌊log2 largest⌋ − 2).

    The exponent of 6, the largest E2M1, is 2. Groups of zeros get the smallest E8M0.
    """
    _, exponents = np.frexp(largest)  # for mantissas in [0.5, 1)
    return np.asarray(_E8M0[np.where(largest > 0, exponents - 3 + BIAS, 0).clip(0, 254)])


def fit_e4m3_scales(largest: Array, tensor_scale: Array | np.float32) -> Array:
    """Return the E4M3 nearest to `largest` / 6 / `tensor_scale`, as f32: at most 448, 0 only where `largest` is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exact = np.where(largest > 0, largest / LARGEST_E2M1 / tensor_scale, np.float32(0))
    clipped = exact.clip(np.where(largest > 0, SMALLEST_E4M3, np.float32(0)), LARGEST_E4M3)
    return np.asarray(clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def encode_scales(scales: Array, powers: bool, tensor_scale: Array | None = None) -> Array:
    """Return scales as bytes u8: E8M0 if they are `powers` of two, else E4M3 of scale / `tensor_scale` (None: 1)."""
    if powers:
        _, exponents = np.frexp(scales)
        return np.asarray(exponents - 1 + BIAS).astype(np.uint8)
    if tensor_scale is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = np.where(scales == 0, np.float32(0), scales / tensor_scale)
    return np.asarray(scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def decode_scales(raw: Array, powers: bool, tensor_scale: Array | None = None) -> Array:
    """Return the scales f32 in the bytes `raw`, times `tensor_scale` (None: 1): the inverse of `encode_scales`."""
    scales: Array = _E8M0[raw] if powers else np.ascontiguousarray(raw).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return scales if tensor_scale is None else scales * tensor_scale
