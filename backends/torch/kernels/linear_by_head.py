"""y_h = W_h x_h per head for up to 64 rows in one kernel: values of latents (DeepSeek-V2, arXiv 2405.04434).

The product is that of `norm_linear`, but each head multiplies its own slice of x.
"""

from __future__ import annotations

import torch

from .shared.gemv import choose_tile, flatten_rows, load_first_weights, norm_product, refusal
from .shared.launch import jit, start_next, tl, triton, uses_torch, wait_for_previous


@jit
def linear_by_head_kernel(
    x, weight, y, M, N, K, x_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of a head for all rows. Grid [blocks of outputs, heads]."""
    start_next(PDL)
    head, heads = tl.program_id(1), tl.num_programs(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = head * N + tl.minimum(n, N - 1)
    first = load_first_weights(weight, rows, K, 0, K, BLOCK_K, STAGES, BITS, PDL)
    wait_for_previous(PDL)
    out = norm_product(
        first, x + head * K, x_row, weight, None, None, None, None, rows, M, heads * N, K, 0, K, 0.0,
        "none", BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)[:, None]
    tl.store(y + m * (heads * N) + head * N + n[None, :], out, mask=(m < M) & (n < N)[None, :])


def linear_by_head(x: torch.Tensor, weight: torch.Tensor, heads: int, *, kernel: bool | None = None) -> torch.Tensor:
    """Return W_h x_h for each head h: x [..., heads·in], weight [heads·out, in] → [..., heads·out]. The kernel sums in
    fp32 and rounds only the result. `kernel` is as in `uses_torch`. Raise ValueError if shapes do not fit."""
    if weight.ndim != 2 or len(weight) % heads or x.shape[-1] != heads * weight.shape[1]:
        raise ValueError(f"x {[*x.shape]} does not fit weight {[*weight.shape]} [{heads} heads·out, in]")
    if uses_torch(kernel, refusal, x, weight):
        parts = x.unflatten(-1, (heads, -1)), weight.unflatten(0, (heads, -1))
        return torch.einsum("...hi,hoi->...ho", *parts).flatten(-2)
    (outputs, K), rows = weight.shape, flatten_rows(x)
    y = x.new_empty(*x.shape[:-1], outputs)
    plan = choose_tile(len(rows), outputs, K, x.dtype).within(outputs // heads)
    linear_by_head_kernel[(triton.cdiv(outputs // heads, plan.rows), heads)](
        rows, weight, y, len(rows), outputs // heads, K, rows.stride(0), **plan.options(x),
    )  # fmt: skip
    return y
