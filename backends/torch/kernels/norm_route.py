"""Norm, router projection and top-k choice of experts in one kernel, for up to 64 tokens (arXiv 1701.06538).

Each block computes the logits of a few experts; the last one chooses for all tokens. See `shared.gemv`, `shared.top_k`.
"""

from __future__ import annotations

from typing import Any

import torch

from . import route as routing
from .shared import gemv
from .shared import top_k as choice
from .shared.gemv import Tile, Weight, check, choose_tile, flatten_rows, norm_affine, weight_operands
from .shared.launch import jit, start_next, tl, triton, uses_torch
from .shared.norm import NO_NORM, Norm
from .shared.small_batch_linear import linear
from .shared.tickets import is_last, zero_counters

AT_ONCE = 1024  # logits that each warp of the last block has in registers


@jit
def norm_route_kernel(
    x, weight, scales, offsets, gain, shift, bias, correction, logits, chosen, weights, tickets, M, N, K, x_row, eps,
    scale, NORM: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr,
    GROUP_SLOTS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N logits of all M tokens. The last program also chooses the experts, ROWS tokens at a
    time. Grid [blocks of logits]."""
    start_next(PDL)
    m, n = tl.arange(0, BLOCK_M)[:, None], tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    out = norm_affine(
        x, x_row, weight, scales, offsets, gain, shift, bias, rows, M, N, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN, PDL,
    )  # fmt: skip
    tl.store(logits + m * N + n[None, :], out, mask=(m < M) & (n[None, :] < N))
    if is_last(tickets, tl.num_programs(0)):
        slot = tl.arange(0, SLOTS)[None, :]
        expert, there = choice.expert_places(EXPERTS, GROUPS, GROUP_SLOTS, WIDE)
        push = tl.zeros([GROUP_SLOTS * WIDE], tl.float32)
        if correction is not None:
            push = tl.load(correction + expert, mask=there, other=0.0).to(tl.float32)
        for first in range(0, M, ROWS):
            token = first + tl.arange(0, ROWS)[:, None]
            valid = (token < M) & there[None, :]
            of_token = tl.load(logits + token * N + expert[None, :], mask=valid, other=0.0, cache_modifier=".cg")
            experts, combine = choice.choose_experts(
                tl.where(there[None, :], of_token, float("-inf")), push, expert, there, scale,
                CHOICES, SIGMOID, RENORMALIZE, GROUPS, OPEN, TOP2, GROUP_SLOTS, WIDE, SLOTS,
            )  # fmt: skip
            at, mine = token * CHOICES + slot, (token < M) & (slot < CHOICES)
            tl.store(chosen + at, experts, mask=mine)
            tl.store(weights + at, combine, mask=mine)


def refusal(x: torch.Tensor, weight: Weight, k: int, *others: torch.Tensor | None) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernel can run."""
    return choice.refusal(weight.shape[0], k) or gemv.refusal(x, weight, *others)


def norm_route(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    *,
    k: int,
    norm: Norm = NO_NORM,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts chosen from the logits norm(x) Wᵀ + b, i32 [tokens, k], and their weights, f32 [tokens, k].

    x [tokens, in], weight [experts, in], bias [experts]. `correction` [experts] is added to the scores for the choice
    only (the `bias` of `route`); `scoring` to `group_score` are as in `route`. The kernel does not round its fp32
    logits. `tickets`: counters, see `linear_residual`. `kernel` is as in `uses_torch`. Raise ValueError if shapes, k or
    groups do not fit, or the norm, `scoring` or `group_score` is unknown.
    """
    check(x, weight, norm, bias)
    experts = weight.shape[0]
    how: dict[str, Any] = {"scoring": scoring, "groups": groups, "top_groups": top_groups, "group_score": group_score}
    choice.check(experts, k, **how)
    if correction is not None and correction.shape != (experts,):
        raise ValueError(f"correction {[*correction.shape]} must be [{experts}]")
    if uses_torch(kernel, refusal, x, weight, k, norm.gain, norm.shift, bias):
        logits = linear(norm(x), weight, bias)
        return routing.route(logits, correction, k=k, renormalize=renormalize, scale=scale, kernel=False, **how)
    rows = flatten_rows(x)
    tokens = len(rows)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    chosen = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=x.device)
    plan = choose_tile(tokens, experts, rows.shape[1], x.dtype, weight=weight)
    norm_route_kernel[(triton.cdiv(experts, plan.rows),)](
        rows, *weight_operands(weight), norm.gain, norm.shift, bias, correction, logits, chosen, weights,
        zero_counters(x, 1) if tickets is None else tickets, tokens, experts, rows.shape[1], rows.stride(0), norm.eps,
        scale, NORM=norm.kind, **_constants(choice.constants(experts, k, renormalize=renormalize, **how), plan),
        **plan.options(x),
    )  # fmt: skip
    return chosen, weights


def _constants(sizes: dict[str, Any], plan: Tile) -> dict[str, Any]:
    return {**sizes, "ROWS": max(1, min(plan.batch, AT_ONCE * plan.warps // (sizes["GROUP_SLOTS"] * sizes["WIDE"])))}
