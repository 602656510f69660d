"""Routers: the weight `combine` [..., tokens, experts] of every expert in a token's output, 0 where it is not asked."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import top_k, wide


def largest(x: Tensor, k: int) -> Tensor:
    """True at the k largest of the last axis."""
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, top_k(x, k)[1], True)


def keep_top(scores: Tensor, ranks: Tensor, k: int) -> Tensor:
    """The scores [..., experts] of the k experts that rank highest, 0 elsewhere."""
    return scores.where(largest(ranks, k), 0)


def renormalized(kept: Tensor) -> Tensor:
    """`kept` [..., experts] divided by its sum."""
    return kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)


def route_softmax(logits: Tensor, k: int) -> Tensor:
    """Softmax over the k largest logits [..., experts], 0 elsewhere."""
    scores = wide(logits)
    return F.softmax(scores.masked_fill(~largest(scores, k), -math.inf), dim=-1).to(logits.dtype)


def route_switch(logits: Tensor, k: int) -> Tensor:
    """The k largest of the softmax over all logits [..., experts], 0 elsewhere (Fedus 2021, arXiv 2101.03961)."""
    scores = F.softmax(wide(logits), dim=-1)
    return keep_top(scores, scores, k).to(logits.dtype)


def route_sigmoid(logits: Tensor, k: int) -> Tensor:
    """The sigmoids of the k largest logits [..., experts], 0 elsewhere."""
    scores = wide(logits).sigmoid()
    return keep_top(scores, scores, k).to(logits.dtype)


def best_of_groups(ranks: Tensor, groups: int) -> Tensor:
    """The largest of ranks [..., experts] in each of `groups` runs of experts."""
    return ranks.unflatten(-1, (groups, -1)).amax(-1)


def best_two_of_groups(ranks: Tensor, groups: int) -> Tensor:
    """The sum of the two largest of ranks [..., experts] in each of `groups` runs of experts."""
    return ranks.unflatten(-1, (groups, -1)).topk(2).values.sum(-1)


def within_groups(ranks: Tensor, best: Tensor, top_groups: int) -> Tensor:
    """ranks [..., experts], −∞ outside of the `top_groups` runs that are largest in best [..., groups]."""
    members = ranks.unflatten(-1, (best.shape[-1], -1))
    return members.masked_fill(~largest(best, top_groups)[..., None], -math.inf).flatten(-2)


def route_softmax_groups(logits: Tensor, k: int, groups: int, top_groups: int) -> Tensor:
    """`route_switch` among the groups of experts with the best expert (DeepSeek-V2, arXiv 2405.04434)."""
    scores = F.softmax(wide(logits), dim=-1)
    ranks = within_groups(scores, best_of_groups(scores, groups), top_groups)
    return keep_top(scores, ranks, k).to(logits.dtype)


def route_sigmoid_groups(logits: Tensor, bias: Tensor, k: int, groups: int, top_groups: int) -> Tensor:
    """Sigmoids of k logits [..., experts] divided by their sum, chosen by sigmoid + bias [experts] among the groups
    whose two best experts are best (DeepSeek-V3, arXiv 2412.19437)."""
    scores = wide(logits).sigmoid()
    ranks = scores + bias
    ranks = within_groups(ranks, best_two_of_groups(ranks, groups), top_groups)
    return renormalized(keep_top(scores, ranks, k)).to(logits.dtype)


def capacity_of(tokens: int, experts: int, factor: float) -> int:
    """⌈factor · tokens / experts⌉, how many tokens an expert takes; what rounding adds to a whole share is left out."""
    return math.ceil(factor * tokens / experts - 1e-9)


def limit_capacity(combine: Tensor, capacity: int) -> Tensor:
    """combine [..., tokens, experts] without an expert's tokens after the first `capacity` (Fedus 2021)."""
    taken = (combine != 0).cumsum(-2)
    return combine.masked_fill(taken > capacity, 0)


def expert_choice(logits: Tensor, capacity: int) -> Tensor:
    """Every expert takes the `capacity` tokens that score highest, softmax over experts (Zhou 2022, arXiv 2202.09368);
    logits [..., tokens, experts], the first token wins a tie."""
    scores = F.softmax(wide(logits), dim=-1)
    rank = scores.argsort(dim=-2, descending=True, stable=True).argsort(dim=-2)
    return scores.where(rank < capacity, 0).to(logits.dtype)


def load_balance_loss(logits: Tensor, combine: Tensor) -> Tensor:
    """experts · Σ_j f_j p_j of logits and combine [..., experts]: f_j is the fraction of tokens that expert j gets, p_j
    its mean softmax probability (Fedus 2021)."""
    experts = logits.shape[-1]
    scores = F.softmax(wide(logits), dim=-1).flatten(0, -2)
    sent = (combine != 0).flatten(0, -2).to(scores.dtype)
    return (experts * (sent.mean(0) * scores.mean(0)).sum()).to(logits.dtype)
