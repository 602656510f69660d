"""What launchers ask of their operands."""

from __future__ import annotations

import torch


def wants_gradient(*operands: torch.Tensor | None) -> bool:
    """Whether a gradient is to flow back through what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def rows(t: torch.Tensor) -> torch.Tensor:
    """t [batch, seq, width] with tokens at one distance and widths side by side, as a slice of a projection is."""
    even = t.stride(2) == 1 and t.stride(0) == t.shape[1] * t.stride(1)
    return t if even else t.contiguous()
