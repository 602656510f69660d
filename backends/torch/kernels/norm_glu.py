"""y = act(norm(x) W_gateᵀ) ⊙ norm(x) W_upᵀ for up to 64 rows in one kernel (GLU variants, arXiv 2002.05202).

The limit on gate and up, and the shift added to up, are those of gpt-oss (model card, arXiv 2508.10925).
The ungated form, act(norm(x) W_upᵀ), is `norm_linear` with an activation.
"""

from __future__ import annotations

import torch

from .prefill.gated_activation import gated_activation
from .shared.activation import apply_gate, check_activation
from .shared.gemv import Weight, check, choose_tile, norm_affine, refusal, weight_operands
from .shared.launch import jit, start_next, tl, triton, uses_torch
from .shared.norm import NO_NORM, Norm
from .shared.small_batch_linear import linear


@jit
def norm_glu_kernel(
    x, weight, scales, offsets, gain, shift, bias, y, M, N, K, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N / 2 of the N gated features of all M rows: gates, ups, products. Grid [blocks of features]."""
    start_next(PDL)
    HALF: tl.constexpr = BLOCK_N // 2
    begin = tl.program_id(0) * HALF
    halves = tl.arange(0, BLOCK_N)
    rows = tl.minimum(begin + halves % HALF, N - 1) + halves // HALF * N  # the gates, then the ups
    out = norm_affine(
        x, K, weight, scales, offsets, gain, shift, bias, rows, M, 2 * N, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN, PDL,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, HALF]), [0, 2, 1]))
    m, n = tl.arange(0, BLOCK_M)[:, None], begin + tl.arange(0, HALF)[None, :]
    tl.store(y + m * N + n, apply_gate(gate, up, ACTIVATION, LIMIT, SHIFT), mask=(m < M) & (n < N))


def norm_glu(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return act(gate) ⊙ (up + shift) with [gate, up] = norm(x) Wᵀ + b: x [..., in] → [..., hidden].

    weight [2·hidden, in] and bias [2·hidden] hold all gates first, then all ups. With `limit`, gate is first capped at
    `limit`, and up clipped to ±limit. The kernel computes in fp32 and rounds only the result. `kernel` is as in
    `uses_torch`. For more than 64 rows, torch computes the product x Wᵀ, and `gated_activation` the activation. Raise
    ValueError if shapes do not fit, or the norm or activation is unknown.
    """
    check(x, weight, norm, bias)
    if len(weight) % 2:
        raise ValueError(f"weight {list(weight.shape)} has an odd number of rows: gate and up need the same")
    check_activation(activation)
    if uses_torch(kernel, refusal, x, weight, norm.gain, norm.shift, bias):
        gate_up = linear(norm(x), weight, bias)
        return gated_activation(gate_up, activation=activation, limit=limit, shift=shift, kernel=kernel)
    N, K = len(weight) // 2, weight.shape[1]
    flat = x.reshape(-1, K).contiguous()
    y = x.new_empty(*x.shape[:-1], N)
    plan = choose_tile(len(flat), 2 * N, K, x.dtype, 2, weight)
    norm_glu_kernel[(triton.cdiv(N, plan.rows // 2),)](
        flat, *weight_operands(weight), norm.gain, norm.shift, bias, y, len(flat), N, K, norm.eps,
        NORM=norm.kind, ACTIVATION=activation, LIMIT=limit, SHIFT=shift, **plan.options(x),
    )  # fmt: skip
    return y
