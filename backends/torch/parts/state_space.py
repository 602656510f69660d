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
    delta [batch, seq, channels], a [channels, states], b and c [batch, seq, states], state [batch, states, channels].

    Chunks go side by side, token after token: once from zero to see what each adds, once from the state before it.
    """
    seq, size, rates, driven = x.shape[1], 1 if x.shape[1] == 1 else 32, wide(a).mT, wide(delta) * wide(x)
    state = wide(x.new_zeros(x.shape[0], *rates.shape) if past is None else past)
    cut = [F.pad(wide(t), (0, 0, 0, -seq % size)).unflatten(1, (-1, size)) for t in (delta, driven, b, c)]
    steps = list(zip(*(t.unbind(2) for t in cut), strict=True))  # of every chunk the first token, the second, …

    added = torch.zeros_like(state)[:, None]
    for at, push, into, _ in steps:
        added = scan_step(added, at[:, :-1], rates, push[:, :-1], into[:, :-1])
    before = [state]
    for kept, new in zip((cut[0][:, :-1].sum(2)[:, :, None] * rates).exp().unbind(1), added.unbind(1), strict=True):
        before.append(kept * before[-1] + new)

    h, rows = torch.stack(before, 1), []
    for at, push, into, out in steps:
        h = scan_step(h, at, rates, push, into)
        rows.append((out[..., None, :] @ h).squeeze(-2))
    y = torch.stack(rows, 2).flatten(1, 2)[:, :seq]
    y = y if d is None else y + d * x
    return y.to(x.dtype), h[:, -1].to(state.dtype if past is None else past.dtype)


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
