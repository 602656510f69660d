"""y = act(norm(x) Wᵀ + b) for up to 64 rows in one kernel: heads, routers, projections, ungated feed-forwards."""

from __future__ import annotations

from functools import partial

import torch

from .shared.activation import ACTIVATIONS, activate, check_activation
from .shared.gemv import affine, check, flat, refusal, tile
from .shared.launch import BF16, FP16, FP32, Variant, jit, start_next, tl, triton, uses_torch
from .shared.norm import NO_NORM, Norm
from .shared.rows import linear


@jit
def norm_linear_kernel(
    x, weight, gain, shift, bias, y, M, N, K, x_row, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block computes BLOCK_N outputs of all rows."""
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    out = affine(
        x, x_row, weight, gain, shift, bias, rows, M, K, eps, NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, PDL
    )
    m = tl.arange(0, BLOCK_M)
    tl.store(y + m[:, None] * N + n[None, :], activate(out, ACTIVATION), mask=(m[:, None] < M) & (n[None, :] < N))


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "identity",
    dtype: torch.dtype | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """act(norm(x) Wᵀ + b): x [..., in], weight [out, in], bias [out] → [..., out] of `dtype`, that of x if not given.

    x may be a slice of a projection. Sums are fp32, and only the result is rounded. `kernel`: see `uses_torch`.

    Raises:
        ValueError: if shapes do not fit, or the norm or activation is unknown.
    """
    check(x, weight, norm, bias)
    check_activation(activation)
    if uses_torch(kernel, refusal, x, weight, norm.gain, norm.shift, bias):
        return ACTIVATIONS[activation](linear(norm(x), weight, bias)).to(dtype or x.dtype)
    N, K = weight.shape
    rows = flat(x)
    y = torch.empty(*x.shape[:-1], N, dtype=dtype or x.dtype, device=x.device)
    plan = tile(len(rows), N, K, x.dtype)
    norm_linear_kernel[(triton.cdiv(N, plan.rows),)](
        rows, weight, norm.gain, norm.shift, bias, y, len(rows), N, K, rows.stride(0), norm.eps,
        NORM=norm.kind, ACTIVATION=activation, **plan.options(x),
    )  # fmt: skip
    return y


reference = partial(norm_linear, kernel=False)


def variants() -> list[Variant]:
    """Heads of one row and of eight, a LayerNorm, and a router without norm."""
    return [
        tile(m, n, k, dtype).variant(norm_linear_kernel, m, dtype, "N K x_row", forms, absent=absent)
        for m, n, k, dtype, norm, absent, activation in (
            (1, 128256, 4096, BF16, "rms", "shift bias", "identity"),
            (8, 128256, 4096, BF16, "rms", "shift bias", "identity"),
            (4, 2048, 1536, FP16, "layer", "", "gelu"),
            (1, 64, 576, FP32, "none", "gain shift bias", "sigmoid"),
        )
        for forms in [{"NORM": norm, "ACTIVATION": activation}]
    ]
