"""Mixture of experts for 4 to 512 tokens, as grouped GEMMs on tensor cores (Shazeer 2017, arXiv 1701.06538).

The weights of every chosen expert are streamed once and multiply all its tokens, in two kernels: gate, up and
activation of every slot, a (token, choice), into a scratch buffer; then the down projections. The weighted outputs of
the slots are stored, and the last block of some columns sums the choices of each token in a fixed order, so that the
result is deterministic. Blocks of experts without tokens end at once.

The first kernel lets the second start only after it has waited for the router, so the second may read the choices and
prefetch its first weights before the first has ended.
"""

from __future__ import annotations

import torch

from .shared.activation import activate, apply_gate
from .shared.dots import dot_products, prefetch_rows
from .shared.expert_tokens import AT_ONCE, count_tokens, token_slots
from .shared.gemv import PROCESSORS, pipeline_stages
from .shared.launch import jit, options, start_next, tl, triton, wait_for_previous
from .shared.norm import Norm
from .shared.operands import power_of_2
from .shared.tickets import is_last, zero_counters

LEAST_ROWS = 32  # of a stack that a block multiplies; as many outputs at least have one counter
ADDED = 4096  # numbers that the last block adds up at a time
MOST_TOKENS = 512


@jit
def grouped_open_kernel(
    x, chosen, up, gate, up_bias, gate_bias, gain, shift, opened, slots, H, K, eps,
    NORM: tl.constexpr, CHOICES: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the H hidden features of all slots of one expert; x [tokens, K], up and gate [experts, H, K],
    opened [slots, H]. Grid [blocks of H, experts]."""
    wait_for_previous(PDL)
    start_next(PDL)
    expert, n = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = count_tokens(chosen, expert, slots, AT_ONCE)
    row = expert.to(tl.int64) * H + tl.minimum(n, H - 1)
    opens = None if gate is None else gate + row * K
    for first in range(0, count, BLOCK_M):
        slot = token_slots(chosen, expert, slots, first, BLOCK_M, AT_ONCE)
        token = tl.maximum(slot, 0) // CHOICES
        hidden, opening = dot_products(
            x + token.to(tl.int64) * K, up + row * K, opens, gain, shift, K, 0, K, eps,
            NORM, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        if up_bias is not None:
            hidden += tl.load(up_bias + row).to(tl.float32)[None, :]
        if gate is None:
            hidden = activate(hidden, ACTIVATION)
        else:
            if gate_bias is not None:
                opening += tl.load(gate_bias + row).to(tl.float32)[None, :]
            hidden = apply_gate(opening, hidden, ACTIVATION, LIMIT, SHIFT)
        at = opened + slot.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(at, hidden.to(opened.dtype.element_ty), mask=(slot >= 0)[:, None] & (n < H)[None, :])


@jit
def grouped_close_kernel(
    opened, chosen, weights, down, down_bias, residual, y, partial, tickets, tokens, slots, N, K,
    CHOICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr, ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all slots of one expert, `partial` f32 [slots, N]. The last program of a block of
    outputs sums the choices of all tokens into y [tokens, N]. opened [slots, K], down [experts, N, K]. Grid [blocks of
    N, experts]."""
    start_next(PDL)
    expert, n = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = expert.to(tl.int64) * N + tl.minimum(n, N - 1)
    count = count_tokens(chosen, expert, slots, AT_ONCE)
    if PDL:  # noqa: SIM102 - decided when it is compiled
        if count > 0:
            prefetch_rows(down, row, K, 0, K, 2 * BLOCK_K)
    wait_for_previous(PDL)
    for first in range(0, count, BLOCK_M):
        slot = token_slots(chosen, expert, slots, first, BLOCK_M, AT_ONCE)
        valid_slot = tl.maximum(slot, 0)
        out, _ = dot_products(
            opened + valid_slot.to(tl.int64) * K, down + row * K, None, None, None, K, 0, K, 0.0,
            "none", BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        if down_bias is not None:
            out += tl.load(down_bias + row).to(tl.float32)[None, :]
        out *= tl.load(weights + valid_slot).to(tl.float32)[:, None]
        at = partial + slot.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, out, mask=(slot >= 0)[:, None] & (n < N)[None, :])
    if is_last(tickets + tl.program_id(0), tl.num_programs(1)):
        ROWS: tl.constexpr = ADDED // BLOCK_N
        for begin in range(0, tokens, ROWS):
            token = begin + tl.arange(0, ROWS)
            there = (token < tokens)[:, None] & (n < N)[None, :]
            at = token.to(tl.int64)[:, None] * N + n[None, :]
            total = tl.zeros([ROWS, BLOCK_N], tl.float32)
            if residual is not None:
                total += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
            for choice in range(CHOICES):
                of_slot = partial + (token.to(tl.int64) * CHOICES + choice)[:, None] * N + n[None, :]
                total += tl.load(of_slot, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(y + at, total.to(y.dtype.element_ty), mask=there)


def grouped_moe(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm,
    activation: str,
    limit: float | None,
    shift: float,
    tickets: torch.Tensor | None,
) -> torch.Tensor:
    """Return the result of `moe_decode` from the kernels of this file; operands are contiguous and already checked."""
    (tokens, choices), (experts, hidden, dim) = chosen.shape, up.shape
    slots = tokens * choices
    opened, y = x.new_empty(slots, hidden), torch.empty_like(x)
    partial = torch.empty(slots, dim, dtype=torch.float32, device=x.device)
    opens, closes = _shapes(tokens, choices, experts, hidden, dim, x.dtype, gate is not None)
    tiles = triton.cdiv(dim, closes["BLOCK_N"])
    grouped_open_kernel[(triton.cdiv(hidden, opens["BLOCK_N"]), experts)](
        x, chosen, up, gate, up_bias, gate_bias, norm.gain, norm.shift, opened, slots, hidden, dim, norm.eps,
        NORM=norm.kind, CHOICES=choices, ACTIVATION=activation, LIMIT=limit, SHIFT=shift, **opens,
        **options(x, opens["BLOCK_N"] // 16, 1),
    )  # fmt: skip
    grouped_close_kernel[(tiles, experts)](
        opened, chosen, weights, down, down_bias, residual, y, partial,
        zero_counters(x, tiles) if tickets is None else tickets, tokens, slots, dim, hidden,
        CHOICES=choices, ADDED=ADDED, **closes, **options(x, closes["BLOCK_N"] // 16, 1),
    )  # fmt: skip
    return y


def _shapes(
    tokens: int, choices: int, experts: int, hidden: int, dim: int, dtype: torch.dtype, gated: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the constexpr arguments of the two kernels. A tile has as many slots as an expert has on average, 8 to 64,
    and 64 rows of weights, or 32 if 64 would leave multiprocessors without a block. A warp has 16 rows of weights."""
    rows = min(64, power_of_2(-(-tokens * choices // experts), 8))
    asked = min(experts, tokens * choices)

    def shape(outputs: int, inputs: int, stacks: int = 1) -> dict[str, int]:
        wide = 2 * LEAST_ROWS if asked * outputs >= 2 * LEAST_ROWS * PROCESSORS else LEAST_ROWS
        columns = min({1: 256, 2: 128, 4: 32}[dtype.itemsize], power_of_2(inputs, 32))
        weights, numbers = stacks * wide * columns * dtype.itemsize, rows * columns * dtype.itemsize
        stages = pipeline_stages(weights, numbers, asked * outputs // wide)
        return {"BLOCK_M": rows, "BLOCK_N": wide, "BLOCK_K": columns, "STAGES": stages, "AT_ONCE": AT_ONCE}

    return shape(hidden, dim, 1 + gated), shape(dim, hidden)
