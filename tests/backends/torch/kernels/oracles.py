"""Float64 references of kernels, and tolerances for rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from weft.backends.torch.kernels.shared.norm import Norm


def sigma(x: torch.Tensor) -> torch.Tensor:
    """The logistic function."""
    return 1 / (1 + torch.exp(-x))


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "silu": lambda x: x * sigma(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_quick": lambda x: x * sigma(1.702 * x),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": sigma,
    "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
}


def draw(*shape: int, seed: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def far_caches(file: Path, shape: tuple[int, int, int], axis: int, device: torch.device) -> list[torch.Tensor]:
    """Two caches [1, *shape] of bf16 zeros whose last index of `axis` lies 2³¹ numbers behind the first. On a CPU they
    are in a `file` with holes, which takes no room."""
    near = math.prod(shape)
    size, strides = 2**31 + 2 * near, [near, shape[1] * shape[2], shape[2], 1]
    strides[axis] = -(-(2**31) // (shape[axis - 1] - 1) // 16) * 16
    size += 16 * shape[axis - 1]
    if device.type == "cpu":
        numbers = torch.from_file(str(file), shared=True, size=size, dtype=torch.bfloat16)
    else:
        numbers = torch.zeros(size, dtype=torch.bfloat16, device=device)
    return [numbers.as_strided((1, *shape), strides, at) for at in (0, near)]


def make_norm(kind: str, width: int, dtype: torch.dtype, device: torch.device) -> Norm:
    """A norm of `kind` with weights drawn, and an ε that shows."""
    gain = draw(width, seed=3, dtype=dtype, device=device) if kind != "none" else None
    shift = draw(width, seed=4, dtype=dtype, device=device) if kind == "layer" else None
    return Norm(kind, gain, shift, eps=1e-3)


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
