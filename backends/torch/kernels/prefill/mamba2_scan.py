"""Mamba-2's recurrence over a prompt, SSD in chunks (Dao & Gu 2024, arXiv 2405.21060); `ssd_step` takes one token.

h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_tᵀ and y_t = h_tᵀ C_t + D x_t per head, with scalars A and D, and the state h
[states, p] in f32. A prompt is split into chunks, which are processed in blocks of 64 tokens (32 for f32), by three
kernels: the final state of each chunk for a zero initial state (matrix products); the initial states of the chunks (a
running sum with one term per chunk); and y, which in a block is C times the state at its start plus the masked products
C Bᵀ within it. The state at the start of a block is never formed. Its product with C begins as C h, where h is the
chunk's initial state; for each block before, in order, it is multiplied by one scalar decay, and (C Bᵀ) x is added,
with every token's decay folded into x. So matrices of exponentials are needed only within a block.
"""

from __future__ import annotations

import torch

from ..shared import operands
from ..shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from ..shared.operands import contiguous, contiguous_tokens, power_of_2

CHUNK = 256  # tokens: longer chunks write fewer states, shorter ones have more programs
MOST_STATES, MOST_WIDTH = 256, 128


@jit
def _dot(a, b, INTERP: tl.constexpr):
    if INTERP:  # products of bf16 are wrong there
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def _decays(delta_ptr, row, there, stride, head, a):
    """Return, for the tokens `row` [tokens] of a head: Δ, the inclusive cumulative sum of Δ · a, and its last value (a
    scalar); `a` is A log₂ e. Δ is 0 where not `there`."""
    step = tl.load(delta_ptr + row * stride + head, mask=there, other=0.0).to(tl.float32)
    return step, tl.cumsum(step * a, 0), tl.sum(step * a, 0)


