"""Linear attention: layers whose past is a state of constant size [batch, heads, d, dv], computed in chunks of tokens.

Inside a chunk it is attention, between chunks the state is carried. All return y and the state after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide


def chunks(x: Tensor, heads: int, size: int) -> Tensor:
    """x [batch, seq, heads·d] in f32 as [batch, chunks, heads, size, d], zeros at the end."""
    padded = F.pad(wide(x), (0, 0, 0, -x.shape[1] % size))
    return padded.unflatten(1, (-1, size)).unflatten(-1, (heads, -1)).transpose(2, 3)


def joined(y: Tensor, like: Tensor) -> Tensor:
    """y [batch, chunks, heads, size, d] as [batch, seq, heads·d], in the dtype of `like` and as long."""
    return y.transpose(2, 3).flatten(-2).flatten(1, 2)[:, : like.shape[1]].to(like.dtype)


def decay_between(gates: Tensor) -> Tensor:
    """e^(g_{s+1} + … + g_t) for s ≤ t, else 0, of gates [..., n] as [..., t, s]. Every sum is made of its own terms:
    differences of running sums would lose small gates beside large ones."""
    sums = gates[..., None].expand(*gates.shape, gates.shape[-1]).tril(-1).cumsum(-2)
    return sums.exp().tril()


def state_of(past: Tensor | None, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """The state [batch, heads, d, dv] before the first token: `past` in f32, or zeros."""
    if past is not None:
        return wide(past)
    return wide(v.new_zeros(v.shape[0], heads, k.shape[-1] // groups, v.shape[-1] // heads))


def plain_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor | None = None, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t: q and k [batch, seq, groups·d], v [batch, seq, heads·dv] → y like v."""
    first, size = state_of(past, k, v, heads, groups), 1 if v.shape[1] == 1 else 64
    q, k = (chunks(t, groups, size).repeat_interleave(heads // groups, 2) for t in (q, k))
    values = chunks(v, heads, size)
    states = torch.cat([first[:, None], k.mT @ values], 1).cumsum(1)
    y = (q @ k.mT).tril() @ values + q @ states[:, :-1]
    return joined(y, v), states[:, -1].to(first.dtype if past is None else past.dtype)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, past: Tensor | None = None, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t with gates g ≤ 0 [batch, seq, heads], q and k [batch, seq,
    groups·d], v [batch, seq, heads·dv] → y like v (chunked as in Dao & Gu 2024, arXiv 2405.21060)."""
    first, size = state_of(past, k, v, heads, groups), 1 if v.shape[1] == 1 else 64
    q, k = (chunks(t, groups, size).repeat_interleave(heads // groups, 2) for t in (q, k))
    values, gate = chunks(v, heads, size), chunks(gates, heads, size).squeeze(-1)  # [batch, chunks, heads, size]
    between = decay_between(gate)
    written = k.mT @ (values * between[..., -1, :, None])
    carried = decay_between(F.pad(gate.sum(-1).transpose(1, 2), (1, 0)))  # [batch, heads, chunks + 1, chunks + 1]
    states = torch.einsum("bhij,bjhde->bihde", carried, torch.cat([first[:, None], written], 1))
    y = (q @ k.mT * between) @ values + gate.cumsum(-1).exp()[..., None] * (q @ states[:, :-1])
    return joined(y, v), states[:, -1].to(first.dtype if past is None else past.dtype)


def keyed_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, past: Tensor | None = None, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t with a gate for every key, g ≤ 0 [batch, seq, heads·d]
    (Yang 2023, arXiv 2312.06635); q and k [batch, seq, groups·d], v [batch, seq, heads·dv] → y like v."""
    first, size = state_of(past, k, v, heads, groups), 1 if v.shape[1] == 1 else 16
    q, k = (chunks(t, groups, size).repeat_interleave(heads // groups, 2) for t in (q, k))
    values, gate = chunks(v, heads, size), chunks(gates, heads, size)
    between = decay_between(gate.mT)  # [batch, chunks, heads, d, t, s]
    scores = torch.einsum("bnhtd,bnhsd,bnhdts->bnhts", q, k, between)
    written = (k.mT * between[..., -1, :]) @ values
    states = [first]
    for kept, added in zip(gate.sum(-2).exp().unbind(1), written.unbind(1), strict=True):
        states.append(kept[..., None] * states[-1] + added)
    y = scores @ values + (q * gate.cumsum(-2).exp()) @ torch.stack(states[:-1], 1)
    return joined(y, v), states[-1].to(first.dtype if past is None else past.dtype)


def elu_plus_one(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 in f32, the features of linear attention (Katharopoulos 2020, arXiv 2006.16236)."""
    x = wide(x)
    return x.clamp(max=0).exp() + x.relu()


def linear_attention(q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Σ_m (q_n·k_m) v_m / Σ_m q_n·k_m per head with features q and k [batch, seq, heads·d] (zero where masked), of
    which `turned_*`, with or without rotary positions, stand in the numerator; v [batch, keys, heads·dv]."""
    q, k, turned_q, turned_k, values = (t.unflatten(-1, (heads, -1)) for t in (q, k, turned_q, turned_k, wide(v)))
    state = torch.einsum("bshd,bshe->bhde", turned_k, values)
    share = torch.einsum("bshd,bhd->bsh", q, k.sum(1))
    return (torch.einsum("bshd,bhde->bshe", turned_q, state) / share[..., None]).flatten(-2).to(v.dtype)


def causal_linear_attention(
    q: Tensor,
    k: Tensor,
    turned_q: Tensor,
    turned_k: Tensor,
    v: Tensor,
    past: tuple[Tensor, Tensor] | None = None,
    *,
    heads: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`linear_attention` to m ≤ n; past and present are Σ k vᵀ [batch, heads, d, dv] and Σ k [batch, heads, d]."""
    before, norm = (None, None) if past is None else past
    y, state = plain_linear_attention(turned_q, turned_k, wide(v), before, heads=heads, groups=heads)
    seen = k.unflatten(-1, (heads, -1)).cumsum(1)  # [batch, seq, heads, d]
    seen = seen if norm is None else seen + wide(norm)[:, None]
    share = (q.unflatten(-1, (heads, -1)) * seen).sum(-1, keepdim=True)
    y = (y.unflatten(-1, (heads, -1)) / share).flatten(-2).to(v.dtype)
    return y, (state, seen[:, -1].to(state.dtype))
