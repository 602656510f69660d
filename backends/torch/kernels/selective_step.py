"""Decode step of Mamba's selective scan (Gu & Dao 2023, arXiv 2312.00752), fused with the operations around it.

The step Δ is projected from a low-rank vector, 1/16 of the model's width; B, C and that vector may be normed, as in
Jamba (arXiv 2403.19887) and Falcon-Mamba (arXiv 2410.05355); y is gated. A block owns a few channels with their states,
and loads its rows of the projection, A and D before the preceding kernel has ended. Each block norms B and C itself:
they have about 16 elements.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .prefill import mamba_scan
from .prefill.mamba_scan import refusal
from .shared.gemv import PROCESSORS
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.operands import check_step, contiguous, contiguous_rows, power_of_2, row_stride
from .shared.recurrence import decay_rates, silu_gated, softplus, update_state
from .shared.small_batch_linear import linear

CHANNELS = 32  # of a block, half of that where they make too few blocks
RANKS = 256  # columns of the projection that a block takes at a time
WARPS = 4


@jit
def load_normed(ptr, gain, at, known, size, eps, NORM: tl.constexpr):
    """Return the elements of B or C at offsets `at` [n] from `ptr` (0 where not `known`), fp32 [n]; with NORM "rms",
    RMS-normed over its `size` elements."""
    x = tl.load(ptr + at, mask=known, other=0.0).to(tl.float32)
    if NORM == "rms":
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
        if gain is not None:
            x *= tl.load(gain + at, mask=known, other=0.0).to(tl.float32)
    return x


@jit
def project_step(first, step, weight, gain, channel, mine, eps, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Return norm(step) Wᵀ, fp32 [channels], for the rows `channel` [channels] of W [·, RANK]; rows where `mine` is
    false are not loaded. `step` points to the RANK elements of the token; `first` are the weights of the first BLOCK_R
    columns."""
    r = tl.arange(0, BLOCK_R)
    x = tl.load(step + r, mask=r < RANK, other=0.0).to(tl.float32)
    squares = x * x
    if gain is not None:
        x *= tl.load(gain + r, mask=r < RANK, other=0.0).to(tl.float32)
    total = tl.sum(first.to(tl.float32) * x[None, :], axis=1)
    for start in range(BLOCK_R, RANK, BLOCK_R):
        k = start + r
        x = tl.load(step + k, mask=k < RANK, other=0.0).to(tl.float32)
        squares += x * x
        if gain is not None:
            x *= tl.load(gain + k, mask=k < RANK, other=0.0).to(tl.float32)
        there = mine[:, None] & (k < RANK)[None, :]
        weights = tl.load(weight + channel[:, None] * RANK + k[None, :], mask=there, other=0.0)
        total += tl.sum(weights.to(tl.float32) * x[None, :], axis=1)
    return total * tl.rsqrt(tl.sum(squares, axis=0) / RANK + eps) if NORM == "rms" else total


