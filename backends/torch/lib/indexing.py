"""Gather and scatter of rows, top-k, and a softmax for rows that may be fully masked."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in f32 (f64 stays f64), for sums of many terms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return the elements of x [batch, n, ...] at indices [batch, m] of axis 1, [batch, m, ...]."""
    batch = torch.arange(x.shape[0], device=x.device)
    return x[batch[:, None], indices]


def scatter_rows(x: Tensor, rows: Tensor, indices: Tensor, dim: int = 1) -> Tensor:
    """Return x [batch, …, n, …] with rows [batch, …, m, …] written at indices [batch, m] of `dim`. Of equal indices the
    last wins."""
    order = torch.arange(indices.shape[1], device=x.device).expand_as(indices)
    last = order.new_full((x.shape[0], x.shape[dim]), -1).scatter_reduce(1, indices.long(), order, "amax")
    last = last.view(x.shape[0], *[1] * (dim - 1), x.shape[dim], *[1] * (x.dim() - dim - 1))
    return torch.where(last < 0, x, rows.gather(dim, last.clamp(min=0).expand_as(x)))


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest elements of the last axis, largest first, and their indices. The first wins a tie."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def softmax_or_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """Return the softmax along `dim`; zeros where all elements along `dim` are −∞."""
    masked = (x == -math.inf).all(dim, keepdim=True)
    return F.softmax(x.masked_fill(masked, 0), dim).masked_fill(masked, 0)
