"""Operands of launchers: what is asked of them, and their layout in memory."""

from __future__ import annotations

from typing import TypeVar

import torch

from . import launch

Given = TypeVar("Given", torch.Tensor, torch.Tensor | None)


def learns(*tensors: torch.Tensor | None) -> bool:
    """Return whether gradients are wanted, which kernels for inference do not give."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def gradient_refusal(*tensors: torch.Tensor | None) -> str | None:
    """Say why kernels for inference do not take `tensors`, if gradients are wanted."""
    return "a gradient is wanted" if learns(*tensors) else None


def refusal(x: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Say why torch computes with x and `others` instead of a kernel, in a few words; None if a kernel does."""
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
    """Check the step of a recurrence: the state before it and where that after it is written; `bias` [width], `gate`.

    Raises:
        ValueError: they do not fit, or a state has gaps.
    """
    for state in (past, present):
        if state is not None and not (state.is_contiguous() and state.shape == past.shape):
            raise ValueError(f"past {[*past.shape]} and present {[*state.shape]} must be alike and contiguous")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias {[*bias.shape]} is not [{width}]")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate {[*gate.shape]} is not like x {[*x.shape]}")


def rows(t: torch.Tensor) -> torch.Tensor:
    """t [batch, seq, width] with tokens at one distance and widths side by side, as a slice of a projection is."""
    even = t.stride(2) == 1 and t.stride(0) == t.shape[1] * t.stride(1)
    return t if even else t.contiguous()


def side_by_side(t: Given) -> Given:
    """t [batch, width], if it is given, the numbers of a row beside each other; rows may be apart."""
    return t if t is None or t.stride(1) == 1 else t.contiguous()


def contiguous(t: Given) -> Given:
    """t, if it is given, without gaps."""
    return None if t is None else t.contiguous()


def row_stride(t: torch.Tensor | None) -> int:
    """Return how far the rows of t [batch, width] are apart; 0 without t."""
    return 0 if t is None else t.stride(0)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of 2 that is neither below n nor `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())
