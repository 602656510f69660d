"""Softmax attention with features that no operator of torch has."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import softmax_or_zeros, wide


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v for q [batch, heads, seq, width] and k, v [batch, kv_heads, n, width].
    Scores s become softcap · tanh(s / softcap) before the bias; `mask` is True where a key is visible; `sinks` [heads]
    are scores of one more key with value 0. Queries without a visible key get zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = wide(q @ k.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = wide(sinks).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return softmax_or_zeros(scores).to(v.dtype) @ v


def lightning_index(q: Tensor, k: Tensor, weights: Tensor, top_k: int, seen: Tensor | None = None) -> Tensor:
    """Return a bias [batch, 1, seq, keys]: 0 for the `top_k` visible keys with the largest scores, −∞ for the rest.
    Scores are Σ_h weights_h · relu(q_h·k); the first wins a tie (DeepSeek-V3.2, 2025). q [batch, heads, seq, d], k
    [batch, 1, keys, d], weights [batch, seq, heads]; the mask `seen` broadcasts to the bias."""
    by_token = wide(q.detach()).transpose(1, 2)
    scores = F.relu(by_token.flatten(1, 2) @ wide(k.detach())[:, 0].mT).unflatten(1, by_token.shape[1:3])
    scores = (wide(weights.detach())[:, :, None] @ scores).transpose(1, 2)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    least = F.pad(scores, (0, top_k), value=-math.inf).topk(top_k).values[..., -1:]
    above, level = scores > least, scores == least
    first = level.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)
    chosen = (above | (level & first)) & (scores > -math.inf)
    return torch.where(chosen, 0.0, -math.inf).to(q.dtype)


def last_rows(x: Tensor, last: Tensor) -> Tensor:
    """Return the tokens of x [batch, seq, width] at indices `last` [batch]: [batch, 1, width]."""
    return x[torch.arange(len(x), device=x.device), last][:, None]


def block_counts(
    length: int, block: int, sides: int, first: int, last: int, first_weight: int, dense: int, like: Tensor
) -> Tensor:
    """Return how often a query counts a key in `block_sparse_attention` (0: masked), [length, length] like `like`."""
    at = torch.arange(length, device=like.device) // block
    ends = (at < first) | (at >= at[-1:] + 1 - last)
    near = (at[:, None] - at).abs() <= sides
    counts = (near | ends) * torch.where(at < first, first_weight, 1)
    sees_all = ends[:, None] | (torch.ones_like(at).sum() <= dense)
    return torch.where(sees_all, 1, counts)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shown: Tensor | None = None,
    *,
    block: int,
    sides: int = 1,
    first: int = 1,
    last: int = 1,
    first_weight: int = 1,
    dense: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ) v for q [batch, heads, seq, d] and k, v [batch, kv_heads, seq, d], block-sparse
    (Zaheer 2020, arXiv 2007.14062).

    A block of `block` tokens attends to itself, the `sides` blocks before and after it, and the `first` first and the
    `last` last blocks, whose queries attend to all keys. For all other queries, keys of the first blocks count
    `first_weight` times. If seq ≤ `dense`, all keys are visible. `shown` [batch, 1, 1, seq] is False at masked keys.
    """
    length, groups = q.shape[2], q.shape[1] != k.shape[1]
    if torch.compiler.is_exporting():  # symbolic length, on which the choice of blocks depends: use a dense mask
        bias = block_counts(length, block, sides, first, last, first_weight, dense, q).log().to(q.dtype)
        bias = bias if shown is None else bias.masked_fill(~shown, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=groups)
    if length <= dense:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shown, scale=scale, enable_gqa=groups)
    count = -(-length // block)
    qb, kb, vb = (
        F.pad(x, (0, 0, 0, count * block - length)).unflatten(2, (count, block)).transpose(1, 2) for x in (q, k, v)
    )  # [batch, count, heads, block, d]
    numbers = torch.arange(count, device=q.device)
    ends = torch.cat((numbers[:first], numbers[max(count - last, first) :]))
    near = numbers[:, None] + torch.arange(-sides, sides + 1, device=q.device)
    seen = torch.cat((ends.expand(count, -1), near.clamp(0, count - 1)), 1)  # blocks that a block attends to
    there = torch.cat((torch.ones_like(ends).expand(count, -1), (near >= first) & (near < count - last)), 1) > 0
    tokens = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool)
    tokens = F.pad(tokens if shown is None else tokens & shown[:, 0, 0], (0, count * block - length))
    visible = (tokens.unflatten(1, (count, block))[:, seen] & there[:, :, None]).flatten(2)
    empty = ~visible.any(2, keepdim=True)  # padding: some kernels have no gradients of rows without keys
    bias = (visible | empty).log().to(q.dtype)  # 0 or −∞
    bias[:, :, : min(first, count) * block] += math.log(first_weight)
    kb, vb = (x[:, seen].transpose(2, 3).flatten(3, 4).flatten(0, 1) for x in (kb, vb))
    mask = bias.flatten(0, 1)[:, None, None]
    y = F.scaled_dot_product_attention(qb.flatten(0, 1), kb, vb, attn_mask=mask, scale=scale, enable_gqa=groups)
    y = y.unflatten(0, (-1, count)).masked_fill(empty[..., None, None], 0)
    if len(ends):
        some = qb[:, ends].transpose(1, 2).flatten(2, 3)
        full = F.scaled_dot_product_attention(some, k, v, attn_mask=shown, scale=scale, enable_gqa=groups)
        y = y.index_copy(1, ends, full.unflatten(2, (-1, block)).transpose(1, 2).to(y.dtype))
    return y.transpose(1, 2).flatten(2, 3)[:, :, :length]
