"""Recurrences whose new state is a product of the old with a matrix of the token, plus what the token adds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta_rule import through_chunks
from .recurrences import chunk_count, first_tokens
from .scan import Tensors, one_by_one

MOST_ON_CPUS = 8192  # numbers of a row's states
Axes = tuple[tuple[int, ...], bool]  # of a state in the order batch, groups, keys and, if so, columns


def matrix_steps(
    step: Callable[..., Tensors],
    linear: tuple[Callable[..., Tensors], ...],
    axes: tuple[Axes, ...],
    states: Tensors,
    tokens: Tensors,
    constants: Tensors,
    mask: Tensor | None,
) -> tuple[Tensors, Tensors]:
    """Run `step` on many tokens at once, where `linear` makes of each state what a token leaves of it: a product with a
    matrix over the keys, the same for all columns.

    Chunks run side by side: from zero, which says what each adds; with the identity in the place of the state, which
    says what each leaves; and then from the states between them. That is three times the work in far fewer calls: on
    CPUs large states take longer so than one token after the other."""
    (batch, seq), numbers = tokens[0].shape[:2], sum(s[0].numel() for s in states)
    exporting = torch.compiler.is_exporting()
    if numbers > MOST_ON_CPUS and not tokens[0].is_cuda and not exporting:
        return one_by_one(step, states, tokens, constants, mask)
    size = 16 if exporting else max(1, math.isqrt(seq // 3))
    count = chunk_count(seq, size)
    mask = tokens[0].new_ones(batch, seq) if mask is None else mask.to(tokens[0].dtype)
    *cut, shown = (in_chunks(x, count, size) for x in (*tokens, mask))
    zeros = tuple(s.new_zeros(batch * count, *s.shape[1:]) for s in states)
    added, _ = one_by_one(step, zeros, tuple(cut), constants, shown)
    starts, last = list[Tensor](), list[Tensor]()
    for function, axis, first, b in zip(linear, axes, states, added, strict=True):
        whole = identity(first, *axis)  # [blocks, ...]: as many keys at a time as the state has columns
        blocks = len(whole)
        rows = tuple(x.repeat_interleave(blocks, 0) for x in (*cut, shown))
        whole = whole.repeat(batch * count, *[1] * (whole.dim() - 1))
        ((whole,), _) = one_by_one(function, (whole,), rows[:-1], constants, rows[-1])
        left = laid_out(whole, *axis).unflatten(0, (batch, count, blocks)).movedim(2, -2).flatten(-2)
        written = laid_out(b, *axis).unflatten(0, (batch, count))
        before, after = through_chunks(laid_out(first, *axis), left[..., : left.shape[-2]], written)
        starts.append(laid_back(before.flatten(0, 1), *axis, first))
        last.append(laid_back(after, *axis, first))
    _, outputs = one_by_one(step, tuple(starts), tuple(cut), constants, shown)
    joined = (y.unflatten(0, (batch, count)).flatten(1, 2) for y in outputs)
    return tuple(last), tuple(first_tokens(y, seq) for y in joined)


def in_chunks(x: Tensor, count: int, size: int) -> Tensor:
    """x [batch, seq, ...] as [batch · count, size, ...], zeros at the end."""
    padded = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, count * size - x.shape[1]))
    return padded.view(x.shape[0] * count, size, *x.shape[2:])


def laid_out(state: Tensor, order: tuple[int, ...], columns: bool) -> Tensor:
    """A state as [batch, groups, keys, columns]."""
    laid = state.permute(order) if columns else state.permute(order)[..., None]
    return laid.flatten(1, -3) if laid.dim() > 3 else laid[:, None]


def laid_back(x: Tensor, order: tuple[int, ...], columns: bool, like: Tensor) -> Tensor:
    """x [batch, groups, keys, columns] as a state with the axes of `like`."""
    laid = x.reshape(x.shape[0], *(like.shape[axis] for axis in order[1:]))
    return laid.permute([order.index(axis) for axis in range(len(order))])


def identity(like: Tensor, order: tuple[int, ...], columns: bool) -> Tensor:
    """The columns of the identity over the keys of a state, as many states [blocks, ...] as it takes."""
    keys, width = (like.shape[order[-2]], like.shape[order[-1]]) if columns else (like.shape[order[-1]], 1)
    blocks, groups = -(-keys // width), math.prod(like.shape[axis] for axis in order[1 : -2 if columns else -1])
    eye = torch.eye(keys, blocks * width, dtype=like.dtype, device=like.device)
    split = eye.unflatten(1, (blocks, width)).movedim(1, 0)  # [blocks, keys, columns]
    return laid_back(split[:, None].expand(-1, groups, -1, -1), order, columns, like)
