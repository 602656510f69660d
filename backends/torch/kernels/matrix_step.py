"""Decode step of a recurrence with a matrix state per head: linear attention and the delta rule.

It covers gated linear attention (Yang 2023, arXiv 2312.06635), Lightning Attention (Qin 2024, arXiv 2401.04658), the
matrix LSTM (Beck 2024, arXiv 2405.04517), RWKV-6 (Peng 2024, arXiv 2404.05892), Gated DeltaNet (Yang 2024, arXiv
2412.06464) and Kimi Delta Attention (2025, arXiv 2510.26692), fused with the operations around it: norms of queries and
keys, the decay from its step, norm and gate of y.

A block owns some columns of the state of a head with all its rows, so that Sᵀ k, the value that the delta rule
replaces, is a sum within the block. A norm of y needs all blocks of its heads: the last of them norms it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .shared import operands
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.operands import check_step, contiguous, contiguous_rows, power_of_2, row_stride
from .shared.recurrence import MOST, decay_rates, softplus, store_normed
from .shared.tickets import is_last, zero_counters

WIDTH = 32  # columns of the state that a block has
TILE = 8192  # numbers of the state that a block has: with longer keys it has fewer columns
MOST_KEYS = 1024  # rows of the state: with more, a block has too few columns for whole sectors of memory
WARPS = 4


@jit
def scale_head(x, scale, eps, KEYS: tl.constexpr, UNIT: tl.constexpr):
    """Return x · scale for the KEYS elements x of one head, fp32; with UNIT, first divide x by √(mean square + ε)."""
    if UNIT:
        scale *= tl.rsqrt(tl.sum(x * x, axis=0) / KEYS + eps)
    return x * scale


@jit
def decay_factor(step, rate, offset, STEP: tl.constexpr):
    """Return the decay factor of a state: e^step; or, with STEP, e^(rate · softplus(step + offset))."""
    if STEP:
        step = rate * softplus(step + offset)
    return tl.exp2(step * 1.4426950408889634)


@jit
def matrix_step_kernel(
    q, k, v, decay, beta, a_log, bias, gate, gain, past, y, present, raw, tickets,
    q_row, k_row, v_row, decay_row, beta_row, gate_row, q_scale, k_scale, beta_scale, head_eps, eps,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, BY_KEY: tl.constexpr, UNIT: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute y and the new state of BLOCK_P columns of a head. Grid [blocks of columns, heads, batch]. SHARE heads
    read one query and key; NORMED heads are normed together, by the last of their programs. BY_KEY: the decay is per
    key element."""
    start_next(PDL)
    head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid_keys, wide = n < KEYS, p < WIDTH
    valid = valid_keys[:, None] & wide[None, :]
    rate, offset = 0.0, 0.0
    if a_log is not None:
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    if bias is not None:
        if BY_KEY:
            offset = tl.load(bias + head * KEYS + n, mask=valid_keys, other=0.0).to(tl.float32)
        else:
            offset = tl.load(bias + head).to(tl.float32)
    wait_for_previous(PDL)
    cell = ((batch * heads + head) * KEYS + n)[:, None] * WIDTH + p[None, :]
    state = tl.load(past + cell, mask=valid, other=0.0).to(tl.float32)
    group = (head // SHARE) * KEYS + n
    query = tl.load(q + batch * q_row + group, mask=valid_keys, other=0.0).to(tl.float32)
    key = tl.load(k + batch * k_row + group, mask=valid_keys, other=0.0).to(tl.float32)
    written = tl.load(v + batch * v_row + head * WIDTH + p, mask=wide, other=0.0).to(tl.float32)
    key = scale_head(key, k_scale, head_eps, KEYS, UNIT)
    if decay is not None:
        if BY_KEY:
            step = tl.load(decay + batch * decay_row + head * KEYS + n, mask=valid_keys, other=0.0).to(tl.float32)
            state *= decay_factor(step, rate, offset, a_log is not None)[:, None]
        else:
            step = tl.load(decay + batch * decay_row + head).to(tl.float32)
            state *= decay_factor(step, rate, offset, a_log is not None)
    if beta is not None:
        share = tl.load(beta + batch * beta_row + head).to(tl.float32) * beta_scale
        written = share * (written - tl.sum(state * key[:, None], axis=0))
    state += key[:, None] * written[None, :]
    read = tl.sum(state * scale_head(query, q_scale, head_eps, KEYS, UNIT)[:, None], axis=0)
    tl.debug_barrier()  # the state before may be in the same place, held by several warps: all have read it
    tl.store(present + cell, state.to(present.dtype.element_ty), mask=valid)
    row = (batch * heads + head) * WIDTH
    if NORM == "none":
        if gate is not None:
            read *= tl.load(gate + batch * gate_row + head * WIDTH + p, mask=wide, other=0.0).to(tl.float32)
        tl.store(y + row + p, read.to(y.dtype.element_ty), mask=wide)
    else:
        tl.store(raw + row + p, read, mask=wide)
        if is_last(tickets + (batch * heads + head) // NORMED, NORMED * tl.num_programs(0)):
            first = head // NORMED * (NORMED * WIDTH)
            gains = gate
            if gate is not None:
                gains = gate + batch * gate_row + first
            start = batch * heads * WIDTH + first
            store_normed(raw + start, gain, gains, y + start, eps, NORMED * WIDTH, BLOCK)


def refusal(v: torch.Tensor, past: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Return the reason to fall back to torch for the state `past` [..., d, dv]; None if the kernel can run."""
    if past.shape[-2] > MOST_KEYS:
        return f"keys have more than {MOST_KEYS} features"
    return operands.refusal(v, past, *others)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    heads: int,
    groups: int,
) -> tuple[int, int]:
    """Check the shapes of the operands of `matrix_step`; return (d, dv), the rows and columns of a head's state. Raise
    ValueError if shapes do not fit."""
    if heads < 1 or groups < 1 or heads % groups or q.shape[-1] % groups or v.shape[-1] % heads:
        raise ValueError(f"q {[*q.shape]} and v {[*v.shape]} cannot be split into {groups} groups and {heads} heads")
    batch, keys, width = len(v), q.shape[-1] // groups, v.shape[-1] // heads
    if not q.shape == k.shape == (batch, groups * keys) or v.shape != (batch, heads * width):
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} must have {batch} rows, q as wide as k")
    if past.shape != (batch, heads, keys, width):
        raise ValueError(f"past {[*past.shape]} is not [{batch}, {heads}, {keys}, {width}]")
    if decay is not None and decay.shape not in ((batch, heads), (batch, heads * keys)):
        raise ValueError(f"decay {[*decay.shape]} is neither [{batch}, {heads}] nor [{batch}, {heads * keys}]")
    if beta is not None and beta.shape != (batch, heads):
        raise ValueError(f"beta {[*beta.shape]} is not [{batch}, {heads}]")
    return keys, width


def check_around(
    decay: torch.Tensor | None,
    a_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    unit: Norm,
    norm: Norm,
    gate: torch.Tensor | None,
    v: torch.Tensor,
    heads: int,
    norm_groups: int,
) -> None:
    """Check the operands of `matrix_step` around the recurrence: `a_log` and `bias` of the decay, norms and gate. Raise
    ValueError if one does not fit, or the kernel does not support a norm."""
    if a_log is not None and (decay is None or a_log.shape != (heads,)):
        raise ValueError(f"a_log {[*a_log.shape]} must be [{heads}] and needs a decay")
    if bias is not None and (a_log is None or decay is None or bias.shape != decay.shape[1:]):
        raise ValueError(f"bias {[*bias.shape]} must have the shape of decay without its batch axis, and needs a_log")
    if gate is not None and gate.shape != v.shape:
        raise ValueError(f"gate {[*gate.shape]} must have the shape of v {[*v.shape]}")
    if heads % norm_groups:
        raise ValueError(f"{heads} heads cannot be split into {norm_groups} norm groups")
    norm.check(v.shape[1] // norm_groups)
    if "layer" in (unit.kind, norm.kind) or unit.gain is not None:
        raise ValueError("the kernel norms y by RMS norm only, and queries and keys without a gain")


def matrix_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: torch.Tensor,
    present: torch.Tensor | None = None,
    *,
    heads: int,
    groups: int = 1,
    decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    unit: Norm = NO_NORM,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    beta_scale: float = 1.0,
    norm: Norm = NO_NORM,
    norm_groups: int = 1,
    gate: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = norm(S'ᵀ q) ⊙ gate for one token and the new state S' = S + k vᵀ, with S = diag(e^decay) past, per
    head.

    With `beta` β [batch, heads], the delta rule replaces the value stored for the key: S' = S + β k (v − Sᵀ k)ᵀ.

    q, k [batch, groups·d] (head h reads group ⌊h·groups/heads⌋), v and `gate` [batch, heads·dv], `decay` [batch,
    heads·d] per key element, [batch, heads] per head, or None (0); past [batch, heads, d, dv] → y like v, and S'. With
    `a_log` [heads] the decay is −e^a_log softplus(decay + bias); `bias` is [heads·d] or [heads], like decay. q and k
    are normed per head by `unit`; q, k and β are multiplied by `q_scale`, `k_scale` and `beta_scale`; `norm` is an RMS
    norm of each of `norm_groups` parts of y, with the same gain for all. Operands with a batch axis may be slices of a
    projection. S' is written to `present`, which may be `past` itself; without `present`, to a new tensor. `tickets`:
    counters, see `linear_residual`; batch·norm_groups suffice. `kernel` is as in `uses_torch`; torch computes in f32
    (f64 for f64). Raise ValueError if shapes do not fit, a norm is not supported, or a state is not contiguous.
    """
    keys, width = check(q, k, v, past, decay, beta, heads, groups)
    check_step(v, past, present)
    check_around(decay, a_log, bias, unit, norm, gate, v, heads, norm_groups)
    if uses_torch(kernel, refusal, v, past, q, k, decay, beta, a_log, bias, gate, norm.gain):
        wide = torch.promote_types(v.dtype, torch.float32)
        query, key = (
            (unit(t.to(wide).unflatten(1, (groups, keys))) * scale).repeat_interleave(heads // groups, 1)[..., None]
            for t, scale in ((q, q_scale), (k, k_scale))
        )
        written, after = v.to(wide).unflatten(1, (heads, 1, width)), past.to(wide)
        if decay is not None:
            fade = decay.to(wide).unflatten(1, (heads, -1))
            if a_log is not None:
                step = fade if bias is None else fade + bias.to(wide).unflatten(0, (heads, -1))
                fade = decay_rates(a_log.to(wide))[:, None] * F.softplus(step)
            after = fade.exp()[..., None] * after
        if beta is not None:
            written = beta_scale * beta.to(wide)[..., None, None] * (written - key.mT @ after)
        after = after + key * written
        y = (query.mT @ after).flatten(1)
        if norm.kind != "none":
            gain = None if norm.gain is None else norm.gain.to(wide)
            y = Norm(norm.kind, gain, eps=norm.eps)(y.unflatten(1, (norm_groups, -1))).flatten(1)
        y = (y if gate is None else y * gate.to(wide)).to(v.dtype)
        return y, after.to(past.dtype) if present is None else present.copy_(after)
    present = torch.empty_like(past) if present is None else present
    q, k, v = map(contiguous_rows, (q, k, v))
    decay, beta, gate = contiguous_rows(decay), contiguous_rows(beta), contiguous_rows(gate)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    raw = None
    if norm.kind != "none":
        raw = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        tickets = zero_counters(v, len(v) * norm_groups) if tickets is None else tickets
    sizes = _sizes(heads, groups, keys, width, decay is not None and decay.shape[1] > heads, norm_groups)
    matrix_step_kernel[(triton.cdiv(width, sizes["BLOCK_P"]), heads, len(v))](
        q, k, v, decay, beta, contiguous(a_log), contiguous(bias), gate, contiguous(norm.gain),
        past, y, present, raw, None if raw is None else tickets,
        q.stride(0), k.stride(0), v.stride(0), row_stride(decay), row_stride(beta), row_stride(gate),
        q_scale, k_scale, beta_scale, unit.eps, norm.eps,
        UNIT=unit.kind == "rms", NORM=norm.kind, **sizes, **options(v, WARPS),
    )  # fmt: skip
    return y, present


def _sizes(heads: int, groups: int, keys: int, width: int, by_key: bool, norm_groups: int) -> dict[str, int]:
    rows, normed = power_of_2(keys), heads // norm_groups
    most = WIDTH // 2 if width % 4 else WIDTH  # odd rows come number by number, with an address in a register for each
    columns = min(most, power_of_2(width), TILE // rows)
    sizes = {"KEYS": keys, "WIDTH": width, "SHARE": heads // groups, "BY_KEY": by_key, "NORMED": normed}
    return sizes | {"BLOCK_N": rows, "BLOCK_P": columns, "BLOCK": min(MOST, power_of_2(normed * width))}
