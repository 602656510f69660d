"""Operands of kernel launchers: checks of shape and dtype, reasons to fall back to torch, and memory layout."""

from __future__ import annotations

from typing import TypeVar

import torch

from . import launch

Given = TypeVar("Given", torch.Tensor, torch.Tensor | None)


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Return whether any of `tensors` requires a gradient, which inference kernels do not compute."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def gradient_refusal(*tensors: torch.Tensor | None) -> str | None:
    """Return the reason to fall back to torch if any of `tensors` requires a gradient, else None."""
    return "a gradient is required" if requires_grad(*tensors) else None


def refusal(x: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Return the reason to fall back to torch for x and `others`, in a few words; None if the kernel can run."""
    if any(t is not None and t.dtype == torch.float64 for t in (x, *others)):
        return "the kernel computes in f32"
    return gradient_refusal(x, *others) or launch.refusal(x)


def check_step(
    x: torch.Tensor,
    past: torch.Tensor,
    present: torch.Tensor | None,
    width: int = 0,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> None:
    """Check the operands of a recurrence step: states `past` and `present` (if given) are contiguous and of one shape,
    `bias` is [width], and `gate` has the shape of x. Raise ValueError if one does not fit."""
    if present is not None and present.shape != past.shape:
        raise ValueError(f"present {[*present.shape]} must have the shape of past {[*past.shape]}")
    if not past.is_contiguous() or (present is not None and not present.is_contiguous()):
        raise ValueError("past and present must be contiguous")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias {[*bias.shape]} is not [{width}]")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate {[*gate.shape]} must have the shape of x {[*x.shape]}")


def contiguous_tokens(t: torch.Tensor) -> torch.Tensor:
    """Return t [batch, seq, width] with stride 1 along width, and one stride between consecutive tokens of all batch
    rows. A slice of a projection has these strides; other layouts are copied."""
    even = t.stride(2) == 1 and t.stride(0) == t.shape[1] * t.stride(1)
    return t if even else t.contiguous()


def contiguous_rows(t: Given) -> Given:
    """Return t [batch, width] with stride 1 along width; copy it if its stride is not 1. None stays None."""
    return t if t is None or t.stride(1) == 1 else t.contiguous()


def contiguous(t: Given) -> Given:
    """Return t in contiguous memory; None stays None."""
    return None if t is None else t.contiguous()


def row_stride(t: torch.Tensor | None) -> int:
    """Return the row stride of t [batch, width], in elements; 0 without t."""
    return 0 if t is None else t.stride(0)


def power_of_2(n: int, least: int = 1) -> int:
    """Return the smallest power of 2 that is at least n, or `least` if that is larger."""
    return max(least, 1 << max(n - 1, 0).bit_length())
