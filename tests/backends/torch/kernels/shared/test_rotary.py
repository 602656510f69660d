"""RoPE from given cosines and sines."""

from __future__ import annotations

import cmath

import pytest
import torch

from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.rotary import angles, pair_element, rotate_heads


@jit
def elements_kernel(out, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    pair = tl.arange(0, 4)
    tl.store(out + pair * 2, pair_element(pair, 0, ROTARY, INTERLEAVED))
    tl.store(out + pair * 2 + 1, pair_element(pair, 1, ROTARY, INTERLEAVED))


@jit
def angles_kernel(cos, sin, out_cos, out_sin, M, turns, ROTARY: tl.constexpr):
    m, pair = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    c, s = angles(cos, sin, m, pair, M, turns, ROTARY)
    tl.store(out_cos + m * 4 + pair, c)
    tl.store(out_sin + m * 4 + pair, s)


@pytest.mark.parametrize(
    ("rotary", "interleaved", "pairs"),
    [
        (8, False, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (8, True, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (4, False, [(0, 2), (1, 3), (4, 5), (6, 7)]),  # pairs after the rotated ones are adjacent
    ],
)
def test_elements_of_a_pair(device: torch.device, rotary: int, interleaved: bool, pairs: list[tuple[int, int]]) -> None:
    out = torch.zeros(4, 2, dtype=torch.int32, device=device)
    elements_kernel[(1,)](out, ROTARY=rotary, INTERLEAVED=interleaved)
    assert [tuple(row) for row in out.tolist()] == pairs


@pytest.mark.parametrize("turns", [True, False])
def test_angles_outside_of_rotation_are_zero(device: torch.device, turns: bool) -> None:
    cos, sin = (torch.full((3, 2), value, device=device) for value in (0.6, 0.8))
    found = [torch.zeros(4, 4, device=device) for _ in range(2)]
    angles_kernel[(1,)](cos, sin, *found, 3, turns, ROTARY=4)
    rotated = torch.zeros(4, 4, dtype=torch.bool)
    rotated[:3, :2] = turns
    torch.testing.assert_close(found[0].cpu(), torch.where(rotated, 0.6, 1.0))
    torch.testing.assert_close(found[1].cpu(), torch.where(rotated, 0.8, 0.0))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_heads_multiplies_pairs_by_a_complex_number(interleaved: bool) -> None:
    x, turned = torch.arange(1.0, 6.0).view(1, 1, 5), [0.3, 2.0]
    at = torch.tensor([turned])
    y = rotate_heads(x, at.cos(), at.sin(), interleaved).flatten().tolist()
    for (i, j), angle in zip(((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3)), turned, strict=True):
        assert complex(y[i], y[j]) == pytest.approx(complex(i + 1, j + 1) * cmath.exp(1j * angle), rel=1e-6)
    assert y[4] == 5  # after the pairs
