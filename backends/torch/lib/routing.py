"""Routers of mixtures of experts: `combine` [..., tokens, experts] is each expert's weight, 0 where not chosen."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import top_k, wide


def mask_top(x: Tensor, k: int) -> Tensor:
    """Return a mask like x, True at the k largest elements of the last axis; the first wins a tie."""
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, top_k(x, k)[1], True)


def keep_top(scores: Tensor, ranks: Tensor, k: int) -> Tensor:
    """Return the scores [..., experts] of the k experts with the largest `ranks`, 0 elsewhere."""
    return scores.where(mask_top(ranks, k), 0)


def renormalize(kept: Tensor) -> Tensor:
    """Return `kept` [..., experts] divided by its sum over experts; zeros stay zeros."""
    return kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)


def route_softmax(logits: Tensor, k: int) -> Tensor:
    """Return the softmax over the k largest logits [..., experts], 0 elsewhere."""
    scores = wide(logits)
    return F.softmax(scores.masked_fill(~mask_top(scores, k), -math.inf), dim=-1).to(logits.dtype)


def route_switch(logits: Tensor, k: int) -> Tensor:
    """Return the k largest softmax scores of logits [..., experts], 0 elsewhere (Fedus 2021, arXiv 2101.03961)."""
    scores = F.softmax(wide(logits), dim=-1)
    return keep_top(scores, scores, k).to(logits.dtype)


def route_sigmoid(logits: Tensor, k: int) -> Tensor:
    """Return the sigmoids of the k largest logits [..., experts], 0 elsewhere."""
    scores = wide(logits).sigmoid()
    return keep_top(scores, scores, k).to(logits.dtype)


def best_of_groups(ranks: Tensor, groups: int) -> Tensor:
    """Return the largest of ranks [..., experts] in each of `groups` groups of consecutive experts."""
    return ranks.unflatten(-1, (groups, -1)).amax(-1)


def best_two_of_groups(ranks: Tensor, groups: int) -> Tensor:
    """Return the sum of the two largest of ranks [..., experts] in each of `groups` groups of consecutive experts."""
    return ranks.unflatten(-1, (groups, -1)).topk(2).values.sum(-1)


def mask_groups(ranks: Tensor, best: Tensor, top_groups: int) -> Tensor:
    """Return ranks [..., experts] with −∞ outside of the `top_groups` groups with the largest `best` [..., groups]."""
    members = ranks.unflatten(-1, (best.shape[-1], -1))
    return members.masked_fill(~mask_top(best, top_groups)[..., None], -math.inf).flatten(-2)


def route_softmax_groups(logits: Tensor, k: int, groups: int, top_groups: int) -> Tensor:
    """Return `route_switch` within the `top_groups` groups with the largest maxima (DeepSeek-V2, arXiv 2405.04434)."""
    scores = F.softmax(wide(logits), dim=-1)
    ranks = mask_groups(scores, best_of_groups(scores, groups), top_groups)
    return keep_top(scores, ranks, k).to(logits.dtype)


def route_sigmoid_groups(logits: Tensor, bias: Tensor, k: int, groups: int, top_groups: int) -> Tensor:
    """Return the sigmoids of k logits [..., experts] divided by their sum, 0 elsewhere (DeepSeek-V3, arXiv 2412.19437):
    the k largest sigmoid + bias [experts] in the `top_groups` groups whose two best experts have the largest sum."""
    scores = wide(logits).sigmoid()
    ranks = scores + bias
    ranks = mask_groups(ranks, best_two_of_groups(ranks, groups), top_groups)
    return renormalize(keep_top(scores, ranks, k)).to(logits.dtype)


def expert_capacity(tokens: int, experts: int, factor: float) -> int:
    """Return ⌈factor · tokens / experts⌉, the capacity of an expert in tokens, robust to floating-point error."""
    return math.ceil(factor * tokens / experts - 1e-9)


def limit_capacity(combine: Tensor, capacity: int) -> Tensor:
    """Return combine [..., tokens, experts], 0 except for each expert's first `capacity` tokens (Fedus 2021)."""
    rank = (combine != 0).cumsum(-2)
    return combine.masked_fill(rank > capacity, 0)


def expert_choice(logits: Tensor, capacity: int) -> Tensor:
    """Return the softmax over experts of logits [..., tokens, experts], 0 except for the `capacity` tokens of each
    expert with its largest scores (Zhou 2022, arXiv 2202.09368); the first token wins a tie."""
    scores = F.softmax(wide(logits), dim=-1)
    rank = scores.argsort(dim=-2, descending=True, stable=True).argsort(dim=-2)
    return scores.where(rank < capacity, 0).to(logits.dtype)


def load_balance_loss(logits: Tensor, combine: Tensor) -> Tensor:
    """Return the loss experts · Σ_j f_j p_j for logits and combine [..., experts]: f_j is the fraction of tokens routed
    to expert j, p_j its mean softmax probability (Fedus 2021)."""
    experts = logits.shape[-1]
    scores = F.softmax(wide(logits), dim=-1).flatten(0, -2)
    sent = (combine != 0).flatten(0, -2).to(scores.dtype)
    return (experts * (sent.mean(0) * scores.mean(0)).sum()).to(logits.dtype)
