"""Recurrences whose state is a matrix of keys and values, computed in chunks of tokens.

Within a chunk they are computed as attention (Yang 2023, arXiv 2312.06635), between chunks as a recurrence of the
state. Where a token reads the state before it writes, as in the delta rule, a chunk is one triangular system (the UT
transform of Yang 2024, arXiv 2406.06484).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide

MOST_ON_CPUS = 8192  # elements of a state: with more, CPUs are faster token by token


def chunk_count(tokens: int, size: int) -> int:
    """Return the number of chunks of `size` tokens that `tokens` need; one more in an exported program, where a
    symbolic count must not specialize to 1."""
    return (tokens + (2 * size if torch.compiler.is_exporting() else size) - 1) // size


def first_tokens(y: Tensor, count: int) -> Tensor:
    """Return the first `count` tokens of y [batch, seq, ...]."""
    if torch.compiler.is_exporting():  # a slice would specialize on whether `count` is the full length
        return y.index_select(1, torch.arange(count, device=y.device))
    return y[:, :count]


def split_chunks(x: Tensor, size: int, groups: int, filling: float = 0.0) -> Tensor:
    """Return x [batch, seq, heads, d] cut into chunks of `size` tokens, [batch, chunks, groups, heads of a group, size,
    d], padded after the last token with `filling`."""
    count = chunk_count(x.shape[1], size)
    padded = F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1]), value=filling)
    return padded.view(x.shape[0], count, size, groups, x.shape[2] // groups, x.shape[3]).permute(0, 1, 3, 4, 2, 5)


def chunk_states(first: Tensor, kept: Tensor, written: Tensor) -> Tensor:
    """Return the states S_0 = first [batch, ...] to S_chunks of S_{i+1} = kept_i ⊙ S_i + written_i, for kept and
    written [batch, chunks, ...], stacked: [batch, chunks + 1, ...]."""
    if torch.compiler.is_exporting():  # symbolic number of chunks: a parallel prefix sum (Hillis & Steele 1986)
        states, kept = torch.cat((first[:, None], written), 1), F.pad(kept, (0, 0) * (kept.dim() - 2) + (1, 0))
        for step in (2**i for i in range(16)):
            shift = (0, 0) * (kept.dim() - 2) + (step, 0)
            states = states + kept * F.pad(states, shift)[:, :-step]
            kept = kept * F.pad(kept, shift)[:, :-step]
        return states
    states_before = [first]
    for old, new in zip(kept.unbind(1), written.unbind(1), strict=True):
        states_before.append(old * states_before[-1] + new)
    return torch.stack(states_before, 1)


def chunk_matrix_states(first: Tensor, kept: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before every chunk [batch, chunks, ...], and the last state, of S_{i+1} = kept_i S_i +
    written_i (matrix products) from S_0 = first [batch, ...], for kept and written [batch, chunks, ...]."""
    if torch.compiler.is_exporting():  # symbolic number of chunks: a parallel prefix product (Hillis & Steele 1986)
        rest = (0, 0) * (kept.dim() - 2)
        start = F.pad(first[:, None], (*rest, 0, kept.shape[1] - 1))  # a slice would specialize on the number of chunks
        states = written + kept @ start
        for step in (2**i for i in range(16)):
            earlier, gone = (F.pad(t, (*rest, step, 0))[:, :-step].contiguous() for t in (states, kept))
            states, kept = states + kept @ earlier, kept @ gone
        return start + F.pad(states, (*rest, 1, 0))[:, :-1], states[:, -1]
    states_before = [first]
    for old, new in zip(kept.unbind(1), written.unbind(1), strict=True):
        states_before.append(old @ states_before[-1] + new)
    return torch.stack(states_before[:-1], 1), states_before[-1]


