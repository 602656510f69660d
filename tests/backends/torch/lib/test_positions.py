"""RoPE, its frequency scalings, and ALiBi slopes, against the formulas of their papers."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from weft.backends.torch.lib.positions import (
    alibi_slopes,
    llama3_frequencies,
    rope_frequencies,
    rotary,
    rotary_scaled,
    rotate,
    rotate_pairs,
    yarn_frequencies,
)

CPU = torch.device("cpu")


def test_rope_frequencies_fall_from_one() -> None:
    torch.testing.assert_close(rope_frequencies(4, 100.0, CPU), torch.tensor([1.0, 0.1], dtype=torch.float64))


def test_llama3_scales_low_frequencies_only() -> None:
    """Frequencies of 8, 2 and 0.5 rotations in a context of 100 tokens, with limits 1 and 4."""
    frequencies = torch.tensor([8.0, 2.5, 0.5]) * 2 * math.pi / 100
    scaled = llama3_frequencies(frequencies, 0.0, 8.0, 1.0, 4.0, 100)
    torch.testing.assert_close(scaled / frequencies, torch.tensor([1.0, 0.5 / 8 + 0.5, 1 / 8]))


def test_yarn_keeps_fast_and_divides_slow_frequencies() -> None:
    frequencies = rope_frequencies(64, 10_000.0, CPU)
    share = yarn_frequencies(frequencies, 10_000.0, 4.0, 32.0, 1.0, 2048) / frequencies
    turns = 2048 * frequencies / (2 * math.pi)
    assert torch.all(share[turns > 40] == 1)
    torch.testing.assert_close(share[turns < 0.7], torch.full_like(share[turns < 0.7], 0.25))
    assert torch.all(share.diff() <= 0)  # linear over pairs in between
    middle = share[(share < 1) & (share > 0.25)].diff()
    torch.testing.assert_close(middle, middle[:1].expand_as(middle))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_multiplies_pairs_by_a_complex_number(interleaved: bool) -> None:
    x = torch.arange(1.0, 6.0).view(1, 1, 1, 5)  # two pairs, and one element that is not rotated
    cos, sin = rotary(torch.tensor([[3]]), torch.tensor([1.0, 0.1]))
    y = (rotate_pairs if interleaved else rotate)(x, cos, sin).flatten().tolist()
    pairs = ((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3))
    for (i, j), angle in zip(pairs, (3.0, 0.3), strict=True):
        wanted = complex(i + 1, j + 1) * cmath.exp(1j * angle)
        assert complex(y[i], y[j]) == pytest.approx(wanted, rel=1e-6)
    assert y[4] == 5


def test_rotary_scaled_multiplies_cos_and_sin() -> None:
    at, frequencies = torch.tensor([[0, 2]]), torch.tensor([0.5])
    for scaled, plain in zip(rotary_scaled(at, frequencies, 1.5), rotary(at, frequencies), strict=True):
        torch.testing.assert_close(scaled, 1.5 * plain)


def test_alibi_slopes_of_8_and_12_heads() -> None:
    """Those that Press et al. state: 1/2, 1/4 … 1/256; for 12 heads, then every second slope of 16 heads."""
    assert alibi_slopes(8, 8.0, CPU).tolist() == [2.0**-i for i in range(1, 9)]
    more = alibi_slopes(12, 8.0, CPU)
    torch.testing.assert_close(more[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]))
