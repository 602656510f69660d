"""Top-k choice of experts from router logits in one kernel, a warp per token (Shazeer 2017, arXiv 1701.06538).

`shared.top_k` has the formula.
"""

from __future__ import annotations

import torch

from .shared import operands
from .shared import top_k as choice
from .shared.launch import jit, options, start_next, tl, uses_torch, wait_for_previous


@jit
def route_kernel(
    logits, bias, chosen, weights, row_stride, scale, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr,
    GROUP_SLOTS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. Grid [tokens]."""
    start_next(PDL)
    token, slot = tl.program_id(0) + tl.arange(0, 1)[:, None], tl.arange(0, SLOTS)[None, :]
    expert, there = choice.expert_places(EXPERTS, GROUPS, GROUP_SLOTS, WIDE)
    push = tl.zeros([GROUP_SLOTS * WIDE], tl.float32)
    if bias is not None:
        push = tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    at = logits + token.to(tl.int64) * row_stride + expert[None, :]
    x = tl.load(at, mask=there[None, :], other=float("-inf")).to(tl.float32)
    experts, combine = choice.choose_experts(
        x, push, expert, there, scale, CHOICES, SIGMOID, RENORMALIZE, GROUPS, OPEN, TOP2, GROUP_SLOTS, WIDE, SLOTS
    )  # fmt: skip
    tl.store(chosen + token * CHOICES + slot, experts, mask=slot < CHOICES)
    tl.store(weights + token * CHOICES + slot, combine, mask=slot < CHOICES)


def refusal(logits: torch.Tensor, k: int) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernel can run."""
    return choice.refusal(logits.shape[-1], k) or operands.refusal(logits)


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest elements of each row, largest first; equal elements in their order."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :k]


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k experts with the largest score + bias, largest first, and their scores (without bias) times `scale`.

    logits [tokens, experts], bias [experts] → chosen i32 [tokens, k] and weights f32 [tokens, k]. Scores are the
    `scoring` ("softmax" or "sigmoid") of the logits; the chosen scores are divided by their sum if `renormalize`. With
    `groups` > 1, experts are chosen only from the `top_groups` best of `groups` groups of consecutive experts. The
    score of a group is, by `group_score`, "max": the largest score + bias in it, or "top2": the sum of the two largest.
    Of equal scores the first wins. `kernel` is as in `uses_torch`. Raise ValueError if shapes, k or groups do not fit,
    or `scoring` or `group_score` is unknown.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits {[*logits.shape]} must be [tokens, experts]")
    experts = logits.shape[-1]
    choice.check(experts, k, scoring, groups, top_groups, group_score)
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias {[*bias.shape]} must be [{experts}]")
    if uses_torch(kernel, refusal, logits, k):
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = torch.sigmoid(x) if scoring == "sigmoid" else torch.softmax(x, -1)
        ranked = scores if bias is None else scores + bias
        if groups > 1:
            members = ranked.unflatten(1, (groups, -1))
            best = members.topk(1 if group_score == "max" else 2).values.sum(-1)
            shut = torch.ones_like(best, dtype=torch.bool).scatter(1, _largest(best, top_groups), False)
            ranked = members.masked_fill(shut[..., None], -torch.inf).flatten(1)
        chosen = _largest(ranked, k)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
        return chosen.int(), (weights * scale).float()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = len(logits)
    chosen = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    route_kernel[(tokens,)](
        logits, bias, chosen, weights, logits.stride(0), scale,
        **choice.constants(experts, k, scoring, renormalize, groups, top_groups, group_score),
        **options(logits, warps=1),
    )  # fmt: skip
    return chosen, weights
