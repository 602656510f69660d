"""One decode step of a state-space layer, softplus for its step size, and the launch of generated kernels for custom
recurrences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import operands
from .launch import jit, options, tl, triton, uses_torch

MOST = 8192  # numbers that the last block of a norm takes at a time


def decay_rates(a_log: torch.Tensor) -> torch.Tensor:
    """Return A = −exp(a_log)."""
    return -a_log.exp()


@jit
def softplus(x):
    """Return ln(1 + eˣ) for x, fp32 of any shape, to fp32's precision also for small results. It is max(x, 0) + ln(1 +
    e) with e = e^−|x| ≤ 1, and ln(1 + e) = 2 artanh(s), s = e / (2 + e) ≤ 1/3: eight terms of its series leave 3⁻¹⁸.
    The logarithm of the hardware is not precise near 1."""
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    square = s * s
    series = 1 / 13 + square * (1 / 15 + square / 17)
    series = 1 / 7 + square * (1 / 9 + square * (1 / 11 + square * series))
    return tl.maximum(x, 0.0) + 2 * s * (1 + square * (1 / 3 + square * (1 / 5 + square * series)))


@jit
def update_state(state, power, into, step, driven, out, skip, present, at, mask):
    """Store the new state h = 2^power ⊙ state + into (step ⊙ driven)ᵀ, [n, p], in `present` at offsets `at` under
    `mask`; return hᵀ out + skip ⊙ driven, [p]. `into` and `out` are [n], `step` and `driven` [p]."""
    state = tl.exp2(power) * state + into[:, None] * (step * driven)[None, :]
    tl.debug_barrier()  # the state before may be in the same place, held by several warps: all have read it
    tl.store(present + at, state.to(present.dtype.element_ty), mask=mask)
    return tl.sum(state * out[:, None], axis=0) + skip * driven


@jit
def store_normed(raw, gain, gate, y, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store in y the RMS norm of the SIZE fp32 elements at `raw`, times `gain` and `gate` [SIZE] if not None. Elements
    are read BLOCK at a time."""
    at = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        v = tl.load(raw + start + at, mask=start + at < SIZE, other=0.0, cache_modifier=".cg")
        squares += v * v
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        there = start + at < SIZE
        v = tl.load(raw + start + at, mask=there, other=0.0, cache_modifier=".cg") * rstd
        if gain is not None:
            v *= tl.load(gain + start + at, mask=there, other=0.0).to(tl.float32)
        if gate is not None:
            v *= tl.load(gate + start + at, mask=there, other=0.0).to(tl.float32)
        tl.store(y + start + at, v.to(y.dtype.element_ty), mask=there)


@jit
def silu_gated(y, gate, at, mask):
    """Return y ⊙ silu(gate), with the gate loaded at offsets `at` under `mask`; y if `gate` is None."""
    if gate is not None:
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        y *= g * tl.sigmoid(g)
    return y


def step_in_place(
    generated: Any,
    step: Callable[..., tuple[torch.Tensor, ...]],
    states: tuple[torch.Tensor, ...],
    tokens: tuple[torch.Tensor, ...],
    constants: tuple[torch.Tensor, ...] = (),
    *,
    outputs: tuple[tuple[int, ...], ...],
    count: int,
    block: int,
    kernel: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the output [batch, 1, ...] of one decode step of a recurrence, or a tuple if there are several outputs;
    update `states` [batch, ...] in place.

    `step(*states, *tokens, *constants)` returns the new states and the outputs, for tokens without their axis of length
    1. `generated` is `step` as a kernel: each program computes `block` of the `count` state rows of a sequence.
    `tokens` are [batch or 1, 1, ...]. `outputs` are the shapes of the outputs without batch and token; their dtype is
    that of the first token. `kernel` is as in `uses_torch`; torch computes in f32 (f64 for f64). Raise ValueError if a
    state is not contiguous.
    """
    batch, like = len(states[0]), tokens[0]
    if not all(state.is_contiguous() for state in states):
        raise ValueError("the states of a recurrence must be contiguous")
    rows = [x[:, 0].expand(batch, *x.shape[2:]) for x in tokens]
    if uses_torch(kernel, operands.refusal, like, *tokens, *states, *constants):
        wide = torch.promote_types(like.dtype, torch.float32)
        results = step(*(t.to(wide) for t in (*states, *rows, *constants)))
        for state, new in zip(states, results, strict=False):
            state.copy_(new)
        ys = tuple(y.to(like.dtype)[:, None] for y in results[len(states) :])
    else:
        rows = [x if x[0].is_contiguous() else x.contiguous() for x in rows]
        ys = tuple(torch.empty((batch, 1, *shape), dtype=like.dtype, device=like.device) for shape in outputs)
        generated[(triton.cdiv(count, block), batch)](
            *states, *rows, *(c.contiguous() for c in constants), *ys, *(x.stride(0) for x in rows),
            BLOCK=block, **options(like),
        )  # fmt: skip
    return ys if len(ys) > 1 else ys[0]
