"""y = act(norm(x) Wᵀ + b) for up to 8 rows in one kernel: heads, routers, single projections, ungated feed-forwards."""

from __future__ import annotations

import torch

from .shared.activation import ACTIVATIONS, activate
from .shared.gemv import check, first_weights, flat, products, refusal, tile, typed
from .shared.launch import Variant, has_pdl, jit, options, tl, triton
from .shared.norm import NO_NORM, Norm
from .shared.rows import linear


@jit
def norm_linear_kernel(
    x, weight, gain, shift, bias, y, M, N, K, x_row, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block computes BLOCK_N outputs of all rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    first = first_weights(weight, rows, K, 0, K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    out = products(first, x, x_row, weight, gain, shift, rows, M, K, 0, K, eps, NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
    if bias is not None:
        out += tl.load(bias + rows).to(tl.float32)[None, :]
    m = tl.arange(0, BLOCK_M)
    tl.store(y + m[:, None] * N + n[None, :], activate(out, ACTIVATION), mask=(m[:, None] < M) & (n[None, :] < N))


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "identity",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What `norm_linear` computes, with torch."""
    return ACTIVATIONS[activation](linear(norm(x), weight, bias)).to(dtype or x.dtype)


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    activation: str = "identity",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """act(norm(x) Wᵀ + b): x [..., in], weight [out, in], bias [out] → [..., out] of `dtype`, that of x if not given.

    x may be a slice of a projection. Sums are fp32, and only the result is rounded. What `refusal` names is computed
    with torch.

    Raises:
        ValueError: if shapes do not fit, or the norm or activation is unknown.
    """
    check(x, weight, norm, bias)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if refusal(x, weight, norm.gain, norm.shift, bias):
        return reference(x, weight, bias, norm=norm, activation=activation, dtype=dtype)
    N, K = weight.shape
    rows = flat(x)
    y = torch.empty(*x.shape[:-1], N, dtype=dtype or x.dtype, device=x.device)
    plan = tile(len(rows), N, K, x.dtype)
    norm_linear_kernel[(triton.cdiv(N, plan.rows),)](
        rows, weight, norm.gain, norm.shift, bias, y, len(rows), N, K, rows.stride(0), norm.eps,
        NORM=norm.kind, ACTIVATION=activation, **plan.constants, PDL=has_pdl(x), **options(x, plan.warps, 1),
    )  # fmt: skip
    return y


def variants() -> list[Variant]:
    """Heads of one row and of eight, a LayerNorm, and a router without norm."""
    return [
        _variant(1, 128256, 4096, torch.bfloat16, "rms", "x weight gain"),
        _variant(8, 128256, 4096, torch.bfloat16, "rms", "x weight gain"),
        _variant(4, 2048, 1536, torch.float16, "layer", "x weight gain shift bias", "gelu"),
        _variant(1, 64, 576, torch.float32, "none", "x weight", "sigmoid"),
    ]


def _variant(
    m: int, n: int, k: int, dtype: torch.dtype, norm: str, given: str, activation: str = "identity"
) -> Variant:
    plan = tile(m, n, k, dtype)
    pointers, constants = typed(m, dtype, "x weight gain shift bias y", f"{given} y")
    return Variant(
        norm_linear_kernel,
        pointers | {"N": "i32", "K": "i32", "x_row": "i32", "eps": "fp32"},
        constants | plan.constants | {"NORM": norm, "ACTIVATION": activation, "PDL": True},
        warps=plan.warps,
        stages=1,
        ahead=True,
        divisible=("N", "K", "x_row"),
    )
