"""Linear attention: layers whose past is a state of constant size [batch, heads, d, dv], computed in chunks of tokens.

Inside a chunk it is attention, between chunks the state is carried. All return y and the state after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide


def chunk_count(tokens: int, size: int) -> int:
    """Return the number of chunks of `size` in `tokens`; one more in an exported program, where a symbolic count must
    not specialize to 1."""
    return (tokens + (2 * size if torch.compiler.is_exporting() else size) - 1) // size


def chunks(x: Tensor, heads: int, size: int) -> Tensor:
    """x [batch, seq, heads·d] in f32 as [batch, chunks, heads, size, d], zeros at the end."""
    count = chunk_count(x.shape[1], size)
    padded = F.pad(wide(x), (0, 0, 0, count * size - x.shape[1]))
    return padded.view(x.shape[0], count, size, heads, x.shape[2] // heads).transpose(2, 3)


def first_tokens(y: Tensor, count: int) -> Tensor:
    """The first `count` of y [batch, seq, ...]."""
    if torch.compiler.is_exporting():  # a slice asks whether it is all
        return y.index_select(1, torch.arange(count, device=y.device))
    return y[:, :count]


def joined(y: Tensor, like: Tensor) -> Tensor:
    """y [batch, chunks, groups, heads of a group, size, d] as [batch, seq, heads·d], the length and dtype of `like`."""
    y = y.permute(0, 1, 4, 2, 3, 5).flatten(3).flatten(1, 2)
    return first_tokens(y, like.shape[1]).to(like.dtype)


def decay_between(gates: Tensor) -> Tensor:
    """e^(g_{s+1} + … + g_t) for s ≤ t, else 0, of gates [..., n] as [..., t, s]. Every sum is made of its own terms:
    differences of running sums would lose small gates beside large ones."""
    sums = gates[..., None].expand(*gates.shape, gates.shape[-1]).tril(-1).cumsum(-2)
    return sums.exp().tril()


def carried(first: Tensor, kept: Tensor, written: Tensor) -> Tensor:
    """The states before every chunk and after the last, S_{i+1} = kept_i S_i + written_i from S_0 = first [batch, ...]:
    kept and written [batch, chunks, ...] → [batch, chunks + 1, ...]."""
    if torch.compiler.is_exporting():  # for all numbers of chunks: sums of 2, 4, 8 … of them (Hillis & Steele 1986)
        states, kept = torch.cat((first[:, None], written), 1), F.pad(kept, (0, 0) * (kept.dim() - 2) + (1, 0))
        for step in (2**i for i in range(16)):
            shift = (0, 0) * (kept.dim() - 2) + (step, 0)
            states = states + kept * F.pad(states, shift)[:, :-step]
            kept = kept * F.pad(kept, shift)[:, :-step]
        return states
    found = [first]
    for old, new in zip(kept.unbind(1), written.unbind(1), strict=True):
        found.append(old * found[-1] + new)
    return torch.stack(found, 1)


def zero_state(k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """The state [batch, heads, d, dv] before the first token, in f32."""
    return wide(v.new_zeros(v.shape[0], heads, k.shape[-1] // groups, v.shape[-1] // heads))


def one_token(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """y = Sᵀ q and S = `kept` + k vᵀ [batch, heads, d, dv]: q and k [batch, 1, groups·d], v [batch, 1, heads·dv]."""
    heads = kept.shape[1]
    q, k = (wide(t)[:, 0].unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for t in (q, k))
    state = kept + k[..., None] * wide(v)[:, 0].unflatten(-1, (heads, 1, -1))
    return (q[..., None, :] @ state).flatten(1)[:, None].to(v.dtype), state


def plain_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor | None = None, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t: q and k [batch, seq, groups·d], v [batch, seq, heads·dv] → y like v."""
    first = zero_state(k, v, heads, groups) if past is None else past
    if v.shape[1] == 1:
        y, state = one_token(q, k, v, wide(first), groups)
        return y, state.to(first.dtype)
    qc, kc = chunks(q, groups, 64), chunks(k, groups, 64)
    vc = chunks(v, heads, 64).unflatten(2, (groups, -1))  # [batch, chunks, groups, heads of a group, size, dv]
    written = torch.einsum("bcgsd,bcghse->bcghde", kc, vc)
    states = torch.cat((wide(first).unflatten(1, (groups, -1))[:, None], written), 1).cumsum(1)
    y = (qc @ kc.mT).tril()[:, :, :, None] @ vc + torch.einsum("bcgtd,bcghde->bcghte", qc, states[:, :-1])
    return joined(y, v), states[:, -1].flatten(1, 2).to(first.dtype)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, past: Tensor | None = None, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t with gates g ≤ 0 [batch, seq, heads], q and k [batch, seq,
    groups·d], v [batch, seq, heads·dv] → y like v (chunks as in Dao & Gu 2024, arXiv 2405.21060)."""
    gates = gates.to(torch.promote_types(gates.dtype, v.dtype))  # those of a table stay f32 in a model of doubles
    first = zero_state(k, v, heads, groups) if past is None else past
    if v.shape[1] == 1:
        y, state = one_token(q, k, v, wide(gates).exp().mT[..., None] * first, groups)
        return y, state.to(first.dtype)
    qc, kc = chunks(q, groups, 64), chunks(k, groups, 64)
    vc, gc = (chunks(t, heads, 64).unflatten(2, (groups, -1)) for t in (v, gates))
    gc = gc.squeeze(-1)  # [batch, chunks, groups, heads of a group, size]
    between = decay_between(gc)
    written = torch.einsum("bcgsd,bcghse->bcghde", kc, vc * between[..., -1, :, None])
    kept = decay_between(F.pad(gc.sum(-1).movedim(1, -1), (1, 0)))  # [batch, groups, heads, chunks + 1, chunks + 1]
    written = torch.cat((wide(first).unflatten(1, (groups, -1))[:, None], written), 1)
    states = torch.einsum("bghij,bjghde->bighde", kept, written)
    old = gc.cumsum(-1).exp()[..., None] * torch.einsum("bcgtd,bcghde->bcghte", qc, states[:, :-1])
    y = ((qc @ kc.mT)[:, :, :, None] * between) @ vc + old
    return joined(y, v), states[:, -1].flatten(1, 2).to(first.dtype)


def keyed_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, past: Tensor | None = None, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t with a gate for every key, g ≤ 0 [batch, seq, heads·d]
    (Yang 2023, arXiv 2312.06635); q and k [batch, seq, groups·d], v [batch, seq, heads·dv] → y like v."""
    first = zero_state(k, v, heads, groups) if past is None else past
    if v.shape[1] == 1:
        y, state = one_token(q, k, v, wide(gates)[:, 0].exp().unflatten(-1, (heads, -1, 1)) * first, groups)
        return y, state.to(first.dtype)
    qc, kc = (chunks(t, groups, 16)[:, :, :, None] for t in (q, k))  # [batch, chunks, groups, 1, size, d]
    vc, gc = (chunks(t, heads, 16).unflatten(2, (groups, -1)) for t in (v, gates))
    kept, scores = gc.exp(), []  # [batch, chunks, groups, heads of a group, size, d]
    seen = kc[..., :0, :].expand_as(kept[..., :0, :])
    for t in range(16):  # of every chunk: what is left of the keys seen, when query t comes
        new = kc[..., t : t + 1, :].expand_as(kept[..., :1, :])
        seen = torch.cat((seen * kept[..., t : t + 1, :], new), -2)
        scores.append(F.pad((seen @ qc[..., t, :, None]).squeeze(-1), (0, 15 - t)))
    states = carried(wide(first).unflatten(1, (groups, -1)), gc.sum(-2).exp()[..., None], seen.mT @ vc)
    y = torch.stack(scores, -2) @ vc + (qc * gc.cumsum(-2).exp()) @ states[:, :-1]
    return joined(y, v), states[:, -1].flatten(1, 2).to(first.dtype)


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
