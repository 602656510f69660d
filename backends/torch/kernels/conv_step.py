"""Decode step of the causal depthwise convolution before the recurrence of Mamba, Mamba-2 and similar layers.

One kernel shifts the state, multiplies, adds and applies the activation. It is not fused into the recurrence: in Mamba
(arXiv 2312.00752) two projections are between them; in Mamba-2 (arXiv 2405.21060) all heads read the same convolved B
and C, so the programs of different heads would race for the convolution's state.
"""

from __future__ import annotations

import torch

from .shared.activation import ACTIVATIONS, activate, check_activation
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.operands import check_step, contiguous, contiguous_rows, refusal

BLOCK = 128  # channels of a program


@jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, past_ptr, y_ptr, present_ptr, x_row,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y and the new state of BLOCK channels of a batch row. Grid [blocks of channels, batch]."""
    start_next(PDL)
    batch = tl.program_id(1).to(tl.int64)
    channel, tap = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAPS)[None, :]
    mine, at = channel < CHANNELS, channel[:, None]
    weight = tl.load(weight_ptr + at * WIDTH + tap, mask=mine[:, None] & (tap < WIDTH), other=0.0).to(tl.float32)
    y = tl.zeros((BLOCK,), tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=mine, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    state = batch * (WIDTH - 1) * CHANNELS + tap * CHANNELS + at
    before = tl.load(past_ptr + state, mask=mine[:, None] & (tap < WIDTH - 1), other=0.0)
    x = tl.load(x_ptr + batch * x_row + at, mask=mine[:, None], other=0.0)
    seen = tl.where(tap < WIDTH - 1, before, x.to(before.dtype))
    tl.debug_barrier()  # past may be present: all is read before anything is written
    tl.store(present_ptr + state - CHANNELS, seen, mask=mine[:, None] & (tap > 0) & (tap < WIDTH))
    y += tl.sum(tl.where(tap < WIDTH - 1, before.to(tl.float32), x.to(tl.float32)) * weight, axis=1)
    y = activate(y, ACTIVATION).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + batch * CHANNELS + channel, y, mask=mine)


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    past: torch.Tensor,
    present: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = activation(Σ_j weight[:, j] · inputs[j] + bias) and the new state, the last width − 1 inputs.

    `inputs` are the width − 1 previous inputs in `past`, oldest first, then x. x [batch, channels] may be a slice of a
    projection, weight [channels, width], bias [channels], past [batch, width − 1, channels] → y like x. The new state
    is written to `present`, which may be `past` itself; without `present`, to a new tensor. `kernel` is as in
    `uses_torch`. Raise ValueError if shapes do not fit, a state is not contiguous, or the activation is unknown.
    """
    (batch, channels), width = x.shape, weight.shape[-1]
    if weight.ndim != 2 or len(weight) != channels:
        raise ValueError(f"weight {[*weight.shape]} must be [{channels}, width] for x {[*x.shape]}")
    if past.shape != (batch, width - 1, channels):
        raise ValueError(f"past {[*past.shape]} must be {[batch, width - 1, channels]}")
    check_activation(activation)
    check_step(x, past, present)
    target = torch.empty_like(past) if present is None else present
    if uses_torch(kernel, refusal, x, weight, bias, past):
        wide = torch.promote_types(x.dtype, torch.float32)
        seen = torch.cat([past.to(wide), x[:, None].to(wide)], 1)  # [batch, width, channels]
        y = (seen * weight.T.to(wide)).sum(1)
        y = ACTIVATIONS[activation](y if bias is None else y + bias.to(wide)).to(x.dtype)
        return y, target.copy_(seen[:, 1:])
    x, weight, bias = contiguous_rows(x), weight.contiguous(), contiguous(bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _conv_kernel[(triton.cdiv(channels, BLOCK), batch)](
        x, weight, bias, past, y, target, x.stride(0), CHANNELS=channels, WIDTH=width,
        TAPS=triton.next_power_of_2(width), ACTIVATION=activation, BLOCK=BLOCK, **options(x),
    )  # fmt: skip
    return y, target
