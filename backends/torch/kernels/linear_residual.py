"""y = residual + s·norm(x Wᵀ + b) for up to 64 rows in one kernel: the output projection of attention and of an MLP.

Where W has too few rows to occupy the GPU, its columns are split between blocks (split-K), and the last block of a row
adds the partial sums in a fixed order: the result does not depend on the order of arrival. A norm of the product, as in
sandwich norms (arXiv 2105.13290), needs all outputs; the last of all blocks applies it.
"""

from __future__ import annotations

import torch

from .shared import gemv, launch
from .shared.gemv import Tile, Weight, check, choose_tile, load_first_weights, norm_product, refusal, weight_operands
from .shared.launch import jit, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.operands import power_of_2
from .shared.small_batch_linear import linear
from .shared.tickets import is_last, zero_counters


@jit
def sum_splits(partial, bias, m, n, M, N, SPLITS: tl.constexpr):
    """Return x Wᵀ + b at rows m and outputs n (broadcast) from SPLITS partial products [SPLITS, M, N]; 0 for n ≥ N."""
    there = (m < M) & (n < N)
    total = tl.load(partial + m * N + n, mask=there, other=0.0, cache_modifier=".cg")
    for split in range(1, SPLITS):
        total += tl.load(partial + (split * M + m) * N + n, mask=there, other=0.0, cache_modifier=".cg")
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    return total


