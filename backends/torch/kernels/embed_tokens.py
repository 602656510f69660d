"""Token and position embeddings and the sines and cosines of RoPE for a decode step, in one kernel.

Angles are position · frequency in f64, reduced by multiples of π/2, so that they are accurate at any length (RoPE,
arXiv 2104.09864); the remainder is at most π/4, where short polynomials give sine and cosine to the precision of f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .shared import operands
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous

BLOCK = 512  # numbers, or pairs, of a program
MOST_TABLES = 2


@jit
def store_angles(frequencies, cos, sin, position, row, pairs, amplitude, BLOCK: tl.constexpr):
    """Store amplitude · cos(position · f) in `cos` and amplitude · sin(position · f) in `sin`, both [rows, pairs], at
    row `row`, for each f of `frequencies` [pairs]."""
    for begin in range(0, pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        angle = position.to(tl.float64) * tl.load(frequencies + pair, mask=pair < pairs, other=0.0)
        quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
        rest = (angle - quarters * 1.5707963267948966).to(tl.float32)  # at most π/4 from 0
        square, quarter = rest * rest, quarters.to(tl.int64) & 3
        sine = -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
        sine = rest + rest * square * sine
        cosine = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
        cosine = 1.0 - 0.5 * square + square * square * cosine
        c = tl.where(quarter % 2 == 0, cosine, sine) * tl.where((quarter == 1) | (quarter == 2), -amplitude, amplitude)
        s = tl.where(quarter % 2 == 0, sine, cosine) * tl.where(quarter >= 2, -amplitude, amplitude)
        tl.store(cos + row * pairs + pair, c, mask=pair < pairs)
        tl.store(sin + row * pairs + pair, s, mask=pair < pairs)


@jit
def embed_kernel(
    weight, ids, positions, table, frequencies, cos, sin, frequencies_2, cos_2, sin_2, x,
    vocab, length, D, pairs, pairs_2, offset, scale, amplitude, amplitude_2, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store BLOCK elements of the embedding x [tokens, D] of a token. One more program per token stores its cosines and
    sines. Grid [⌈D / BLOCK⌉ + 1, tokens]; without tables of rotary angles [⌈D / BLOCK⌉, tokens]."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row)
    if tl.program_id(0) < tl.cdiv(D, BLOCK):
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        token = tl.minimum(tl.maximum(tl.load(ids + row), 0), vocab - 1)
        out = tl.load(weight + token * D + n, mask=n < D, other=0.0).to(tl.float32) * scale
        if table is not None:
            at = tl.minimum(tl.maximum(position + offset, 0), length - 1)
            out += tl.load(table + at * D + n, mask=n < D, other=0.0).to(tl.float32)
        tl.store(x + row * D + n, out.to(x.dtype.element_ty), mask=n < D)
    else:
        if frequencies is not None:
            store_angles(frequencies, cos, sin, position, row, pairs, amplitude, 128)
        if frequencies_2 is not None:
            store_angles(frequencies_2, cos_2, sin_2, position, row, pairs_2, amplitude_2, 128)


def refusal(weight: torch.Tensor, tables: int = 0) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernel can run."""
    if tables > MOST_TABLES:
        return f"more than {MOST_TABLES} tables of rotary angles"
    return operands.refusal(weight)


def embed_tokens(
    ids: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    *rotary: tuple[torch.Tensor, float],
    scale: float = 1.0,
    table: torch.Tensor | None = None,
    offset: int = 0,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (x, cos, sin, …): x = scale · weight[ids] + table[positions + offset], and cos, sin per entry of `rotary`.

    ids and positions i64 [batch, seq], weight [vocab, dim], table [length, dim] or None → x [batch, seq, dim]. An entry
    of `rotary` is (frequencies f64 [pairs], amplitude); its cos and sin, f32 [batch·seq, pairs], are amplitude ·
    cos(position · frequency) and amplitude · sin(position · frequency). `kernel` is as in `uses_torch`; the kernel
    clamps ids and rows of `table` that are out of range. Raise ValueError if shapes do not fit.
    """
    if ids.ndim != 2 or positions.shape != ids.shape:
        raise ValueError(f"ids {[*ids.shape]} and positions {[*positions.shape]} are not both [batch, seq]")
    if table is not None and table.shape[1] != weight.shape[1]:
        raise ValueError(f"table {[*table.shape]} does not fit weight {[*weight.shape]}")
    if uses_torch(kernel, refusal, weight, len(rotary)):
        x = F.embedding(ids, weight)
        x = x if scale == 1 else x * scale
        at = positions.reshape(-1, 1)
        angles = [(at * frequencies.double(), amplitude) for frequencies, amplitude in rotary]
        turned = [f(angle).float() * amplitude for angle, amplitude in angles for f in (torch.cos, torch.sin)]
        return (x if table is None else x + F.embedding(positions + offset, table), *turned)
    vocab, dim = weight.shape
    x = weight.new_empty(*ids.shape, dim)
    outs = [torch.empty(ids.numel(), len(f), dtype=torch.float32, device=x.device) for f, _ in rotary for _ in range(2)]
    absent: tuple[Any, ...] = (None, None, None)
    frequencies = [(f.double(), outs[2 * i], outs[2 * i + 1]) for i, (f, _) in enumerate(rotary)]
    first, second = (*frequencies, absent, absent)[:2]
    sizes, amplitudes = (_two([len(f) for f, _ in rotary], 0), _two([a for _, a in rotary], 1.0))
    embed_kernel[(triton.cdiv(dim, BLOCK) + (1 if rotary else 0), ids.numel())](
        weight, ids.contiguous(), positions.contiguous(), table, *first, *second, x,
        vocab, 0 if table is None else len(table), dim, *sizes, offset, scale, *amplitudes,
        BLOCK=BLOCK, **options(x),
    )  # fmt: skip
    return x, *outs


def _two(given: Sequence[Any], filler: Any) -> list[Any]:
    return [*given, filler, filler][:2]
