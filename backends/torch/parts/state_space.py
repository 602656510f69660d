"""The recurrences of Mamba and Mamba-2. Both return y and the state after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide
from .recurrences import gated_linear_attention


def scan_step(state: Tensor, delta: Tensor, rates: Tensor, driven: Tensor, b: Tensor) -> Tensor:
    """e^{Δ A} h + Δ x Bᵀ: state [..., states, channels], delta and driven = Δ x [..., channels], b [..., states]."""
    return torch.exp(delta[..., None, :] * rates) * state + b[..., :, None] * driven[..., None, :]


def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t (Mamba, Gu & Dao 2023, arXiv 2312.00752): x and
    delta [batch, seq, channels], a [channels, states], b and c [batch, seq, states], h [batch, states, channels]."""
    rates, state = wide(a).mT, wide(x.new_zeros(x.shape[0], *a.mT.shape) if past is None else past)
    operands = wide(delta), wide(delta) * wide(x), wide(b), wide(c)
    if x.shape[1] == 1:
        step, driven, into, out = (t[:, 0] for t in operands)
        state = scan_step(state, step, rates, driven, into)
        y = out[:, None] @ state
    else:
        y, state = scan_chunks(state, rates, *operands)
    y = y if d is None else y + d * wide(x)
    return y.to(x.dtype), state if past is None else state.to(past.dtype)


def scan_chunks(
    state: Tensor, rates: Tensor, delta: Tensor, driven: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """`selective_scan` of chunks of 32 tokens side by side: once from zero, to see what each adds to the state, then
    from the state before it. delta and driven = Δ x [batch, seq, channels], b and c [batch, seq, states]."""
    cut = [F.pad(t, (0, 0, 0, -t.shape[1] % 32)).unflatten(1, (-1, 32)) for t in (delta, driven, b, c)]
    tokens = list(zip(*(t.unbind(2) for t in cut), strict=True))  # the first of every chunk, the second, …
    added = torch.zeros_like(state)[:, None]
    for step, drive, into, _ in tokens:
        added = scan_step(added, step[:, :-1], rates, drive[:, :-1], into[:, :-1])
    kept = (cut[0][:, :-1].sum(2)[:, :, None] * rates).exp()
    before = [state]
    for old, new in zip(kept.unbind(1), added.unbind(1), strict=True):
        before.append(old * before[-1] + new)
    h, rows = torch.stack(before, 1), []  # [batch, chunks, states, channels]
    for step, drive, into, out in tokens:
        h = scan_step(h, step, rates, drive, into)
        rows.append((out[..., None, :] @ h).squeeze(-2))
    return torch.stack(rows, 2).flatten(1, 2)[:, : delta.shape[1]], h[:, -1]


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
    """h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t per head (Mamba-2, Dao & Gu 2024, arXiv
    2405.21060): x [batch, seq, heads·p], delta [batch, seq, heads], a and d [heads], b and c [batch, seq,
    groups·states], state [batch, heads, states, p]."""
    by_head, delta = wide(x).unflatten(-1, (heads, -1)), wide(delta)
    driven = (by_head * delta[..., None]).flatten(-2)
    y, state = gated_linear_attention(c, b, driven, delta * a, past, heads=heads, groups=groups)
    y = y if d is None else y + (by_head * d[:, None]).flatten(-2)
    return y.to(x.dtype), state
