"""The recurrences of Mamba and Mamba-2 in torch. Both return y and the final state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.prefill.mamba2_scan import has_mamba2_scan, mamba2_scan
from ..kernels.prefill.mamba_scan import has_mamba_scan, mamba_scan
from .chunked_recurrences import MOST_ON_CPUS, chunk_count, chunk_states, first_tokens, linear_recurrence
from .indexing import wide


def scan_step(state: Tensor, delta: Tensor, rates: Tensor, driven: Tensor, b: Tensor) -> Tensor:
    """Return the next state e^{Δ A} h + Δ x Bᵀ: state h [..., states, channels], rates A [states, channels], delta and
    driven = Δ x [..., channels], b [..., states]."""
    return torch.exp(delta[..., None, :] * rates) * state + b[..., :, None] * driven[..., None, :]


def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y and the final state of h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t (Mamba, Gu & Dao
    2023, arXiv 2312.00752): x and delta [batch, seq, channels], a [channels, states], b and c [batch, seq, states], d
    [channels], h and past (None: zeros) [batch, states, channels]."""
    rates, state = wide(a).mT, wide(x.new_zeros(x.shape[0], *a.mT.shape) if past is None else past)
    operands = wide(delta), wide(delta) * wide(x), wide(b), wide(c)
    large = state.numel() > MOST_ON_CPUS and not x.is_cuda and not torch.compiler.is_compiling()
    if large or x.shape[1] == 1:
        rows = []
        for step, driven, into, out in zip(*(t.unbind(1) for t in operands), strict=True):
            state = scan_step(state, step, rates, driven, into)
            rows.append((out[:, None] @ state)[:, 0])
        y = torch.stack(rows, 1)
    else:
        y, state = scan_chunks(state, rates, *operands)
    y = y if d is None else y + d * wide(x)
    return y.to(x.dtype), state if past is None else state.to(past.dtype)


def scan_chunks(
    state: Tensor, rates: Tensor, delta: Tensor, driven: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` in parallel over chunks of 32 tokens: once from a zero state, for the term that each
    chunk adds to the state, then from its initial state. delta and driven = Δ x [batch, seq, channels], b and c [batch,
    seq, states]."""
    count = chunk_count(delta.shape[1], 32)
    padding = (0, 0, 0, count * 32 - delta.shape[1])
    cut = [F.pad(t, padding).view(t.shape[0], count, 32, t.shape[2]) for t in (delta, driven, b, c)]
    chunked = cut[:3] if torch.compiler.is_exporting() else [t[:, :-1] for t in cut[:3]]  # all chunks, one too many
    steps, *operands = chunked
    added = torch.zeros_like(state)[:, None]  # [batch, chunks but the last, states, channels]
    for step, drive, into in zip(steps.unbind(2), *(t.unbind(2) for t in operands), strict=True):
        added = scan_step(added, step, rates, drive, into)
    h, rows = chunk_states(state, (steps.sum(2)[:, :, None] * rates).exp(), added)[:, :count], []
    for step, drive, into, out in zip(*(t.unbind(2) for t in cut), strict=True):
        h = scan_step(h, step, rates, drive, into)
        rows.append((out[..., None, :] @ h).squeeze(-2))
    return first_tokens(torch.stack(rows, 2).flatten(1, 2), delta.shape[1]), h[:, -1]


def ssd(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    past: Tensor | None = None,
    *,
    heads: int,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Return y and the final state of h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t per head (Mamba-2,
    Dao & Gu 2024, arXiv 2405.21060): x [batch, seq, heads·p], delta [batch, seq, heads], a and d [heads], b and c
    [batch, seq, groups·states], past (None: zeros) and the state [batch, heads, states, p]."""
    by_head, delta = wide(x).unflatten(-1, (heads, -1)), wide(delta)
    driven = (by_head * delta[..., None]).flatten(-2)
    y, state = linear_recurrence(c, b, driven, delta * a, past=past, heads=heads, groups=groups)
    y = y if d is None else y + (by_head * d[:, None]).flatten(-2)
    return y.to(x.dtype), state


def run_mamba(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run `selective_scan` with the Triton kernel if it supports these operands, else with PyTorch operators."""
    if has_mamba_scan(x, a, delta, b, c, d, past):
        return mamba_scan(x, delta, a, b, c, d, past)
    return selective_scan(x, delta, a, b, c, d, past)


def run_mamba2(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    past: Tensor | None = None,
    **sizes: Any,
) -> tuple[Tensor, Tensor]:
    """Run `ssd` with the Triton kernels if they support these operands, else with PyTorch operators."""
    if has_mamba2_scan(x, b, delta, a, c, d, past, **sizes):
        return mamba2_scan(x, delta, a, b, c, d, past, **sizes)
    return ssd(x, delta, a, b, c, d, past, **sizes)
