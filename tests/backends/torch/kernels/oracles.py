"""What kernels must compute, in float64, and how far rounding may take them from it."""

from __future__ import annotations

import math

import torch

from weft.backends.torch.kernels.norm import Norm


def draw(*shape: int, seed: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def norm64(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """norm(x) in float64, from the formulas of the papers."""
    y = x.double()
    if norm.kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    if norm.kind != "none":
        y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    y = y if norm.gain is None else y * norm.gain.double()
    return y if norm.shift is None else y + norm.shift.double()


def assert_near(
    found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, reduced: int, *, inner: torch.dtype = torch.float32
) -> None:
    """`found` is `exact` to a rounding of its dtype, and of sums over `reduced` terms computed in `inner`.

    `size` are the sums of the absolute terms: what the rounding errors of the terms are relative to.
    """
    assert found.shape == exact.shape
    error = (found.double() - exact).abs()
    allowed = torch.finfo(found.dtype).eps * exact.abs() + torch.finfo(inner).eps * size
    allowed = allowed + 2 * math.sqrt(reduced) * torch.finfo(torch.float32).eps * size
    worst = (error / allowed).max().item()
    assert worst <= 1, f"the worst error is {worst:.3g} times what is allowed"
