"""Mamba's selective scan over a prompt (Gu & Dao 2023, arXiv 2312.00752); `selective_step` takes one token.

h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t and y_t = C_t h_t + D x_t per channel, states in f32. A warp holds four channels
per thread with all their states in registers (fewer channels with more than 16 states) and advances token by token: no
barrier, no exchange between threads, and one exponential per state and token, which limits the speed. A prompt is split
into chunks that run in parallel. Each chunk takes its initial state from the chunks before it: such a chunk ends in
state E if it starts from zero, and in E + exp(A ΣΔ) h if it starts from h. So the chunks are read twice, first for E
and ΣΔ, then for y. That is two exponentials per state and token; a parallel scan over time within the warp would cost
log₂(chunk) products and moves instead.
"""

from __future__ import annotations

import math

import torch

from ..shared import operands
from ..shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from ..shared.operands import contiguous, contiguous_tokens

PROGRAMS = 1056  # warps that 132 processors hold at once: a prompt is cut into chunks until there are as many
SHORTEST = 64  # tokens of a chunk: shorter ones are not worth the second reading
MOST_STATES = 64  # more do not fit in the registers of a warp


@jit
def _advance(state, a, step, x, b):
    """Return the state [states, channels] after one more token: `step` and x [channels], b [states]; a is A log₂ e."""
    return tl.exp2(a * step[None, :]) * state + b[:, None] * (step * x)[None, :]


@jit
def _load(ptr, row, stride, at, mask):
    """Return columns `at` [n] of row `row` of a matrix with row stride `stride`, fp32 [n]."""
    return tl.load(ptr + row.to(tl.int64) * stride + at, mask=mask, other=0.0).to(tl.float32)


