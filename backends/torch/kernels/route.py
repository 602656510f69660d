"""A router's choice of experts in one kernel: score, the k largest, their weights (Shazeer 2017, arXiv 1701.06538).

A warp takes a token, holds the scores of all experts in registers and finds the largest k times over. Weights are
softmax or sigmoid scores; a bias may decide the choice without being part of a weight (DeepSeek-V3, arXiv 2412.19437).
Groups of experts may compete first (DeepSeek-V2, arXiv 2405.04434): the best are found in the same way.
"""

from __future__ import annotations

from functools import partial

import torch

from .shared import operands
from .shared.launch import BF16, FP16, FP32, Variant, jit, options, start_next, tl, triton, uses_torch, variant, wait

MOST_EXPERTS = 512
MOST_CHOICES = 16


@jit
def _of_best_groups(ranked, OPEN: tl.constexpr, TOP2: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr):
    """`ranked` [SLOTS · WIDE], −∞ in all but the OPEN groups of WIDE with the largest maxima, or sums of two."""
    members = tl.reshape(ranked, [SLOTS, WIDE])
    best = tl.max(members, axis=1)
    if TOP2:
        first = tl.arange(0, WIDE)[None, :] == tl.argmax(members, axis=1)[:, None]
        best += tl.max(tl.where(first, float("-inf"), members), axis=1)
    group, there = tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int1)
    for _ in tl.static_range(OPEN):
        chosen = group == tl.argmax(best, axis=0)  # the first of equals
        there, best = there | chosen, tl.where(chosen, float("-inf"), best)
    return tl.reshape(tl.where(there[:, None], members, float("-inf")), [SLOTS * WIDE])


@jit
def _route_kernel(
    logits, bias, chosen, weights, row_stride, scale, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr,
    GROUP_SLOTS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Experts stand in GROUP_SLOTS · WIDE places, those of a group in WIDE of them."""
    start_next(PDL)
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    token, slot, place = tl.program_id(0), tl.arange(0, SLOTS), tl.arange(0, GROUP_SLOTS * WIDE)
    e = place // WIDE * MEMBERS + place % WIDE
    there = (place % WIDE < MEMBERS) & (place // WIDE < GROUPS)
    push = tl.zeros((GROUP_SLOTS * WIDE,), tl.float32)
    if bias is not None:
        push = tl.load(bias + e, mask=there, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(logits + token.to(tl.int64) * row_stride + e, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x, axis=0))
        scores /= tl.sum(scores, axis=0)
    ranked = tl.where(there, scores + push, float("-inf"))
    if GROUPS > 1:
        ranked = _of_best_groups(ranked, OPEN, TOP2, GROUP_SLOTS, WIDE)
    experts, kept = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for choice in tl.static_range(CHOICES):
        best = place == tl.argmax(ranked, axis=0)  # the first of equals
        experts = tl.where(slot == choice, tl.sum(tl.where(best, e, 0), axis=0), experts)
        kept = tl.where(slot == choice, tl.sum(tl.where(best, scores, 0.0), axis=0), kept)
        ranked = tl.where(best, float("-inf"), ranked)
    if RENORMALIZE:
        kept /= tl.sum(kept, axis=0)
    tl.store(chosen + token * CHOICES + slot, experts, mask=slot < CHOICES)
    tl.store(weights + token * CHOICES + slot, kept * scale, mask=slot < CHOICES)


def refusal(logits: torch.Tensor, k: int) -> str | None:
    """Say why torch computes this instead of the kernel, in a few words; None if the kernel does."""
    if logits.shape[-1] > MOST_EXPERTS or k > MOST_CHOICES:
        return f"more than {MOST_EXPERTS} experts or {MOST_CHOICES} choices"
    return operands.refusal(logits)


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return where the k largest of each row are, the largest first, the first of equals first."""
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
    """The k experts with the largest score + bias, largest first, and scale · their scores.

    logits [tokens, experts], bias [experts] → chosen i32 [tokens, k] and weights f32 [tokens, k]. Scores are softmax or
    sigmoid of the logits; the chosen ones are divided by their sum if `renormalize`. With `groups`, runs of experts
    compete first, and only the `top_groups` best by `group_score` (max, or top2: the sum of the two largest) are chosen
    from. Of equals the first wins. `kernel`: see `uses_torch`.

    Raises:
        ValueError: the shapes do not fit, or the scoring is unknown.
    """
    experts = logits.shape[-1]
    if experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"{experts} experts do not fall into groups={groups}, of which top_groups={top_groups} are best"
        )
    if logits.ndim != 2 or not 1 <= k <= experts // groups * top_groups:
        raise ValueError(
            f"logits {[*logits.shape]} must be [tokens, experts], with at least k={k} experts to choose from"
        )
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias {[*bias.shape]} must be [{experts}]")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring={scoring!r} is not softmax or sigmoid")
    if group_score not in ("max", "top2"):
        raise ValueError(f"group_score={group_score!r} is not max or top2")
    if groups > 1 and group_score == "top2" and experts < 2 * groups:
        raise ValueError("group_score='top2' needs two experts per group")
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
    _route_kernel[(tokens,)](
        logits, bias, chosen, weights, logits.stride(0), scale, EXPERTS=experts, CHOICES=k,
        SIGMOID=scoring == "sigmoid", RENORMALIZE=renormalize, **_blocks(experts, k, groups, top_groups, group_score),
        **options(logits, warps=1),
    )  # fmt: skip
    return chosen, weights


reference = partial(route, kernel=False)


def _blocks(experts: int, k: int, groups: int, top_groups: int, group_score: str) -> dict[str, int | bool]:
    """Constants of the kernel; powers of 2 filled up come to less than twice two for as many experts as there are."""
    sizes = {"GROUP_SLOTS": groups, "WIDE": experts // groups, "SLOTS": k}
    rest = {"GROUPS": groups, "OPEN": top_groups, "TOP2": group_score == "top2"}
    return {**{name: triton.next_power_of_2(size) for name, size in sizes.items()}, **rest}


def variants() -> list[Variant]:
    """Mixtral-8x7B, Qwen3-30B-A3B, gpt-oss-120b, as many experts as there may be with a bias; DeepSeek-V3, V2, and
    groups that fill the most places. A few loads: no vectors."""
    found = []
    for dtype, bias, experts, k, sigmoid, groups in (
        (BF16, False, 8, 2, False, (1, 1, "max")),
        (FP32, False, 128, 8, False, (1, 1, "max")),
        (FP16, False, 128, 4, False, (1, 1, "max")),
        (FP32, True, 512, 16, True, (1, 1, "max")),
        (BF16, True, 256, 8, True, (8, 4, "top2")),
        (BF16, False, 160, 6, False, (8, 3, "max")),
        (FP32, True, 495, 16, True, (33, 32, "top2")),
    ):
        sizes = {"EXPERTS": experts, "CHOICES": k, "SIGMOID": sigmoid, "RENORMALIZE": True}
        sizes |= _blocks(experts, k, *groups)
        types = {"chosen": "*i32", "weights": "*fp32", "bias": "*fp32"}
        absent = "" if bias else "bias"
        found.append(variant(_route_kernel, dtype, sizes, "row_stride", "", absent, types, warps=1, vectors=False))
    return found