def unit_inverse(links: Tensor) -> Tensor:
    """Return (I + links)⁻¹ for strictly lower triangular `links` [..., n, n], n a power of 2. Inverted diagonal blocks
    double in size: the inverse of [[A, 0], [C, B]] is [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]."""
    n = links.shape[-1]
    inverse = torch.ones_like(links[..., :1])[..., None]  # [..., blocks, size, size]
    for size in (2**i for i in range(n.bit_length() - 1)):
        wide = (n // (2 * size), 2 * size)
        pairs = links.unflatten(-1, wide).unflatten(-3, wide).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        above, below = inverse.unflatten(-3, (-1, 2)).unbind(-3)
        corner = below @ pairs[..., size:, :size] @ above
        inverse = torch.cat((F.pad(above, (0, size)), torch.cat((-corner, below), -1)), -2)
    return inverse.squeeze(-3)


def decay_between(gates: Tensor) -> Tensor:
    """Return e^(g_{s+1} + … + g_t) for s ≤ t, else 0, as [..., t, s], for gates g [..., n, 1]. Every sum is computed
    from its terms alone: differences of running sums would lose small gates next to large ones."""
    sums = gates.expand(*gates.shape[:-1], gates.shape[-2]).tril(-1).cumsum(-2)
    return sums.exp().tril()


def factors_between(a: Tensor) -> Tensor:
    """Return a_{s+1} · … · a_t for s ≤ t, else 0, as [..., t, s], for factors a [..., n, 1], which may be 0."""
    size, row, rows = a.shape[-2], torch.ones_like(a[..., :0, 0]), []
    for t in range(size):
        row = torch.cat((row * a[..., t, :], torch.ones_like(a[..., t, :])), -1)
        rows.append(F.pad(row, (0, size - 1 - t)))
    return torch.stack(rows, -2)


def equal_factor_products(
    queries: list[Tensor], k: Tensor, a: Tensor, w: Tensor | None, gates: bool
) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
    """Return the four results of `chunk_products`, faster, for factors a [..., size, 1] (with `gates`, logarithms)
    equal for all key elements. Only the last differs: instead of the keys at the end of the chunk it is the factors
    [..., size, 1] by which the caller must multiply keys or values to get them."""
    between = (decay_between if gates else factors_between)(a)
    remaining = between[..., :1] * (a[..., :1, :].exp() if gates else a[..., :1, :])
    links = None if w is None else (w @ k.mT) * (between if gates else F.pad(between, (0, 0, 1, 0))[..., :-1, :])
    return [(q @ k.mT) * between for q in queries], links, remaining, between[..., -1, :, None]


def chunk_products(
    queries: list[Tensor], k: Tensor, a: Tensor, w: Tensor | None, gates: bool
) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
    """Return four results for a chunk where each token t first multiplies all earlier keys by a_t (a [..., size, d]):
    scores [..., size, size] of each of `queries` at t with the keys up to t; scores of w at t with the keys before
    t, times a_t only with `gates` (None without w); the cumulative products of the factors, [..., size, d]; and the
    keys at the end of the chunk, [..., size, d]."""
    size, links, rest = a.shape[-2], list[Tensor](), list[Tensor]()
    scores: list[list[Tensor]] = [[] for _ in queries]
    keys = k[..., :0, :].expand(*a.shape[:-2], 0, a.shape[-1])
    for t, factor in enumerate(a.split(1, -2)):
        decayed = keys * factor
        if w is not None:
            links.append(F.pad(((decayed if gates else keys) @ w[..., t, :, None]).squeeze(-1), (0, size - t)))
        keys = torch.cat((decayed, k[..., t : t + 1, :].expand_as(factor)), -2)
        rest.append(rest[-1] * factor if rest else factor)
        for rows, q in zip(scores, queries, strict=True):
            rows.append(F.pad((keys @ q[..., t, :, None]).squeeze(-1), (0, size - 1 - t)))
    return ([torch.stack(r, -2) for r in scores], torch.stack(links, -2) if links else None, torch.cat(rest, -2), keys)


def matmul_heads(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y for x [..., 1 or heads, i, j] and y [..., heads, j, k]; one product if 4 or more heads share x."""
    if y.shape[3] < 4 * x.shape[3]:
        return x @ y
    return torch.einsum("bngij,bnghjk->bnghik", x[:, :, :, 0], y)


def outer_products(
    queries: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    first: Tensor,
    order: tuple[int, ...],
    w: Tensor | None = None,
    c: Tensor | None = None,
    *,
    gates: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return S_tᵀ q_t [batch, seq, heads, values] for each of the `queries`, and the last state, of S_t = diag(a_t)
    S_{t−1} + k_t v_tᵀ. The initial state is `first`; permuted by `order` its axes are [batch, heads..., keys, values].
    Queries and k are [batch, seq, groups, keys], v [batch, seq, heads, values], a [batch, seq, heads, keys or 1] (None:
    1); factors may be 0. Given w [batch, seq, groups, keys] and c [batch, seq, heads, 1], the delta rule adds
    k_t (v_t + c_t S_{t−1}ᵀ w_t)ᵀ instead of k_t v_tᵀ. With `gates`, a has the logarithms of the factors, and
    diag(a_t) S_{t−1} replaces S_{t−1} in the delta rule."""
    laid, groups, seq, unit = first.permute(order), k.shape[2], k.shape[1], 0.0 if gates else 1.0
    state = (laid.flatten(1, -3) if laid.dim() > 3 else laid[:, None]).unflatten(1, (groups, -1))
    a = k.new_full((1, seq, groups, 1), unit) if a is None else a
    size = 16 if a.shape[-1] > 1 else 64
    a = split_chunks(a, size, groups, unit)
    shared = w is k
    *asked, k, v = (split_chunks(x, size, groups) for x in (*queries, k, v))
    w = k if shared else None if w is None else split_chunks(w, size, groups)
    by_key = a.shape[-1] > 1
    if by_key:
        scores, links, remaining, k = chunk_products(asked, k, a.exp() if gates else a, w, gates)
        ending = None
    else:
        scores, links, remaining, ending = equal_factor_products(asked, k, a, w, gates)
    decay = remaining[..., -1:, :].mT
    if links is None or w is None or c is None:
        states = chunk_states(
            state,
            decay.expand(state.shape[0], *decay.shape[1:]),
            matmul_heads(k.mT, v if ending is None else v * ending),
        )
        before, state = states[:, :-1], states[:, -1]
    else:
        c, ends = split_chunks(c, size, groups), (k if ending is None else k * ending).mT
        before = remaining if gates else torch.cat((torch.ones_like(remaining[..., :1, :]), remaining[..., :-1, :]), -2)
        inverse = unit_inverse((-c * links).tril(-1))
        written, read = inverse @ v, inverse @ (c * before * w)  # written + read @ state is stored
        transition = decay * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) + ends @ read
        before, state = chunk_matrix_states(state, transition, ends @ written)
        v = written + read @ before
    old = ((q * remaining) @ before if by_key else remaining * matmul_heads(q, before) for q in asked)
    reads = (scored @ v + seen for scored, seen in zip(scores, old, strict=True))
    ys = tuple(first_tokens(y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2), seq) for y in reads)
    return ys, state.reshape(laid.shape).permute([order.index(axis) for axis in range(len(order))])


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None = None,
    beta: Tensor | None = None,
    past: Tensor | None = None,
    *,
    heads: int,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Return y_t = S_tᵀ q_t and the final state of linear attention, S_t = S + k_t v_tᵀ, or with β of the delta rule,
    S_t = S + β_t k_t (v_t − Sᵀ k_t)ᵀ (Yang 2024, arXiv 2412.06464), where S = diag(e^{g_t}) S_{t−1}. Gates g ≤ 0 are
    [batch, seq, heads], or [batch, seq, heads·d] per key element; q and k [batch, seq, groups·d], v [batch, seq,
    heads·dv], β [batch, seq, heads] → y like v, and the state like `past` [batch, heads, d, dv] (None: zeros)."""
    first = wide(v.new_zeros(v.shape[0], heads, k.shape[-1] // groups, v.shape[-1] // heads)) if past is None else past
    dtype, state, one_token = v.dtype, wide(first), v.shape[1] == 1
    q, k, v = (
        wide(q).unflatten(-1, (groups, -1)),
        wide(k).unflatten(-1, (groups, -1)),
        wide(v).unflatten(-1, (heads, -1)),
    )
    if gates is not None:  # gates from a table stay f32 in an f64 model
        gates = wide(gates.to(torch.promote_types(gates.dtype, v.dtype))).unflatten(-1, (heads, -1))
    rate = None if beta is None else wide(beta)[..., None]
    if one_token:
        q, k = (t[:, 0].repeat_interleave(heads // groups, 1) for t in (q, k))
        state = state if gates is None else gates[:, 0, ..., None].exp() * state
        new = v[:, 0, :, None]
        new = new if rate is None else rate[:, 0, ..., None] * (new - k[..., None, :] @ state)
        state = state + k[..., None] * new
        return (q[..., None, :] @ state).flatten(1)[:, None].to(dtype), state.to(first.dtype)
    w, c, v = (None, None, v) if rate is None else (k, -rate, rate * v)
    (y,), state = outer_products((q,), k, v, gates, state, (0, 1, 2, 3), w, c, gates=True)
    return y.flatten(2).to(dtype), state.to(first.dtype)


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1 in f32 (f64 for f64): the feature map of linear attention (Katharopoulos 2020, arXiv
    2006.16236)."""
    x = wide(x)
    return x.clamp(max=0).exp() + x.relu()


def linear_attention(q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Return Σ_m (turned_q_n·turned_k_m) v_m / Σ_m q_n·k_m per head and token n: features q [batch, seq, heads·d], k
    [batch, keys, heads·d] (zero where masked), `turned_*` q and k rotated by RoPE, v [batch, keys, heads·dv]."""
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
    """Return `linear_attention` with sums over m ≤ n (causal) only, and the new states. `past` and the new states are
    Σ turned_k vᵀ [batch, heads, d, dv] and Σ k [batch, heads, d]."""
    before, norm = (None, None) if past is None else past
    y, state = linear_recurrence(turned_q, turned_k, wide(v), past=before, heads=heads, groups=heads)
    seen = k.unflatten(-1, (heads, -1)).cumsum(1)  # [batch, seq, heads, d]
    seen = seen if norm is None else seen + wide(norm)[:, None]
    share = (q.unflatten(-1, (heads, -1)) * seen).sum(-1, keepdim=True)
    y = (y.unflatten(-1, (heads, -1)) / share).flatten(-2).to(v.dtype)
    return y, (state, seen[:, -1].to(state.dtype))