@jit
def _end_kernel(
    x_ptr, delta_ptr, a_ptr, b_ptr, ends_ptr, sums_ptr, seq, x_row, delta_row, b_row,
    STATES: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, INTERP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_P columns of the state [states, p] that a chunk reaches from a zero state, and the chunk's ΣΔ A log₂
    e. Grid [heads · blocks of columns, chunks, batch]. SHARE heads read one B."""
    start_next(PDL)
    wait_for_previous(PDL)
    SPLITS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    head, heads, batch = tl.program_id(0) // SPLITS, tl.num_programs(0) // SPLITS, tl.program_id(2)
    part, n, p = tl.program_id(1), tl.arange(0, BLOCK_N), (tl.program_id(0) % SPLITS) * BLOCK_P + tl.arange(0, BLOCK_P)
    a = tl.load(a_ptr + head).to(tl.float32) * 1.4426950408889634
    state, total = tl.zeros((BLOCK_N, BLOCK_P), tl.float32), 0.0
    for block in range(CHUNK):
        t = (part * CHUNK + block) * TOKENS + tl.arange(0, TOKENS)
        there, row = t < seq, (batch * seq + t).to(tl.int64)
        step, sums, decay = _decays(delta_ptr, row, there, delta_row, head, a)
        at = x_ptr + row[:, None] * x_row + head * WIDTH + p[None, :]
        x = tl.load(at, mask=there[:, None] & (p < WIDTH)[None, :], other=0.0)
        at = b_ptr + row[None, :] * b_row + (head // SHARE) * STATES + n[:, None]
        b = tl.load(at, mask=there[None, :] & (n < STATES)[:, None], other=0.0)
        driven = (x.to(tl.float32) * (step * tl.exp2(decay - sums))[:, None]).to(x.dtype)
        state = tl.exp2(decay) * state + _dot(b, driven, INTERP)
        total += decay
    at = ((batch * tl.num_programs(1) + part) * heads + head).to(tl.int64)
    tl.store(sums_ptr + at, total)
    cell = (at * STATES + n)[:, None] * WIDTH + p[None, :]
    tl.store(ends_ptr + cell, state, mask=(n < STATES)[:, None] & (p < WIDTH)[None, :])


@jit
def _start_kernel(
    ends_ptr, sums_ptr, past_ptr, present_ptr, parts, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Replace each chunk's final state (from zero) in `ends_ptr` by its initial state, BLOCK elements of a head at a
    time. Store the state after the last chunk in `present_ptr`. Grid [blocks of elements, heads, batch]."""
    start_next(PDL)
    wait_for_previous(PDL)
    head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine, state_offset = cell < SIZE, (batch * heads + head).to(tl.int64) * SIZE
    state = tl.zeros((BLOCK,), tl.float32)
    if past_ptr is not None:
        state = tl.load(past_ptr + state_offset + cell, mask=mine, other=0.0).to(tl.float32)
    at = (batch * parts * heads + head).to(tl.int64)
    end, total = tl.load(ends_ptr + at * SIZE + cell, mask=mine, other=0.0), tl.load(sums_ptr + at)
    for part in range(parts):
        to = ends_ptr + (at + part * heads) * SIZE + cell
        ahead = at + tl.minimum(part + 1, parts - 1) * heads  # read ahead by one chunk
        next_end, next_whole = tl.load(ends_ptr + ahead * SIZE + cell, mask=mine, other=0.0), tl.load(sums_ptr + ahead)
        tl.store(to, state, mask=mine)
        state = tl.exp2(total) * state + end
        end, total = next_end, next_whole
    tl.store(present_ptr + state_offset + cell, state.to(present_ptr.dtype.element_ty), mask=mine)


@jit
def _product(c_rows, b_rows, c_there, b_there, ACROSS, STATES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Return C B, fp32 [tokens, WIDTH]. `c_rows` [tokens] point to the rows of C [tokens, STATES], `b_rows` [WIDTH] to
    the columns of B [STATES, WIDTH], whose rows are ACROSS elements apart. `c_there` and `b_there` mask them."""
    y, n = tl.zeros((c_rows.shape[0], WIDTH), tl.float32), tl.arange(0, BLOCK_K)
    for first in range(0, BLOCK_N, BLOCK_K):
        valid = first + n < STATES
        c = tl.load(c_rows + (first + n)[None, :], mask=c_there[:, None] & valid[None, :], other=0.0)
        b = tl.load(b_rows + (first + n)[:, None] * ACROSS, mask=valid[:, None] & b_there[None, :], other=0.0)
        y += _dot(c, b.to(c.dtype), INTERP)
    return y


@jit
def _scan_kernel(
    x_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, starts_ptr, y_ptr, seq, x_row, delta_row, b_row, c_row,
    STATES: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, INTERP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y of TOKENS tokens of a head from the chunk's initial state. Grid [heads, blocks of tokens, batch]."""
    start_next(PDL)
    wait_for_previous(PDL)
    head, heads, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    p, within = tl.arange(0, BLOCK_P), tl.arange(0, TOKENS)
    wide, group = p < WIDTH, (head // SHARE) * STATES
    part, before = tl.program_id(1) // CHUNK, tl.program_id(1) % CHUNK
    a = tl.load(a_ptr + head).to(tl.float32) * 1.4426950408889634
    t = tl.program_id(1) * TOKENS + within
    there, row = t < seq, (batch * seq + t).to(tl.int64)
    c_rows = c_ptr + row[:, None] * c_row + group
    start = ((batch * tl.cdiv(tl.cdiv(seq, TOKENS), CHUNK) + part) * heads + head).to(tl.int64)
    y = _product(
        c_rows, starts_ptr + start * STATES * WIDTH + p[None, :], there, wide, WIDTH,
        STATES, BLOCK_N, BLOCK_K, BLOCK_P, INTERP,
    )  # fmt: skip
    for block in range(before):
        s = (batch * seq + (part * CHUNK + block) * TOKENS + within).to(tl.int64)
        b_rows = b_ptr + s[None, :] * b_row + group
        pairs = _product(c_rows, b_rows, there, within >= 0, 1, STATES, BLOCK_N, BLOCK_K, TOKENS, INTERP)
        step, sums, total = _decays(delta_ptr, s, within >= 0, delta_row, head, a)
        x = tl.load(x_ptr + s[:, None] * x_row + head * WIDTH + p[None, :], mask=wide[None, :], other=0.0)
        driven = (x.to(tl.float32) * (step * tl.exp2(total - sums))[:, None]).to(x.dtype)
        y = tl.exp2(total) * y + _dot(pairs.to(x.dtype), driven, INTERP)

    b_rows = b_ptr + row[None, :] * b_row + group
    pairs = _product(c_rows, b_rows, there, there, 1, STATES, BLOCK_N, BLOCK_K, TOKENS, INTERP)
    step, sums, _ = _decays(delta_ptr, row, there, delta_row, head, a)
    x_at = x_ptr + row[:, None] * x_row + head * WIDTH + p[None, :]
    x = tl.load(x_at, mask=there[:, None] & wide[None, :], other=0.0)
    gap = tl.where(within[:, None] >= within[None, :], sums[:, None] - sums[None, :], float("-inf"))
    pairs = (pairs * tl.exp2(gap) * step[None, :]).to(x.dtype)
    y = tl.exp2(sums)[:, None] * y + _dot(pairs, x, INTERP)
    if d_ptr is not None:
        y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
    y_at = y_ptr + (row[:, None] * heads + head) * WIDTH + p[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & wide[None, :])


def refusal(x: torch.Tensor, b: torch.Tensor, *others: torch.Tensor | None, heads: int, groups: int = 1) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernels can run."""
    states, width = b.shape[-1] // groups, x.shape[-1] // heads
    if states > MOST_STATES or width > MOST_WIDTH:
        return f"a state [{states}, {width}] is larger than [{MOST_STATES}, {MOST_WIDTH}]"
    if b.dtype != x.dtype:
        return f"x is {x.dtype} and b {b.dtype}"
    return operands.refusal(x, b, *others)


def has_mamba2_scan(
    x: torch.Tensor, b: torch.Tensor, *others: torch.Tensor | None, heads: int, groups: int = 1
) -> bool:
    """Return whether the kernels can compute `mamba2_scan` for these operands and torch is not compiling."""
    return not torch.compiler.is_compiling() and refusal(x, b, *others, heads=heads, groups=groups) is None


def check(
    x: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    past: torch.Tensor | None,
    heads: int,
    groups: int,
) -> tuple[int, int]:
    """Check the operands of a prompt, or of one token without seq axis; return (states, p), the shape of a head's h.
    Raise ValueError if shapes do not fit."""
    if heads % groups or x.shape[-1] % heads or b.shape[-1] % groups:
        raise ValueError(f"x {[*x.shape]} and b {[*b.shape]} cannot be split into {heads} heads and {groups} groups")
    if delta.shape != (*x.shape[:-1], heads) or a.shape != (heads,):
        raise ValueError(f"delta {[*delta.shape]} and a {[*a.shape]} do not fit {heads} heads of x {[*x.shape]}")
    if b.shape != c.shape or b.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"b {[*b.shape]} and c {[*c.shape]} do not fit x {[*x.shape]}")
    states, width = b.shape[-1] // groups, x.shape[-1] // heads
    if past is not None and past.shape != (len(x), heads, states, width):
        raise ValueError(f"past {[*past.shape]} must be {[len(x), heads, states, width]}")
    return states, width


def _sizes(dtype: torch.dtype, states: int, width: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Return the constexpr arguments of `_end_kernel` and `_scan_kernel`, then the warps of each."""
    wide = dtype == torch.float32
    tokens = 32 if wide else 64
    block_n, block_p = (power_of_2(n, 16) for n in (states, width))
    shared = {"STATES": states, "WIDTH": width, "CHUNK": CHUNK // tokens, "TOKENS": tokens, "BLOCK_N": block_n}
    end = {**shared, "BLOCK_P": max(16, min(block_p, 8192 // block_n))}
    scan = {**shared, "BLOCK_P": block_p, "BLOCK_K": min(block_n, tokens)}
    return end, scan, 8 if wide else 4, 8 if wide or block_n * block_p > 8192 else 4


def mamba2_scan(
    x: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    past: torch.Tensor | None = None,
    *,
    heads: int,
    groups: int = 1,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Mamba-2's recurrence over a prompt; return y and the state after it.

    x [batch, seq, heads·p], delta [batch, seq, heads], a (negative) and d [heads], b, c [batch, seq, groups·states]
    (head h reads group ⌊h·groups/heads⌋) → y like x. Operands may be slices of a wider last axis. `past` [batch, heads,
    states, p] is the state before x (None: zeros). The state after x has the dtype of `past`, f32 if that is None.
    `kernel` is as in `uses_torch`; torch goes token by token, in f32 (f64 for f64). Raise ValueError if shapes do not
    fit.
    """
    states, width = check(x, delta, a, b, c, past, heads, groups)
    if uses_torch(kernel, refusal, x, b, delta, a, c, d, past, heads=heads, groups=groups):
        wide = torch.promote_types(x.dtype, torch.float32)
        xs = x.to(wide).unflatten(2, (heads, width))
        steps = delta.to(wide)[..., None, None]
        bs, cs = (t.to(wide).unflatten(2, (groups, states)).repeat_interleave(heads // groups, 2) for t in (b, c))
        decays = torch.exp(steps * a.to(wide)[:, None, None])
        state = xs.new_zeros(len(x), heads, states, width) if past is None else past.to(wide)
        ys = []
        for t in range(x.shape[1]):
            state = decays[:, t] * state + steps[:, t] * bs[:, t, :, :, None] * xs[:, t, :, None]
            ys.append((state * cs[:, t, :, :, None]).sum(2))
        y = torch.stack(ys, 1)
        y = (y if d is None else y + d.to(wide)[:, None] * xs).to(x.dtype).flatten(2)
        return y, state if past is None else state.to(past.dtype)
    batch, seq, _ = x.shape
    x, delta, b, c = (contiguous_tokens(t) for t in (x, delta, b, c))
    a, d, past = a.contiguous(), contiguous(d), contiguous(past)
    parts = triton.cdiv(seq, CHUNK)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = batch, heads, states, width
    present = torch.empty(shape, dtype=torch.float32, device=x.device) if past is None else torch.empty_like(past)
    starts = torch.empty(batch, parts, heads, states, width, dtype=torch.float32, device=x.device)
    sums = torch.empty(batch, parts, heads, dtype=torch.float32, device=x.device)
    end, scan, end_warps, scan_warps = _sizes(x.dtype, states, width)
    extra = {"SHARE": heads // groups, "INTERP": not x.is_cuda}
    strides, splits = (x.stride(1), delta.stride(1), b.stride(1)), triton.cdiv(width, end["BLOCK_P"])
    _end_kernel[(heads * splits, parts, batch)](
        x, delta, a, b, starts, sums, seq, *strides, **end, **extra, **options(x, end_warps, stages=2)
    )
    _start_kernel[(triton.cdiv(states * width, 1024), heads, batch)](
        starts, sums, past, present, parts, SIZE=states * width, BLOCK=1024, **options(x)
    )
    _scan_kernel[(heads, triton.cdiv(seq, scan["TOKENS"]), batch)](
        x, delta, a, b, c, d, starts, y, seq, *strides, c.stride(1), **scan, **extra, **options(x, scan_warps, 2)
    )
    return y, present
