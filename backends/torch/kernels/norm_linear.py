"""y = act(norm(x) Wᵀ + b) for up to 64 rows in one kernel: heads, routers, projections, ungated feed-forwards."""

from __future__ import annotations

from typing import Any

import torch

from .shared.activation import ACTIVATIONS, activate, check_activation
from .shared.gemv import Weight, check, choose_tile, flatten_rows, norm_affine, refusal, weight_operands
from .shared.launch import custom_operator, jit, start_next, tl, triton, uses_torch
from .shared.norm import NO_NORM, Norm
from .shared.quantized_gemv import Codes
from .shared.small_batch_linear import linear


@jit
def norm_linear_kernel(
    x, weight, scales, offsets, gain, shift, bias, y, M, N, K, x_row, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of all M rows of x. Grid [blocks of outputs]."""
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    out = norm_affine(
        x, x_row, weight, scales, offsets, gain, shift, bias, rows, M, N, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN, PDL,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    tl.store(y + m[:, None] * N + n[None, :], activate(out, ACTIVATION), mask=(m[:, None] < M) & (n[None, :] < N))


def norm_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "identity",
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return act(norm(x) Wᵀ + b): x [..., in], weight [out, in], bias [out] → [..., out]. x may be a slice of a
    projection. The kernel sums in fp32 and rounds only the result. `kernel` is as in `uses_torch`. Raise ValueError if
    shapes do not fit, or the norm or activation is unknown."""
    check(x, weight, norm, bias)
    check_activation(activation)
    if uses_torch(kernel, refusal, x, weight, norm.gain, norm.shift, bias):
        return ACTIVATIONS[activation](linear(norm(x), weight, bias))
    bits = weight.bits if isinstance(weight, Codes) else 0
    gain, shift = norm.gain, norm.shift
    return launch_norm_linear(x, *weight_operands(weight), bits, bias, gain, shift, norm.kind, norm.eps, activation)


def _empty(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@custom_operator(_empty)
def launch_norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bits: int,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    shift: torch.Tensor | None,
    norm: str,
    eps: float,
    activation: str,
) -> torch.Tensor:
    """Compute `norm_linear` with the kernel. `weight` is a matrix (`bits` 0), or the packed codes of a `Codes` of
    `bits` bits with these `scales` and `offsets`. `norm` is the kind of the norm."""
    rows, N, K = flatten_rows(x), len(weight), x.shape[-1]
    y = _empty(x, weight)
    plan = choose_tile(
        len(rows), N, K, x.dtype, weight=weight if scales is None else Codes(weight, scales, offsets, bits, K)
    )
    norm_linear_kernel[(triton.cdiv(N, plan.rows),)](
        rows, weight, scales, offsets, gain, shift, bias, y, len(rows), N, K, rows.stride(0), eps,
        NORM=norm, ACTIVATION=activation, **plan.options(x),
    )  # fmt: skip
    return y