@jit
def selective_step_kernel(
    x, delta, a, b, c, d, weight, bias, gate, gain, b_gain, c_gain, past, y, present,
    x_row, delta_row, b_row, c_row, gate_row, eps, b_eps, c_eps,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, RANK: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_A: tl.constexpr,
    NORM: tl.constexpr, B_NORM: tl.constexpr, C_NORM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y and the new state of BLOCK_C channels. Grid [blocks of channels, batch]. `present` may be `past`."""
    start_next(PDL)
    batch = tl.program_id(1).to(tl.int64)
    channel, n, r = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    mine, valid_states = channel < CHANNELS, n < STATES
    valid = valid_states[:, None] & mine[None, :]
    if weight is not None:
        first = tl.load(
            weight + channel[:, None] * RANK + r[None, :], mask=mine[:, None] & (r < RANK)[None, :], other=0.0
        )
    rate = tl.load(a + channel[None, :] * STATES + n[:, None], mask=valid, other=0.0).to(tl.float32)
    if LOG_A:
        rate = -tl.exp(rate)
    skip, offset = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    if d is not None:
        skip = tl.load(d + channel, mask=mine, other=0.0).to(tl.float32)
    if bias is not None:
        offset = tl.load(bias + channel, mask=mine, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    cell = (batch * STATES + n)[:, None] * CHANNELS + channel[None, :]
    state = tl.load(past + cell, mask=valid, other=0.0).to(tl.float32)
    if weight is not None:
        step = project_step(first, delta + batch * delta_row, weight, gain, channel, mine, eps, RANK, BLOCK_R, NORM)
    else:
        step = tl.load(delta + batch * delta_row + channel, mask=mine, other=0.0).to(tl.float32)
    step += offset
    if SOFTPLUS:
        step = softplus(step)
    driven = tl.load(x + batch * x_row + channel, mask=mine, other=0.0).to(tl.float32)
    into = load_normed(b + batch * b_row, b_gain, n, valid_states, STATES, b_eps, B_NORM)
    out = load_normed(c + batch * c_row, c_gain, n, valid_states, STATES, c_eps, C_NORM)
    power = rate * 1.4426950408889634 * step[None, :]
    output = update_state(state, power, into, step, driven, out, skip, present, cell, valid)
    output = silu_gated(output, gate, batch * gate_row + channel, mine)
    tl.store(y + batch * CHANNELS + channel, output.to(y.dtype.element_ty), mask=mine)


def selective_step(
    x: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    past: torch.Tensor,
    present: torch.Tensor | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softplus: bool = False,
    log_a: bool = False,
    gate: torch.Tensor | None = None,
    norm: Norm = NO_NORM,
    b_norm: Norm = NO_NORM,
    c_norm: Norm = NO_NORM,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = (C h + D x) ⊙ silu(gate) for one token and the new state h = exp(Δ A) past + Δ B x.

    Without `gate`, y is not gated. x and gate [batch, channels], a [channels, states] (negative), b, c [batch, states],
    d [channels], past [batch, states, channels] → y like x, and h. The step Δ is delta + bias for `delta` [batch,
    channels] and `bias` [channels]; with `weight` [channels, rank] it is norm(delta) Wᵀ + bias for delta [batch, rank];
    with `softplus`, softplus is then applied. With `log_a`, A is −exp(a). B and C are normed by `b_norm` and `c_norm`.
    Operands with a batch axis may be slices of a projection. h is written to `present`, which may be `past` itself;
    without `present`, to a new tensor. `kernel` is as in `uses_torch`. Raise ValueError if shapes do not fit, a norm is
    a layer norm, `norm` is given without `weight`, or a state is not contiguous.
    """
    if weight is None:
        mamba_scan.check(x, delta, a, b, c, past)
    else:
        mamba_scan.check(x, x, a, b, c, past)
        if weight.shape != (len(a), delta.shape[-1]) or delta.shape != (len(x), weight.shape[1]):
            raise ValueError(
                f"delta {[*delta.shape]} must be {len(x)} rows for the projection weight {[*weight.shape]}"
            )
    check_step(x, past, present, len(a), bias, gate)
    for each, vector in ((norm, delta), (b_norm, b), (c_norm, c)):
        each.check(vector.shape[-1])
        if each.kind == "layer":
            raise ValueError("delta, b and c may have RMS norms only, not layer norms")
        if vector is delta and weight is None and each.kind != "none":
            raise ValueError("norm needs weight: a step size that is already projected is not normalized")
    gains = norm.gain, b_norm.gain, c_norm.gain
    if uses_torch(kernel, refusal, x, a, delta, b, c, d, weight, bias, gate, past, *gains):
        if weight is not None:
            delta = linear(norm(delta), weight, bias)
        elif bias is not None:
            delta = delta + bias
        delta = F.softplus(delta) if softplus else delta
        a, b, c = decay_rates(a) if log_a else a, b_norm(b), c_norm(c)
        y, after = mamba_scan.mamba_scan(x[:, None], delta[:, None], a, b[:, None], c[:, None], d, past, kernel=False)
        y = y[:, 0] if gate is None else y[:, 0] * F.silu(gate)
        return y, after if present is None else present.copy_(after)
    (batch, channels), states = x.shape, a.shape[1]
    present = torch.empty_like(past) if present is None else present
    x, delta, b, c = map(contiguous_rows, (x, delta, b, c))
    gate, d, weight, bias = contiguous_rows(gate), contiguous(d), contiguous(weight), contiguous(bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = _sizes(channels, states, 0 if weight is None else weight.shape[1])
    kinds = {"NORM": norm.kind, "B_NORM": b_norm.kind, "C_NORM": c_norm.kind}
    selective_step_kernel[(triton.cdiv(channels, sizes["BLOCK_C"]), batch)](
        x, delta, a.contiguous(), b, c, d, weight, bias, gate, *gains, past, y, present,
        x.stride(0), delta.stride(0), b.stride(0), c.stride(0), row_stride(gate), norm.eps, b_norm.eps, c_norm.eps,
        SOFTPLUS=softplus, LOG_A=log_a, **kinds, **sizes, **options(x, WARPS),
    )  # fmt: skip
    return y, present


def _sizes(channels: int, states: int, rank: int) -> dict[str, int]:
    block = CHANNELS if channels >= CHANNELS * PROCESSORS else CHANNELS // 2
    sizes = {"CHANNELS": channels, "STATES": states, "RANK": rank, "BLOCK_C": block}
    blocks = {"BLOCK_N": power_of_2(states), "BLOCK_R": min(RANKS, power_of_2(rank))}
    return sizes | blocks
