"""K-quants and 5-bit codes, against scalar code that follows GGML's."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.types import super_blocks
from weft.ir.types.super_blocks import pack_fives, unpack_fives


def test_five_bit_codes_have_their_high_bits_first() -> None:
    codes = np.arange(32, dtype=np.uint8)
    raw = pack_fives(codes)
    assert raw[:4].tolist() == [0, 0, 255, 255]  # the high bit of codes 16 to 31
    assert raw[4:].tolist() == [i | i << 4 for i in range(16)]
    np.testing.assert_array_equal(unpack_fives(raw), codes)


def test_five_bit_codes_are_unpacked_again(rng: np.random.Generator) -> None:
    codes = rng.integers(0, 32, (3, 7, 32), dtype=np.uint8)
    assert pack_fives(codes).shape == (3, 7, 20)
    np.testing.assert_array_equal(unpack_fives(pack_fives(codes)), codes)


def half(value: float) -> list[int]:
    """Return the two bytes of a float16."""
    return list(np.array([value], np.float16).tobytes())


def test_q4_k_has_a_scale_and_a_minimum_per_32_codes() -> None:
    raw = np.array(half(2.0) + half(0.5) + [1, 2, 3, 4] + [5, 6, 7, 8] + [0x21] * 4 + [0x3A] * 128, np.uint8)
    codes, scales, minima = super_blocks.unpack_q4_k(raw)
    assert minima is not None
    assert codes.shape == (8, 32)
    assert [set(group.tolist()) for group in codes] == [{10}, {3}] * 4  # low halves of 32 bytes, then their high halves
    np.testing.assert_array_equal(scales, 2.0 * np.array([1, 2, 3, 4, 1, 1, 1, 1]))
    np.testing.assert_array_equal(minima, -0.5 * np.array([5, 6, 7, 8, 2, 2, 2, 2]))


def test_q6_k_has_signed_scales_and_no_minima() -> None:
    raw = np.array([0x21] * 128 + [0b00_11_10_01] * 64 + [1, 255] * 8 + half(0.5), np.uint8)
    codes, scales, minima = super_blocks.unpack_q6_k(raw)
    assert minima is None and codes.shape == (16, 16)
    assert scales.tolist() == [0.5, -0.5] * 8
    # Per 128 codes: 64 low halves, then 64 high halves; two high bits each from 32 bytes, four times.
    wanted = [low + 16 * high + 128 - 32 for low, high in ((1, 1), (1, 2), (2, 3), (2, 0))] * 2
    np.testing.assert_array_equal(codes.reshape(8, 32), np.repeat(wanted, 32).reshape(8, 32))


@pytest.mark.parametrize(
    ("unpack", "size", "groups"),
    [("unpack_q2_k", 84, 16), ("unpack_q3_k", 110, 16), ("unpack_q5_k", 176, 8)],
)
def test_blocks_of_zeros_have_zero_scales(unpack: str, size: int, groups: int) -> None:
    codes, scales, minima = getattr(super_blocks, unpack)(np.zeros((2, size), np.uint8))
    assert codes.shape == (2, groups, 256 // groups) and scales.shape == (2, groups)
    assert not scales.any() and (minima is None or not minima.any())
    assert np.unique(codes).tolist() == [4 if unpack == "unpack_q3_k" else 0]  # Q3_K is shifted by 8 − 4