@jit
def store_normed(
    partial, bias, residual, gain, shift, y, M, N, scale, eps,
    NORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Store residual + scale · norm(x Wᵀ + b) of all rows and outputs in y, BLOCK_H outputs at a time."""
    m, h = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_H)[None, :]
    mean = tl.zeros([BLOCK_M, 1], tl.float32)
    if NORM == "layer":
        for start in range(0, N, BLOCK_H):
            mean += tl.sum(sum_splits(partial, bias, m, start + h, M, N, SPLITS), axis=1)[:, None] / N
    squares = tl.zeros([BLOCK_M, 1], tl.float32)
    for start in range(0, N, BLOCK_H):
        centred = sum_splits(partial, bias, m, start + h, M, N, SPLITS) - mean
        squares += tl.sum(tl.where(start + h < N, centred * centred, 0.0), axis=1)[:, None]
    rstd = tl.rsqrt(squares / N + eps)
    for start in range(0, N, BLOCK_H):
        n = start + h
        there = (m < M) & (n < N)
        out = (sum_splits(partial, bias, m, n, M, N, SPLITS) - mean) * rstd
        if gain is not None:
            out *= tl.load(gain + n, mask=n < N, other=0.0).to(tl.float32)
        if shift is not None:
            out += tl.load(shift + n, mask=n < N, other=0.0).to(tl.float32)
        before = tl.load(residual + m * N + n, mask=there, other=0.0).to(tl.float32)
        tl.store(y + m * N + n, before + scale * out, mask=there)


@jit
def linear_residual_kernel(
    x, weight, scales, offsets, bias, residual, gain, shift, y, partial, tickets, M, N, K, each, scale, eps,
    NORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows over `each` columns of W. The last program of these outputs (with NORM: of
    all outputs) stores y. Grid [blocks of outputs, SPLITS]."""
    start_next(PDL)
    block, split = tl.program_id(0), tl.program_id(1)
    begin, end = split * each, tl.minimum(split * each + each, K)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    first = load_first_weights(weight, rows, K, begin, end, BLOCK_K, STAGES, BITS, PDL)
    wait_for_previous(PDL)
    m, n = tl.arange(0, BLOCK_M)[:, None], n[None, :]
    at, there = m * N + n, (m < M) & (n < N)
    before = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    out = norm_product(
        first, x, K, weight, scales, offsets, None, None, rows, M, N, K, begin, end, 0.0,
        "none", BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN,
    )  # fmt: skip
    if SPLITS == 1 and NORM == "none":
        if bias is not None:
            out += tl.load(bias + rows).to(tl.float32)[None, :]
        tl.store(y + at, before + scale * out, mask=there)
    else:
        tl.store(partial + split * M * N + at, out, mask=there)
        if NORM == "none":
            if is_last(tickets + block, SPLITS):
                tl.store(y + at, before + scale * sum_splits(partial, bias, m, n, M, N, SPLITS), mask=there)
        else:
            if is_last(tickets, SPLITS * tl.num_programs(0)):
                store_normed(
                    partial, bias, residual, gain, shift, y, M, N, scale, eps, NORM, SPLITS, BLOCK_M, BLOCK_H
                )  # fmt: skip


def linear_residual(
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    norm: Norm = NO_NORM,
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return residual + scale · norm(x Wᵀ + b): x [..., in], weight [out, in], bias [out], residual [..., out] → [...,
    out]. The kernel sums in fp32 and rounds only the result. `tickets` i32 [out], 0 between launches, are counters of
    finished blocks that only this model uses; without them, launches on a stream share counters. `kernel` is as in
    `uses_torch`. Raise ValueError if shapes do not fit, or the norm is unknown."""
    check(x, weight, NO_NORM, bias)
    norm.check(len(weight))
    if residual.shape != (*x.shape[:-1], len(weight)):
        raise ValueError(f"residual {list(residual.shape)} does not fit x {list(x.shape)} Wᵀ, {len(weight)} wide")
    if uses_torch(kernel, refusal, x, weight, residual, bias, norm.gain, norm.shift):
        if isinstance(weight, torch.Tensor) and is_addmm(x, weight, residual, bias, norm):
            total = torch.addmm(residual.reshape(-1, len(weight)), x.reshape(-1, x.shape[-1]), weight.T, alpha=scale)
            return total.view(residual.shape)
        return torch.add(residual, norm(linear(x, weight, bias)), alpha=scale)
    N, K = weight.shape
    flat = x.reshape(-1, K).contiguous()
    M, plan = len(flat), choose_tile(len(flat), N, K, x.dtype, weight=weight)
    splits, each = split_columns(N, K, plan)
    y = torch.empty_like(residual)
    partial = None
    if splits > 1 or norm.kind != "none":
        partial = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
        tickets = zero_counters(x, N) if tickets is None else tickets
    linear_residual_kernel[(triton.cdiv(N, plan.rows), splits)](
        flat, *weight_operands(weight), bias, residual, norm.gain, norm.shift, y, partial, tickets,
        M, N, K, each, scale, norm.eps, NORM=norm.kind, SPLITS=splits,
        BLOCK_H=outputs_per_step(N, plan), **plan.options(x),
    )  # fmt: skip
    return y


def is_addmm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, norm: Norm
) -> bool:
    """Return whether the fallback is one `addmm`: where Triton can run, in one dtype, without bias and norm."""
    plain = bias is None and norm.kind == "none" and x.dtype == weight.dtype == residual.dtype
    return plain and launch.refusal(x) is None


def split_columns(outputs: int, inputs: int, plan: Tile) -> tuple[int, int]:
    """Return (number of parts into which the columns of W [outputs, inputs] are split, columns per part). Columns are
    split only if there would be fewer than two blocks per multiprocessor. Then there are up to four blocks per
    multiprocessor (two on tensor cores, whose blocks are larger); each block has at least one step."""
    blocks, steps = -(-outputs // plan.rows), -(-inputs // plan.columns)
    most = (2 if plan.stages else 4) * gemv.PROCESSORS
    wanted = -(-most // blocks) if blocks < 2 * gemv.PROCESSORS else 1
    each = -(-steps // min(wanted, steps))
    return -(-steps // each), each * plan.columns


def outputs_per_step(outputs: int, plan: Tile) -> int:
    """Return how many outputs the last block normalizes at a time: all, but at most 64 elements per thread."""
    return min(power_of_2(outputs), 64 * 32 * plan.warps // plan.batch)
