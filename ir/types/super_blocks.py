"""Unpack K-quants of GGUF (blocks of 256 elements in groups of 16 or 32), and pack and unpack 5-bit codes.

A block of a K-quant has one f16 scale, and another for its minima if it has any; each is multiplied by a small integer
per group. Codes without a minimum are shifted when they are unpacked, so that 2^{bits−1} represents 0.

| type | code | scale and minimum of a group | group |
|---|---|---|---|
| Q2_K | 2 bits | 4 bits each | 16 |
| Q3_K | 3 bits | 6 bits, signed | 16 |
| Q4_K | 4 bits | 6 bits each | 32 |
| Q5_K | 5 bits | 6 bits each | 32 |
| Q6_K | 6 bits | 8 bits, signed | 16 |
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Groups = tuple[Array, Array, Array | None]  # codes u8 [..., groups, group]; scales and minima f32 [..., groups]

SIZE = 256  # elements in a block of a K-quant


def pack_fives(codes: Array) -> Array:
    """Pack 5-bit codes [..., 32] into bytes [..., 20]: 4 bytes of the high bits, then 16 of the low 4 bits.

    Byte i of the 16 holds code i in its low half and code i + 16 in its high half.
    """
    first, second = np.split(codes & 15, 2, -1)
    return np.concatenate([np.packbits(codes >> 4, axis=-1, bitorder="little"), first | (second << 4)], -1)


def unpack_fives(raw: Array) -> Array:
    """Unpack bytes [..., 20] to 5-bit codes [..., 32]: the inverse of `pack_fives`."""
    high = np.unpackbits(raw[..., :4], axis=-1, bitorder="little")
    return np.asarray(np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], -1) | (high << 4))


def unpack_q2_k(raw: Array) -> Groups:
    """Unpack blocks of Q2_K u8 [..., 84] to (codes of 2 bits, scales, minima)."""
    codes = _unpack_planes(raw[..., 16:80], 2, 32).reshape(*raw.shape[:-1], 16, 16)
    scales = _read_halves(raw[..., 80:82]) * (raw[..., :16] & 15)
    return codes, scales, -(_read_halves(raw[..., 82:84]) * (raw[..., :16] >> 4))


def unpack_q3_k(raw: Array) -> Groups:
    """Unpack blocks of Q3_K u8 [..., 110] to (codes of 4 bits, scales, None)."""
    low = _unpack_planes(raw[..., 32:96], 2, 32)
    codes = low + (_unpack_planes(raw[..., :32], 1, 32) << 2) + np.uint8(8 - 4)
    # The low 4 bits of the first 8 scales are in the low halves of 8 bytes, those of the last 8 in the high ones.
    small = _unpack_planes(raw[..., 96:104], 4, 8).reshape(*raw.shape[:-1], 16)
    large = _unpack_planes(raw[..., 104:108], 2, 4).reshape(*raw.shape[:-1], 16)
    scales = _read_halves(raw[..., 108:110]) * ((small | large << 4).astype(np.float32) - 32)
    return codes.reshape(*raw.shape[:-1], 16, 16), scales, None


def unpack_q4_k(raw: Array) -> Groups:
    """Unpack blocks of Q4_K u8 [..., 144] to (codes of 4 bits, scales, minima)."""
    return _unpack_planes(raw[..., 16:], 4, 32), *_unpack_scales_and_minima(raw)


def unpack_q5_k(raw: Array) -> Groups:
    """Unpack blocks of Q5_K u8 [..., 176] to (codes of 5 bits, scales, minima)."""
    low, high = _unpack_planes(raw[..., 48:], 4, 32), _unpack_planes(raw[..., 16:48], 1, 32)
    return low | high << 4, *_unpack_scales_and_minima(raw)


def unpack_q6_k(raw: Array) -> Groups:
    """Unpack blocks of Q6_K u8 [..., 210] to (codes of 8 bits, scales, None)."""
    low = _unpack_planes(raw[..., :128], 4, 64).reshape(*raw.shape[:-1], SIZE)
    high = _unpack_planes(raw[..., 128:192], 2, 32).reshape(*raw.shape[:-1], SIZE)
    codes = (low | high << 4) + np.uint8(128 - 32)
    scales = _read_halves(raw[..., 208:210]) * raw[..., 192:208].view(np.int8)
    return codes.reshape(*raw.shape[:-1], 16, 16), scales, None


def _unpack_planes(raw: Array, bits: int, run: int) -> Array:
    """Unpack bytes to codes [..., runs, run]: of each `run` bytes the lowest `bits`, then the next higher bits, …"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = raw.reshape(*raw.shape[:-1], -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return planes.reshape(*raw.shape[:-1], -1, run)


def _read_halves(raw: Array) -> Array:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _unpack_scales_and_minima(raw: Array) -> tuple[Array, Array]:
    """Return the scales and minima f32 [..., 8] of the 8 groups of Q4_K or Q5_K blocks `raw` [..., bytes].

    Bytes 4 to 11 have the 6-bit scales and minima of groups 0 to 3 in their low 6 bits, and the high 2 bits of those of
    groups 4 to 7. Bytes 12 to 15 have the low 4 bits of the scale (low half) and minimum (high half) of groups 4 to 7.
    """
    scales, minima, low = np.split(raw[..., 4:16], 3, -1)
    scales = np.concatenate([scales & 63, low & 15 | scales >> 2 & 48], -1)
    minima = np.concatenate([minima & 63, low >> 4 | minima >> 2 & 48], -1)
    return _read_halves(raw[..., :2]) * scales, -(_read_halves(raw[..., 2:4]) * minima)
