"""One token of a state space, and ln(1 + eˣ), which makes a positive step of any number."""

from __future__ import annotations

import torch

from .launch import jit, tl


def rates(a_log: torch.Tensor) -> torch.Tensor:
    """A = −exp(a_log), with torch."""
    return -a_log.exp()


@jit
def softplus(x):
    """ln(1 + eˣ) of x, fp32 of any shape, to fp32's precision also where it is small.

    It is max(x, 0) + ln(1 + e) with e = e^−|x| ≤ 1, and ln(1 + e) = 2 artanh(s), s = e / (2 + e) ≤ 1/3: eight terms of
    its series leave 3⁻¹⁸. The logarithm of the hardware is not precise near 1.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    square = s * s
    series = 1 / 13 + square * (1 / 15 + square / 17)
    series = 1 / 7 + square * (1 / 9 + square * (1 / 11 + square * series))
    return tl.maximum(x, 0.0) + 2 * s * (1 + square * (1 / 3 + square * (1 / 5 + square * series)))


@jit
def advance(state, power, into, step, driven, out, skip, present, at, mask):
    """Store the state after a token, h = 2^power h + into (step · driven)ᵀ, at `at`; return hᵀ out + skip · driven."""
    state = tl.exp2(power) * state + into[:, None] * (step * driven)[None, :]
    tl.debug_barrier()  # the state before may be in the same place, held by several warps: all have read it
    tl.store(present + at, state.to(present.dtype.element_ty), mask=mask)
    return tl.sum(state * out[:, None], axis=0) + skip * driven


@jit
def silu_gated(y, gate, at, mask):
    """y ⊙ silu(gate), whose numbers are at `at`; y without a gate."""
    if gate is not None:
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        y *= g * tl.sigmoid(g)
    return y
