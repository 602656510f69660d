"""Products of a few rows on tensor cores, with the norm before them, against float64."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.shared.dots import dot_products
from weft.backends.torch.kernels.shared.launch import jit, tl

from ..oracles import assert_near, draw, make_norm, norm64

ROWS, OUT, WIDTH, EPS = 5, 16, 40, 1e-3


@jit
def products_kernel(x, weight, other, gain, shift, out, out_other, K, begin, end, eps, NORM: tl.constexpr):
    m, n = tl.arange(0, 8), tl.arange(0, 16)
    rows = x + tl.minimum(m, 4) * K
    y, z = dot_products(
        rows, weight + n * K, other + n * K, gain, shift, K, begin, end, eps, NORM, 8, 16, 32, 2
    )  # fmt: skip
    at, there = m[:, None] * 16 + n[None, :], m[:, None] < 5
    tl.store(out + at, y, mask=there)
    tl.store(out_other + at, z, mask=there)


@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
def test_two_products_of_normed_rows(device: torch.device, kind: str) -> None:
    """40 columns are one step of 32 and a part of another."""
    x = draw(ROWS, WIDTH, seed=0, dtype=torch.float32, device=device)
    weights = [draw(OUT, WIDTH, seed=seed, dtype=torch.float32, device=device) for seed in (1, 2)]
    norm = make_norm(kind, WIDTH, torch.float32, device)
    found = [torch.empty(ROWS, OUT, device=device) for _ in range(2)]
    products_kernel[(1,)](x, *weights, norm.gain, norm.shift, *found, WIDTH, 0, WIDTH, norm.eps, NORM=kind)
    normed = norm64(x, norm)
    for y, weight in zip(found, weights, strict=True):
        assert_near(y, normed @ weight.double().T, normed.abs() @ weight.double().abs().T, WIDTH)


def test_products_of_a_part_of_the_columns(device: torch.device) -> None:
    x, weight = (draw(n, WIDTH, seed=n, dtype=torch.float32, device=device) for n in (ROWS, OUT))
    found = [torch.empty(ROWS, OUT, device=device) for _ in range(2)]
    products_kernel[(1,)](x, weight, weight, None, None, *found, WIDTH, 8, 24, EPS, NORM="none")
    torch.testing.assert_close(found[0], x[:, 8:24] @ weight[:, 8:24].T)
    assert torch.equal(*found)
