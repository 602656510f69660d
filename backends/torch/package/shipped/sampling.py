"""Choose the next token from logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
MAX_SCORE = 1e30  # larger scores are shifted to a maximum of 0: division by a low temperature would overflow


def filter_logits(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return scores [batch, vocab]: `logits` [batch, vocab] / `temperature`, −∞ for tokens that must not be drawn.

    Three filters apply in order: the `top_k` likeliest tokens (0: all); the likeliest that together reach probability
    `top_p` (Holtzman et al. 2019, arXiv 1904.09751; of equals, the first); and tokens at least `min_p` times as likely
    as the likeliest (Nguyen et al. 2024, arXiv 2407.01082). As the temperature falls to 0, only the likeliest remains.
    """
    scores, divisor = logits.float(), min(max(temperature, TINY), HUGE)
    largest = scores.amax(-1, keepdim=True)
    shift = torch.where((largest / divisor).abs() < MAX_SCORE, 0.0, largest)
    scores = (scores - shift) / divisor
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -math.inf)
    if top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        p = ordered.softmax(-1)
        beyond = p.cumsum(-1) - p >= max(top_p, TINY)
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)
    if min_p > 0:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), -math.inf)
    return scores


def draw_tokens(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None = None
) -> Tensor:
    """Return the next token of each batch row, [batch], drawn from logits [batch, vocab]; temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1)
    p = filter_logits(logits, temperature, top_k, top_p).softmax(-1)
    return torch.multinomial(p, 1, generator=generator)[:, 0]
