"""Decode step of Mamba-2's recurrence, SSD (Dao & Gu 2024, arXiv 2405.21060), fused with the operations around it.

Δ is the softplus of a projection plus a bias; y is gated, and the gated y is normed, as a whole or in groups of heads.
A block owns some columns of the state of a head. A norm needs all heads of its group: their blocks store the gated y,
and the last of them norms it, in the same launch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .prefill import mamba2_scan
from .prefill.mamba2_scan import refusal
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.operands import check_step, contiguous, contiguous_rows, power_of_2, row_stride
from .shared.recurrence import MOST, decay_rates, silu_gated, softplus, store_normed, update_state
from .shared.tickets import is_last, zero_counters

WIDTH = 32  # columns of the state that a block has
WARPS = 4


@jit
def ssd_step_kernel(
    x, delta, a, b, c, d, bias, gate, gain, past, y, present, raw, tickets,
    x_row, delta_row, b_row, c_row, gate_row, eps,
    STATES: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_A: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute y and the new state of BLOCK_P columns of a head. Grid [blocks of columns, heads, batch]. SHARE heads
    read one B and C; NORMED heads are normed together, by the last of their programs."""
    start_next(PDL)
    head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid_states, wide = n < STATES, p < WIDTH
    valid = valid_states[:, None] & wide[None, :]
    rate, skip, offset = tl.load(a + head).to(tl.float32), 0.0, 0.0
    if LOG_A:
        rate = -tl.exp(rate)
    if d is not None:
        skip = tl.load(d + head).to(tl.float32)
    if bias is not None:
        offset = tl.load(bias + head).to(tl.float32)
    wait_for_previous(PDL)
    cell = ((batch * heads + head) * STATES + n)[:, None] * WIDTH + p[None, :]
    state = tl.load(past + cell, mask=valid, other=0.0).to(tl.float32)
    step = tl.load(delta + batch * delta_row + head).to(tl.float32) + offset
    if SOFTPLUS:
        step = softplus(step)
    driven = tl.load(x + batch * x_row + head * WIDTH + p, mask=wide, other=0.0).to(tl.float32)
    group = (head // SHARE) * STATES + n
    into = tl.load(b + batch * b_row + group, mask=valid_states, other=0.0).to(tl.float32)
    out = tl.load(c + batch * c_row + group, mask=valid_states, other=0.0).to(tl.float32)
    power = step * rate * 1.4426950408889634
    output = update_state(state, power, into, step, driven, out, skip, present, cell, valid)
    output = silu_gated(output, gate, batch * gate_row + head * WIDTH + p, wide)
    row = (batch * heads + head) * WIDTH
    if NORM == "none":
        tl.store(y + row + p, output.to(y.dtype.element_ty), mask=wide)
    else:
        tl.store(raw + row + p, output, mask=wide)
        if is_last(tickets + (batch * heads + head) // NORMED, NORMED * tl.num_programs(0)):
            first = head // NORMED * (NORMED * WIDTH)
            gains = gain
            if gain is not None:
                gains = gain + first
            start = batch * heads * WIDTH + first
            store_normed(raw + start, gains, None, y + start, eps, NORMED * WIDTH, BLOCK)


def ssd_step(
    x: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    past: torch.Tensor,
    present: torch.Tensor | None = None,
    *,
    heads: int,
    groups: int = 1,
    bias: torch.Tensor | None = None,
    softplus: bool = False,
    log_a: bool = False,
    gate: torch.Tensor | None = None,
    norm: Norm = NO_NORM,
    norm_groups: int = 1,
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = norm((hᵀ C + D x) ⊙ silu(gate)) for one token and the new state h = exp(Δ A) past + Δ B xᵀ, per head.

    x and gate [batch, heads·p], delta [batch, heads], a (negative), d and `bias` [heads], b, c [batch, groups·states],
    past [batch, heads, states, p] → y like x, and h. Head h reads B and C of group ⌊h·groups/heads⌋. Δ is delta + bias,
    or with `softplus`, softplus(delta + bias); with `log_a`, A is −exp(a). The RMS norm is applied to each of
    `norm_groups` parts of y; its gain is [heads·p]. Operands with a batch axis may be slices of a projection. h is
    written to `present`, which may be `past` itself; without `present`, to a new tensor. `tickets`: counters, see
    `linear_residual`; batch·norm_groups suffice. `kernel` is as in `uses_torch`. Raise ValueError if shapes do not fit,
    the norm is a layer norm, or a state is not contiguous.
    """
    states, width = mamba2_scan.check(x, delta, a, b, c, past, heads, groups)
    check_step(x, past, present, heads, bias, gate)
    norm.check(x.shape[1])
    if norm.kind == "layer":
        raise ValueError("the kernel norms y by RMS norm only")
    if heads % norm_groups:
        raise ValueError(f"{heads} heads cannot be split into {norm_groups} norm groups")
    operands = (x, b, delta, a, c, d, past, bias, gate, norm.gain)
    if uses_torch(kernel, refusal, *operands, heads=heads, groups=groups):
        delta = delta if bias is None else delta + bias
        delta = F.softplus(delta) if softplus else delta
        a = decay_rates(a) if log_a else a
        x, delta, b, c = (t[:, None] for t in (x, delta, b, c))
        y, after = mamba2_scan.mamba2_scan(x, delta, a, b, c, d, past, heads=heads, groups=groups, kernel=False)
        y = y[:, 0] if gate is None else y[:, 0] * F.silu(gate)
        if norm.kind != "none":
            y = Norm(norm.kind, eps=norm.eps)(y.unflatten(1, (norm_groups, -1))).flatten(1)
            y = y if norm.gain is None else y * norm.gain
        return y, after if present is None else present.copy_(after)
    present = torch.empty_like(past) if present is None else present
    x, delta, b, c = map(contiguous_rows, (x, delta, b, c))
    gate, a, d = contiguous_rows(gate), a.contiguous(), contiguous(d)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    raw = None
    if norm.kind != "none":
        raw = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        tickets = zero_counters(x, len(x) * norm_groups) if tickets is None else tickets
    ssd_step_kernel[(triton.cdiv(width, WIDTH), heads, len(x))](
        x, delta, a, b, c, d, contiguous(bias), gate, contiguous(norm.gain), past, y, present, raw, tickets,
        x.stride(0), delta.stride(0), b.stride(0), c.stride(0), row_stride(gate), norm.eps,
        SOFTPLUS=softplus, LOG_A=log_a, NORM=norm.kind, **_sizes(heads, states, width, groups, norm_groups),
        **options(x, WARPS),
    )  # fmt: skip
    return y, present


def _sizes(heads: int, states: int, width: int, groups: int, norm_groups: int) -> dict[str, int]:
    normed = heads // norm_groups
    sizes = {"STATES": states, "WIDTH": width, "SHARE": heads // groups, "NORMED": normed}
    return sizes | {"BLOCK_N": power_of_2(states), "BLOCK_P": WIDTH, "BLOCK": min(MOST, power_of_2(normed * width))}
