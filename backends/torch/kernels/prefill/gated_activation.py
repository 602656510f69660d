"""Gated activation of many tokens in one pass over gate and up projections (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

import torch

from ..shared import launch
from ..shared.activation import apply_gate, apply_glu, check_activation
from ..shared.launch import jit, start_next, tl, triton, uses_torch, wait_for_previous
from ..shared.operands import gradient_refusal

ROWS, COLUMNS = 4, 1024  # of a program


@jit
def gated_activation_kernel(
    both, y, M, N,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS of the N gated features of ROWS tokens: `both` [M, 2·N] → y [M, N]. Grid [blocks of tokens,
    blocks of features]."""
    start_next(PDL)
    wait_for_previous(PDL)
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there, at = (m < M) & (n < N), both + m * (2 * N) + n
    gate = tl.load(at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=there, other=0.0).to(tl.float32)
    tl.store(y + m * N + n, apply_gate(gate, up, ACTIVATION, LIMIT, SHIFT), mask=there)


def refusal(both: torch.Tensor) -> str | None:
    """Return the reason why the kernel cannot take `both`, in a few words; None if it can."""
    if reason := launch.refusal(both, dtype=both.dtype):
        return reason
    if not both.is_contiguous() or both.numel() == 0:
        return "the projections are not contiguous"
    return gradient_refusal(both)


def gated_activation(
    both: torch.Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return act(gate) ⊙ (up + shift) [..., hidden] for `both` = [gate, up] [..., 2·hidden]. With `limit`, gate is
    first capped at `limit`, and up clipped to ±limit. `kernel` is as in `uses_torch`. Raise ValueError if the
    activation is unknown."""
    check_activation(activation)
    if uses_torch(kernel, refusal, both):
        gate, up = both.chunk(2, -1)
        return apply_glu(gate, up, activation, limit, shift)
    N = both.shape[-1] // 2
    y = both.new_empty(*both.shape[:-1], N)
    M = y.numel() // N
    gated_activation_kernel[(triton.cdiv(M, ROWS), triton.cdiv(N, COLUMNS))](
        both, y, M, N,
        ACTIVATION=activation, LIMIT=limit, SHIFT=shift, ROWS=ROWS, COLUMNS=COLUMNS, **launch.options(both, 4, 1),
    )  # fmt: skip
    return y
