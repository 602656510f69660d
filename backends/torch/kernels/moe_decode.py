"""Norm and mixture of experts for up to 512 tokens (Shazeer 2017, arXiv 1701.06538).

Up to three tokens are GEMVs on CUDA cores, which stream the weights of each choice in two kernels: gate, up and
activation of every (token, choice) into a scratch buffer; then the down projections, weighted and summed over the
choices in a fixed order, so that the result is deterministic. For more tokens see `moe_grouped`. The first kernel lets
the second start only after it has waited for the router, so the second may read the choices and load its first weights
before the first has ended.
"""

from __future__ import annotations

import torch

from . import moe_grouped
from .shared import gemv
from .shared.activation import ACTIVATIONS, activate, apply_gate, apply_glu, check_activation
from .shared.gemv import DOT_ROWS, Tile, choose_tile, load_weights, moments, sum_vectors
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.operands import gradient_refusal


@jit
def _open_kernel(
    x, chosen, up, gate, up_bias, gate_bias, gain, shift, opened, H, K, eps,
    NORM: tl.constexpr, CHOICES: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the H hidden features of one choice of one token, `opened` [tokens · CHOICES, H]; x [tokens,
    K], up and gate [experts, H, K]. Grid [tokens · CHOICES, blocks of H]."""
    wait_for_previous(PDL)
    start_next(PDL)
    slot, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(chosen + slot).to(tl.int64) * H + tl.minimum(n, H - 1)
    k, from_x = tl.arange(0, BLOCK_K)[None, None, :], x + (slot // CHOICES).to(tl.int64) * K
    mean, rstd = moments(from_x + k, k, K, eps, 1, BLOCK_K) if NORM == "layer" else (0.0, 1.0)
    squares = tl.zeros([1, 1, BLOCK_K // VECTOR], tl.float32)
    ups = tl.zeros([1, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    gates = tl.zeros([1, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = k + start
        some = load_weights(up, row, at, K, K)
        if gate is not None:
            gate_weights = load_weights(gate, row, at, K, K)
        v = tl.load(from_x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM == "rms":
            squares += sum_vectors(v * v, VECTOR)
        if NORM == "layer":
            v = (v - mean) * rstd
        if gain is not None:
            v *= tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
        if shift is not None:
            v += tl.load(shift + at, mask=at < K, other=0.0).to(tl.float32)
        ups += sum_vectors(some.to(tl.float32) * v, VECTOR)
        if gate is not None:
            gates += sum_vectors(gate_weights.to(tl.float32) * v, VECTOR)
    norm_scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=2), axis=0) / K + eps) if NORM == "rms" else 1.0
    hidden = tl.sum(tl.sum(ups, axis=2), axis=0) * norm_scale
    if up_bias is not None:
        hidden += tl.load(up_bias + row).to(tl.float32)
    if gate is not None:
        opening = tl.sum(tl.sum(gates, axis=2), axis=0) * norm_scale
        if gate_bias is not None:
            opening += tl.load(gate_bias + row).to(tl.float32)
        hidden = apply_gate(opening, hidden, ACTIVATION, LIMIT, SHIFT)
    else:
        hidden = activate(hidden, ACTIVATION)
    tl.store(opened + slot * H + n, hidden.to(opened.dtype.element_ty), mask=n < H)


@jit
def _close_kernel(
    opened, chosen, weights, down, down_bias, residual, y, N, K, CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of one token, summed over its choices; opened [tokens · CHOICES, K], down
    [experts, N, K]. Grid [tokens, blocks of N]."""
    start_next(PDL)
    token, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, there, rows = token * CHOICES, n < N, tl.minimum(n, N - 1)
    k, each = tl.arange(0, BLOCK_K)[None, None, :], tl.cdiv(K, BLOCK_K)
    expert = tl.load(chosen + first, cache_modifier=".cg").to(tl.int64)  # not what L1 may hold of an earlier launch
    some = load_weights(down, expert * N + rows, k, K, K)
    wait_for_previous(PDL)
    total = tl.zeros([1, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for step in range(CHOICES * each):
        ahead = tl.minimum(step + 1, CHOICES * each - 1)  # the weights of the next step, none after the last
        at, end = k + ahead % each * BLOCK_K, tl.where(ahead == step, 0, K)
        next_weights = load_weights(down, tl.load(chosen + first + ahead // each).to(tl.int64) * N + rows, at, end, K)
        slot, at = first + step // each, k + step % each * BLOCK_K
        h = tl.load(opened + slot * K + at, mask=at < K, other=0.0).to(tl.float32)
        total += sum_vectors(some.to(tl.float32) * (h * tl.load(weights + slot).to(tl.float32)), VECTOR)
        some = next_weights
    out = tl.sum(tl.sum(total, axis=2), axis=0)
    if down_bias is not None:
        for slot in range(first, first + CHOICES):
            bias = tl.load(down_bias + tl.load(chosen + slot).to(tl.int64) * N + rows).to(tl.float32)
            out += tl.load(weights + slot).to(tl.float32) * bias
    if residual is not None:
        out += tl.load(residual + token * N + n, mask=there, other=0.0).to(tl.float32)
    tl.store(y + token * N + n, out.to(y.dtype.element_ty), mask=there)


def refusal(x: torch.Tensor, weights: torch.Tensor, *stacks: torch.Tensor | None) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernels can run."""
    if not 0 < len(x) <= moe_grouped.MOST_TOKENS:
        return f"not 1 to {moe_grouped.MOST_TOKENS} rows"
    return gradient_refusal(weights) or gemv.refusal(x[:1], *stacks)


def moe_decode(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return residual + Σ_j weights_j · E_e(n) with e = chosen_j, n = norm(x).

    An expert is E(n) = down(act(gate(n)) ⊙ (up(n) + shift)), or without gate down(act(up(n))). With `limit`, gate(n) is
    first capped at `limit`, and up(n) clipped to ±limit. x and residual [tokens, in], chosen i32 or i64 and weights
    [tokens, k], up and gate [experts, hidden, in], down [experts, in, hidden], up_bias and gate_bias [experts, hidden],
    down_bias [experts, in] → like x. The kernels sum in fp32; they round hidden features and result to the dtype of x.
    `tickets`: counters, see `linear_residual`. `kernel` is as in `uses_torch`; torch loops over experts, on CUDA over
    all of them, because the host does not know the choices. Raise ValueError if shapes do not fit, or the norm or
    activation is unknown.
    """
    experts, hidden, dim = up.shape
    if x.ndim != 2 or x.shape[1] != dim:
        raise ValueError(f"x {[*x.shape]} does not fit up {[*up.shape]} [experts, hidden, in]")
    if down.shape != (experts, dim, hidden):
        raise ValueError(f"down {[*down.shape]} must be {[experts, dim, hidden]}")
    if chosen.ndim != 2 or len(chosen) != len(x) or chosen.shape != weights.shape:
        raise ValueError(f"chosen {[*chosen.shape]} and weights {[*weights.shape]} must be [{len(x)}, k]")
    check_activation(activation)
    norm.check(dim)
    optional = up_bias, down_bias, gate_bias, residual, norm.gain, norm.shift
    if uses_torch(kernel, refusal, x, weights, up, down, gate, *optional):
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros(x.shape, dtype=wide) if residual is None else residual.to(wide)
        x = norm(x)

        def project(v: torch.Tensor, stack: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
            y = v @ stack[expert].to(wide).T
            return y if bias is None else y + bias[expert].to(wide)

        for expert in range(experts) if chosen.is_cuda else chosen.unique().tolist():
            share = (weights * (chosen == expert)).sum(1).to(wide)
            row = torch.arange(len(x), device=x.device) if chosen.is_cuda else share.nonzero()[:, 0]
            inner = project(x[row].to(wide), up, up_bias, expert)
            if gate is None:
                inner = ACTIVATIONS[activation](inner)
            else:
                inner = apply_glu(project(x[row].to(wide), gate, gate_bias, expert), inner, activation, limit, shift)
            total = total.index_add(0, row, share[row, None] * project(inner, down, down_bias, expert))
        return total.to(x.dtype)
    tokens, choices = chosen.shape
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    if tokens >= DOT_ROWS:
        return moe_grouped.grouped_moe(
            x, chosen, weights, up, down, gate, up_bias, down_bias, gate_bias, residual, norm, activation, limit, shift,
            tickets,
        )  # fmt: skip
    opened, y = x.new_empty(tokens * choices, hidden), torch.empty_like(x)
    opens, closes = _tiles(tokens, choices, hidden, dim, x.dtype)
    _open_kernel[(tokens * choices, triton.cdiv(hidden, opens.rows))](
        x, chosen, up, gate, up_bias, gate_bias, norm.gain, norm.shift, opened, hidden, dim, norm.eps,
        NORM=norm.kind, CHOICES=choices, ACTIVATION=activation, LIMIT=limit, SHIFT=shift, **_constants(opens),
        **options(x, opens.warps, 1),
    )  # fmt: skip
    _close_kernel[(tokens, triton.cdiv(dim, closes.rows))](
        opened, chosen, weights, down, down_bias, residual, y, dim, hidden,
        CHOICES=choices, **_constants(closes), **options(x, closes.warps, 1),
    )  # fmt: skip
    return y


def _tiles(tokens: int, choices: int, hidden: int, dim: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Return the tiles of the two kernels, by `choose_tile`, for one row of x and W [tokens · choices · hidden,
    dim], and W [tokens · dim, hidden]."""
    return choose_tile(1, tokens * choices * hidden, dim, dtype), choose_tile(1, tokens * dim, hidden, dtype)


def _constants(plan: Tile) -> dict[str, int]:
    return {"BLOCK_N": plan.rows, "BLOCK_K": plan.columns, "VECTOR": plan.vector}
