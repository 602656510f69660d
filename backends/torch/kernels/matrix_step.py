"""One token of a recurrence whose state is a matrix for each head: linear attention and the delta rule.

It serves gated linear attention (Yang 2023, arXiv 2312.06635), Lightning Attention (Qin 2024, arXiv 2401.04658), the
matrix LSTM (Beck 2024, arXiv 2405.04517), RWKV-6 (Peng 2024, arXiv 2404.05892), Gated DeltaNet (Yang 2024, arXiv
2412.06464) and Kimi Delta Attention (2025, arXiv 2510.26692). A block owns some columns of the state of a head with all
its rows, so that what the state holds under a key, which the delta rule replaces, is a sum within the block.
"""

from __future__ import annotations

from functools import partial

import torch

from .shared import operands
from .shared.launch import BF16, FP16, FP32, Variant, jit, options, start_next, tl, triton, uses_torch, variant, wait
from .shared.operands import check_step, power_of_2, row_stride, side_by_side

WIDTH = 32  # columns of the state that a block has
MOST = 8192  # numbers of the state that a block has: with longer keys it has fewer columns
MOST_KEYS = 1024  # rows of the state: with more, a block has too few columns for whole sectors of memory
WARPS = 4


@jit
def matrix_step_kernel(
    q, k, v, decay, beta, past, y, present, q_row, k_row, v_row, decay_row, beta_row,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of BLOCK_P columns, heads, batch]. SHARE heads read one key; present may be past."""
    start_next(PDL)
    head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    known, wide = n < KEYS, p < WIDTH
    both = known[:, None] & wide[None, :]
    wait(PDL)
    cell = ((batch * heads + head) * KEYS + n)[:, None] * WIDTH + p[None, :]
    state = tl.load(past + cell, mask=both, other=0.0).to(tl.float32)
    group = (head // SHARE) * KEYS + n
    query = tl.load(q + batch * q_row + group, mask=known, other=0.0).to(tl.float32)
    key = tl.load(k + batch * k_row + group, mask=known, other=0.0).to(tl.float32)
    written = tl.load(v + batch * v_row + head * WIDTH + p, mask=wide, other=0.0).to(tl.float32)
    if decay is not None:
        if BY_KEY:
            power = tl.load(decay + batch * decay_row + head * KEYS + n, mask=known, other=0.0).to(tl.float32)
            state *= tl.exp2(power * 1.4426950408889634)[:, None]
        else:
            power = tl.load(decay + batch * decay_row + head).to(tl.float32)
            state *= tl.exp2(power * 1.4426950408889634)
    if beta is not None:
        rate = tl.load(beta + batch * beta_row + head).to(tl.float32)
        written = rate * (written - tl.sum(state * key[:, None], axis=0))
    state += key[:, None] * written[None, :]
    tl.debug_barrier()  # the state before may be in the same place, held by several warps: all have read it
    tl.store(present + cell, state.to(present.dtype.element_ty), mask=both)
    made = tl.sum(state * query[:, None], axis=0)
    tl.store(y + (batch * heads + head) * WIDTH + p, made.to(y.dtype.element_ty), mask=wide)


def refusal(v: torch.Tensor, past: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Say why torch computes a token of v with the state `past` [..., d, dv], in a few words; None if a kernel does."""
    if past.shape[-2] > MOST_KEYS:
        return f"keys are longer than {MOST_KEYS}"
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
    """Return the rows and columns of the state of a head.

    Raises:
        ValueError: the shapes do not fit.
    """
    if heads < 1 or groups < 1 or heads % groups or q.shape[-1] % groups or v.shape[-1] % heads:
        raise ValueError(f"q {[*q.shape]} and v {[*v.shape]} do not fall into {groups} groups and {heads} heads")
    batch, keys, width = len(v), q.shape[-1] // groups, v.shape[-1] // heads
    if not q.shape == k.shape == (batch, groups * keys) or v.shape != (batch, heads * width):
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} are not rows of {batch} texts, q like k")
    if past.shape != (batch, heads, keys, width):
        raise ValueError(f"past {[*past.shape]} is not [{batch}, {heads}, {keys}, {width}]")
    if decay is not None and decay.shape not in ((batch, heads), (batch, heads * keys)):
        raise ValueError(f"decay {[*decay.shape]} is neither [{batch}, {heads}] nor [{batch}, {heads * keys}]")
    if beta is not None and beta.shape != (batch, heads):
        raise ValueError(f"beta {[*beta.shape]} is not [{batch}, {heads}]")
    return keys, width


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
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = S'ᵀ q of one token and the new state S' = S + k vᵀ, with S = diag(e^decay) past; per head.

    With `beta` β [batch, heads] what stands under the key is replaced, S' = S + β k (v − Sᵀ k)ᵀ.

    q, k [batch, groups·d] (head h reads group ⌊h·groups/heads⌋), v [batch, heads·dv], `decay` [batch, heads·d] for
    every key, [batch, heads] for every head, or none (0); past [batch, heads, d, dv] → y like v, and S'. What has a row
    for each text may be a slice of a projection. S' is written to `present`, which may be `past` itself (in place), or
    to a new tensor. `kernel`: see `uses_torch`; torch computes in f32 (f64 for f64).

    Raises:
        ValueError: the shapes do not fit, or a state is not contiguous.
    """
    keys, width = check(q, k, v, past, decay, beta, heads, groups)
    check_step(v, past, present)
    if uses_torch(kernel, refusal, v, past, q, k, decay, beta):
        wide = torch.promote_types(v.dtype, torch.float32)
        queries, into = (
            t.to(wide).unflatten(1, (groups, keys)).repeat_interleave(heads // groups, 1)[..., None] for t in (q, k)
        )
        written, after = v.to(wide).unflatten(1, (heads, 1, width)), past.to(wide)
        if decay is not None:
            after = decay.to(wide).exp().unflatten(1, (heads, -1, 1)) * after
        if beta is not None:
            written = beta.to(wide)[..., None, None] * (written - into.mT @ after)
        after = after + into * written
        y = (queries.mT @ after).flatten(1).to(v.dtype)
        return y, after.to(past.dtype) if present is None else present.copy_(after)
    present = torch.empty_like(past) if present is None else present
    q, k, v = map(side_by_side, (q, k, v))
    decay, beta = side_by_side(decay), side_by_side(beta)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    sizes = _sizes(heads, groups, keys, width, decay is not None and decay.shape[1] > heads)
    matrix_step_kernel[(triton.cdiv(width, sizes["BLOCK_P"]), heads, len(v))](
        q, k, v, decay, beta, past, y, present,
        q.stride(0), k.stride(0), v.stride(0), row_stride(decay), row_stride(beta), **sizes, **options(v, WARPS),
    )  # fmt: skip
    return y, present


reference = partial(matrix_step, kernel=False)


def _sizes(heads: int, groups: int, keys: int, width: int, by_key: bool) -> dict[str, int]:
    rows = power_of_2(keys)
    columns = min(WIDTH, power_of_2(width), MOST // rows)
    sizes = {"KEYS": keys, "WIDTH": width, "SHARE": heads // groups, "BY_KEY": by_key}
    return sizes | {"BLOCK_N": rows, "BLOCK_P": columns}


def variants() -> list[Variant]:
    """Qwen3-Next and OLMo Hybrid, Kimi Linear with a gate for every key, MiniMax, xLSTM 7B and RWKV-6; the largest."""
    shipped = []
    for dtype, heads, groups, keys, width, decay, delta in (
        (BF16, 32, 16, 128, 128, "head", True),
        (FP16, 30, 30, 96, 192, "head", True),
        (BF16, 32, 32, 128, 128, "key", True),
        (BF16, 64, 64, 128, 128, "head", False),
        (BF16, 8, 8, 256, 513, "head", False),
        (BF16, 64, 64, 64, 64, "key", False),
        (FP32, 32, 16, 128, 128, "head", True),
        (FP16, 16, 16, 128, 128, "", True),
        (FP32, 4, 4, 1024, 1024, "key", True),
    ):
        constants = _sizes(heads, groups, keys, width, decay == "key")
        absent = "decay " * (not decay) + "beta" * (not delta)
        even = width % 4 == 0  # otherwise rows of the state begin anywhere in 16 bytes
        rows = "q_row k_row" + " v_row" * even + " decay_row" * (decay == "key")
        counts = "beta_row" + " v_row" * (not even) + " decay_row" * (decay == "head")
        shipped.append(variant(matrix_step_kernel, dtype, constants, counts, rows, absent, warps=WARPS, vectors=even))
    return shipped
