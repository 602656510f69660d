"""The delta rule token by token and over chunks of tokens: each token replaces what the state holds under its key.

In a chunk the changes of all tokens are one triangular system (the UT transform of Yang 2024, arXiv 2406.06484).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide
from .recurrences import chunks, decay_between, joined, zero_state


def changed(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, kept: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """One token: S = `kept` + β k (v − keptᵀ k)ᵀ [batch, heads, d, dv] and y = Sᵀ q."""
    heads = kept.shape[1]
    q, k = (wide(t)[:, 0].unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for t in (q, k))
    change = wide(v)[:, 0].unflatten(-1, (heads, 1, -1)) - k[..., None, :] @ kept
    state = kept + k[..., None] * (wide(beta)[:, 0, :, None, None] * change)
    return (q[..., None, :] @ state).flatten(1)[:, None].to(v.dtype), state


def unit_inverse(links: Tensor) -> Tensor:
    """(I + links)⁻¹ of `links` [..., n, n] strictly below the diagonal, n a power of 2.

    Blocks on the diagonal double: of [[A, 0], [C, B]] the inverse is [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]].
    """
    n = links.shape[-1]
    inverse = torch.ones_like(links[..., :1])[..., None]  # [..., blocks, size, size]
    for size in (2**i for i in range(n.bit_length() - 1)):
        wide = (n // (2 * size), 2 * size)
        pairs = links.unflatten(-1, wide).unflatten(-3, wide).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        above, below = inverse.unflatten(-3, (-1, 2)).unbind(-3)
        corner = below @ pairs[..., size:, :size] @ above
        inverse = torch.cat((F.pad(above, (0, size)), torch.cat((-corner, below), -1)), -2)
    return inverse.squeeze(-3)


def through_chunks(first: Tensor, kept: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """The states before every chunk and the last, S_{i+1} = kept_i S_i + written_i from S_0 = first [batch, ...]:
    matrices kept and written [batch, chunks, ...]."""
    if torch.compiler.is_exporting():  # for all numbers of chunks: products of 2, 4, 8 … of them (Hillis & Steele 1986)
        rest = (0, 0) * (kept.dim() - 2)
        start = F.pad(first[:, None], (*rest, 0, kept.shape[1] - 1))  # slices would ask for the number of chunks
        states = written + kept @ start
        for step in (2**i for i in range(16)):
            earlier, gone = (F.pad(t, (*rest, step, 0))[:, :-step].contiguous() for t in (states, kept))
            states, kept = states + kept @ earlier, kept @ gone
        return start + F.pad(states, (*rest, 1, 0))[:, :-1], states[:, -1]
    found = [first]
    for old, new in zip(kept.unbind(1), written.unbind(1), strict=True):
        found.append(old @ found[-1] + new)
    return torch.stack(found[:-1], 1), found[-1]


def delta_chunks(
    first: Tensor,
    v: Tensor,
    beta: Tensor,
    pairs: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor],
    after: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """y [batch, chunks, groups, heads of a group, size, dv] and the last state, from `first` [batch, heads, d, dv].

    `pairs`: k_t·k_s and q_t·k_s, decayed from s to t. `before`: k and q, decayed from the chunk's beginning; `after`:
    k, decayed to its end; `kept`: what is left of a state behind it. v and beta [..., size, dv or 1].
    """
    (links, scores), (k, q) = pairs, before
    inverse = unit_inverse((beta * links).tril(-1))
    own, seen = inverse @ (beta * v), inverse @ (beta * k)  # changes from a state of zero; less these times the state
    whole = torch.diag_embed(kept.squeeze(-1)) - after.mT @ seen
    states, last = through_chunks(wide(first).unflatten(1, (links.shape[2], -1)), whole, after.mT @ own)
    y = scores.tril() @ (own - seen @ states) + q @ states
    return y, last.flatten(1, 2).to(first.dtype)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor | None = None,
    past: Tensor | None = None,
    *,
    heads: int,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """S = e^{g_t} S_{t−1}, S_t = S + β_t k_t (v_t − Sᵀ k_t)ᵀ, y_t = S_tᵀ q_t (Yang 2024, arXiv 2412.06464) with β and
    gates g ≤ 0 [batch, seq, heads], q and k [batch, seq, groups·d], v [batch, seq, heads·dv] → y like v."""
    first = zero_state(k, v, heads, groups) if past is None else past
    if v.shape[1] == 1:
        kept = wide(first) if gates is None else wide(gates).exp().mT[..., None] * first
        y, state = changed(q, k, v, beta, kept, groups)
        return y, state.to(first.dtype)
    qc, kc = (chunks(t, groups, 64)[:, :, :, None] for t in (q, k))  # [batch, chunks, groups, 1, size, d]
    vc, bc, gc = (
        chunks(t, heads, 64).unflatten(2, (groups, -1))
        for t in (v, beta, torch.zeros_like(beta) if gates is None else gates)
    )
    between, left = decay_between(gc.squeeze(-1)), gc.cumsum(-2).exp()
    pairs = (kc @ kc.mT) * between, (qc @ kc.mT) * between
    kept = left[..., -1:, :].expand(*left.shape[:-2], k.shape[-1] // groups, 1)
    y, state = delta_chunks(first, vc, bc, pairs, (kc * left, qc * left), kc * between[..., -1, :, None], kept)
    return joined(y, v), state


def keyed_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    past: Tensor | None = None,
    *,
    heads: int,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """S = diag(e^{g_t}) S_{t−1}, S_t = S + β_t k_t (v_t − Sᵀ k_t)ᵀ, y_t = S_tᵀ q_t with a gate for every key, g ≤ 0
    [batch, seq, heads·d] (Kimi Linear, 2025, arXiv 2510.26692); the others as in `gated_delta_rule`."""
    first = zero_state(k, v, heads, groups) if past is None else past
    if v.shape[1] == 1:
        kept = wide(gates)[:, 0].exp().unflatten(-1, (heads, -1, 1)) * first
        y, state = changed(q, k, v, beta, kept, groups)
        return y, state.to(first.dtype)
    qc, kc = (chunks(t, groups, 16)[:, :, :, None] for t in (q, k))  # [batch, chunks, groups, 1, size, d]
    vc, bc, gc = (chunks(t, heads, 16).unflatten(2, (groups, -1)) for t in (v, beta, gates))
    kept, left, rows = gc.exp(), gc.cumsum(-2).exp(), []  # [batch, chunks, groups, heads of a group, size, d]
    seen = kc[..., :0, :].expand_as(kept[..., :0, :])
    for t in range(16):  # of every chunk: what is left of the keys seen, when token t comes
        new = kc[..., t : t + 1, :].expand_as(kept[..., :1, :])
        seen = torch.cat((seen * kept[..., t : t + 1, :], new), -2)
        both = torch.stack((kc[..., t, :], qc[..., t, :]), -1)
        rows.append(F.pad(seen @ both, (0, 0, 0, 15 - t)))
    links, scores = torch.stack(rows, -3).unbind(-1)
    y, state = delta_chunks(first, vc, bc, (links, scores), (kc * left, qc * left), seen, left[..., -1, :, None])
    return joined(y, v), state