@jit
def _end_kernel(
    x_ptr, delta_ptr, a_ptr, b_ptr, ends_ptr, sums_ptr, seq, chunk, x_row, delta_row, b_row,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the final state of a chunk for a zero initial state, and its ΣΔ. `a_ptr` is A log₂ e [states, channels].
    Grid [chunks without the last, blocks of channels, batch]."""
    start_next(PDL)
    wait_for_previous(PDL)
    part, batch = tl.program_id(0), tl.program_id(2)
    channel, n = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    mine, valid_states = channel < CHANNELS, n < STATES
    valid, cell = valid_states[:, None] & mine[None, :], n[:, None] * CHANNELS + channel[None, :]
    a = tl.load(a_ptr + cell, mask=valid, other=0.0)
    first = batch * seq + part * chunk
    x, step = _load(x_ptr, first, x_row, channel, mine), _load(delta_ptr, first, delta_row, channel, mine)
    b = _load(b_ptr, first, b_row, n, valid_states)
    state, total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    for t in range(chunk):
        row = first + tl.minimum(t + 1, chunk - 1)  # read ahead by one token
        next_x, next_step = _load(x_ptr, row, x_row, channel, mine), _load(delta_ptr, row, delta_row, channel, mine)
        next_b = _load(b_ptr, row, b_row, n, valid_states)
        state = _advance(state, a, step, x, b)
        total += step
        x, step, b = next_x, next_step, next_b
    at = (batch * (tl.num_programs(0) + 1) + part).to(tl.int64)
    tl.store(sums_ptr + at * CHANNELS + channel, total, mask=mine)
    tl.store(ends_ptr + at * STATES * CHANNELS + cell, state, mask=valid)


@jit
def _scan_kernel(
    x_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, past_ptr, ends_ptr, sums_ptr, y_ptr, present_ptr,
    seq, chunk, x_row, delta_row, b_row, c_row,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y of one chunk; the program of the last chunk also stores the state after it. Grid [chunks, blocks of
    channels, batch]."""
    start_next(PDL)
    wait_for_previous(PDL)
    part, parts, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    channel, n = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    mine, valid_states = channel < CHANNELS, n < STATES
    valid, cell = valid_states[:, None] & mine[None, :], n[:, None] * CHANNELS + channel[None, :]
    a = tl.load(a_ptr + cell, mask=valid, other=0.0)
    state, d = tl.zeros((BLOCK_N, BLOCK_C), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    state_offset = batch.to(tl.int64) * STATES * CHANNELS
    if past_ptr is not None:
        state = tl.load(past_ptr + state_offset + cell, mask=valid, other=0.0).to(tl.float32)
    if d_ptr is not None:
        d = tl.load(d_ptr + channel, mask=mine, other=0.0).to(tl.float32)
    for before in range(part):
        at = (batch * parts + before).to(tl.int64)
        decay = tl.exp2(a * _load(sums_ptr, at, CHANNELS, channel, mine)[None, :])
        state = decay * state + tl.load(ends_ptr + at * STATES * CHANNELS + cell, mask=valid, other=0.0)

    first, count = batch * seq + part * chunk, tl.minimum(chunk, seq - part * chunk)
    x, step = _load(x_ptr, first, x_row, channel, mine), _load(delta_ptr, first, delta_row, channel, mine)
    b, c = _load(b_ptr, first, b_row, n, valid_states), _load(c_ptr, first, c_row, n, valid_states)
    for t in range(count):
        row = first + tl.minimum(t + 1, count - 1)
        next_x, next_step = _load(x_ptr, row, x_row, channel, mine), _load(delta_ptr, row, delta_row, channel, mine)
        next_b, next_c = _load(b_ptr, row, b_row, n, valid_states), _load(c_ptr, row, c_row, n, valid_states)
        state = _advance(state, a, step, x, b)
        y = tl.sum(state * c[:, None], axis=0) + d * x
        tl.store(y_ptr + (first + t).to(tl.int64) * CHANNELS + channel, y.to(y_ptr.dtype.element_ty), mask=mine)
        x, step, b, c = next_x, next_step, next_b, next_c
    if part == parts - 1:
        tl.store(present_ptr + state_offset + cell, state.to(present_ptr.dtype.element_ty), mask=valid)


def refusal(x: torch.Tensor, a: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernels can run."""
    if a.shape[1] > MOST_STATES:
        return f"more than {MOST_STATES} states per channel"
    return operands.refusal(x, a, *others)


def has_mamba_scan(x: torch.Tensor, a: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether the kernels can compute `mamba_scan` for these operands and torch is not compiling."""
    return not torch.compiler.is_compiling() and refusal(x, a, *others) is None


def check(
    x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, past: torch.Tensor | None
) -> None:
    """Check that the shapes of a prompt's operands, or of one token without seq axis, fit; else raise ValueError."""
    channels, states = a.shape
    if x.shape != delta.shape or x.shape[-1] != channels:
        raise ValueError(f"x {[*x.shape]} and delta {[*delta.shape]} do not fit a {[*a.shape]}")
    if not b.shape == c.shape == (*x.shape[:-1], states):
        raise ValueError(f"b {[*b.shape]} and c {[*c.shape]} must be {[*x.shape[:-1], states]}")
    if past is not None and past.shape != (len(x), states, channels):
        raise ValueError(f"past {[*past.shape]} must be {[len(x), states, channels]}")


def _block(states: int) -> int:
    """Return the number of channels per program of the prompt kernels, so that their states fit in registers."""
    return max(32, min(128, 2048 // int(triton.next_power_of_2(states))))


def mamba_scan(
    x: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    past: torch.Tensor | None = None,
    *,
    chunk: int | None = None,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Mamba's recurrence over a prompt; return y and the state after it.

    x, delta [batch, seq, channels], a [channels, states] (negative), b, c [batch, seq, states], d [channels], of any
    floating dtypes → y like x. Operands may be slices of a wider last axis. `past` [batch, states, channels] is the
    state before x (None: zeros). The state after x has the dtype of `past`, f32 if that is None. `chunk`: tokens per
    program, by default chosen by shape. `kernel` is as in `uses_torch`; torch goes token by token, in f32 (f64 for
    f64). Raise ValueError if shapes do not fit.
    """
    check(x, delta, a, b, c, past)
    if uses_torch(kernel, refusal, x, a, delta, b, c, d, past):
        wide = torch.promote_types(x.dtype, torch.float32)
        xs, steps, rates, bs, cs = (t.to(wide) for t in (x, delta, a.T, b, c))
        state = xs.new_zeros(len(x), *rates.shape) if past is None else past.to(wide)
        ys = []
        for t in range(x.shape[1]):
            step = steps[:, t, None]
            state = torch.exp(step * rates) * state + bs[:, t, :, None] * (step * xs[:, t, None])
            ys.append((cs[:, t, :, None] * state).sum(1))
        y = torch.stack(ys, 1)
        y = (y if d is None else y + d.to(wide) * xs).to(x.dtype)
        return y, state if past is None else state.to(past.dtype)
    (batch, seq, channels), states = x.shape, a.shape[1]
    sizes = {"CHANNELS": channels, "STATES": states, "BLOCK_C": _block(states)}
    blocks = triton.cdiv(channels, sizes["BLOCK_C"])
    wanted = max(1, min(seq // SHORTEST, PROGRAMS // (blocks * batch)))
    chunk = triton.cdiv(seq, wanted) if chunk is None else min(chunk, seq)
    parts = triton.cdiv(seq, chunk)
    x, delta, b, c = (contiguous_tokens(t) for t in (x, delta, b, c))
    rates = (a.T.float() * math.log2(math.e)).contiguous()
    d, past = contiguous(d), contiguous(past)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    present = rates.new_empty(batch, states, channels) if past is None else torch.empty_like(past)
    ends = rates.new_empty(batch, parts, states, channels)
    sums = rates.new_empty(batch, parts, channels)
    strides = x.stride(1), delta.stride(1), b.stride(1)
    settings = {**sizes, "BLOCK_N": triton.next_power_of_2(states), **options(x, warps=1)}
    if parts > 1:
        _end_kernel[(parts - 1, blocks, batch)](x, delta, rates, b, ends, sums, seq, chunk, *strides, **settings)
    _scan_kernel[(parts, blocks, batch)](
        x, delta, rates, b, c, d, past, ends, sums, y, present, seq, chunk, *strides, c.stride(1), **settings
    )
    return y, present
