"""Recurrences with a model-defined step function: token by token, or many tokens in parallel if the new state is affine
in the old (Martin & Cundy 2018, arXiv 1709.04057)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked_recurrences import MOST_ON_CPUS, chunk_count, chunk_matrix_states, chunk_states, first_tokens
from .indexing import wide

Tensors = tuple[Tensor, ...]
Start = tuple[tuple[int, ...], float]
Axes = tuple[tuple[int, ...], bool]  # axes of a state in the order batch, groups, keys, columns; has it columns?


def scan(
    step: Callable[..., Tensors],
    starts: tuple[Start, ...],
    tokens: Tensors,
    constants: Tensors = (),
    past: Tensor | Tensors | None = None,
    mask: Tensor | None = None,
    many: Callable[..., tuple[Tensors, Tensors]] | None = None,
    size: int = 0,
) -> tuple[Tensor | Tensors, Tensor | Tensors]:
    """Run (*states, *outputs) = step(*states, *tokens, *constants) in f32 over tokens [batch, seq, ...], one after the
    other, or `size` at a time by `many`. Return the outputs [batch, seq, ...] in the dtype of the first of `tokens`,
    then the last states, each a tensor if there is one, else a tuple. Initial states are `past`, or given by `starts`:
    (shape without batch, fill value) of each state. Tokens where `mask` [batch, seq] is 0 do not change the states."""
    batch, dtype, constants = max(map(len, tokens)), tokens[0].dtype, tuple(map(wide, constants))
    tokens, rows = tuple(wide(x).expand(batch, *x.shape[1:]) for x in tokens), list[Tensors]()
    states: Tensors = tuple(tokens[0].new_full((batch, *row), number) for row, number in starts)
    if past is not None:
        states = tuple(map(wide, past if isinstance(past, tuple) else (past,)))
    if many is None or tokens[0].shape[1] == 1:
        states, outputs = one_by_one(step, states, tokens, constants, mask)
    elif torch.compiler.is_exporting():  # a symbolic number of tokens cannot be split
        states, outputs = many(states, tokens, constants, mask)
    else:
        for at in range(0, tokens[0].shape[1], size):
            part, shown = tuple(x[:, at : at + size] for x in tokens), None if mask is None else mask[:, at : at + size]
            states, outputs = many(states, part, constants, shown)
            rows.append(outputs)
        outputs = tuple(torch.cat(column, 1) for column in zip(*rows, strict=True))
    outputs = tuple(y.to(dtype) for y in outputs)
    return outputs if len(outputs) > 1 else outputs[0], states if len(states) > 1 else states[0]


def one_by_one(
    step: Callable[..., Tensors], states: Tensors, tokens: Tensors, constants: Tensors, mask: Tensor | None
) -> tuple[Tensors, Tensors]:
    """Run `step` token by token; return the last states and the outputs of all tokens [batch, seq, ...]."""
    count, rows = len(states), list[Tensors]()
    for t, inputs in enumerate(zip(*(x.unbind(1) for x in tokens), strict=True)):
        results = step(*states, *inputs, *constants)
        states = results[:count] if mask is None else select_states(mask[:, t] == 0, states, results[:count])
        rows.append(results[count:])
    return states, tuple(torch.stack(column, 1) for column in zip(*rows, strict=True))


def select_states(hidden: Tensor, old: Tensors, new: Tensors) -> Tensors:
    """Return each state [batch, ...] from `old` in batch rows where `hidden` [batch] is true, else from `new`."""
    return tuple(torch.where(hidden.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(old, new, strict=True))


def by_token(function: Callable[..., Tensors], tokens: Tensors, constants: Tensors = ()) -> Tensors:
    """Return function(*tokens, *constants), computed with axes batch and seq of tokens [batch, seq, ...] flattened."""
    batch_seq = tokens[0].shape[:2]
    return tuple(y.unflatten(0, batch_seq) for y in function(*(x.flatten(0, 1) for x in tokens), *constants))


def fill_hidden(x: Tensor, mask: Tensor | None, number: float) -> Tensor:
    """Return x [batch, seq, ...] with `number` where `mask` [batch, seq] is 0; unchanged if `mask` is None."""
    return x if mask is None else x.masked_fill(mask.view(*mask.shape, *[1] * (x.dim() - 2)) == 0, number)


def states_before(first: Tensor, states: Tensor) -> Tensor:
    """Return the states before each token, given the first [batch, ...] and the states after each [batch, seq, ...]."""
    return torch.cat((first[:, None], states[:, :-1]), 1)


def affine_states(a: Tensor | None, b: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return all states [batch, seq, ...] of S_t = a_t ⊙ S_{t−1} + b_t from S_0 = `first`, and the last state. a (None:
    1) and b (None: 0) broadcast with the states. Chunks of √seq tokens run in parallel from zero; then the terms of
    their initial states are added."""
    some = a if a is not None else b
    assert some is not None
    seq = some.shape[1]
    a = first.new_ones(1, seq, *[1] * (first.dim() - 1)) if a is None else a
    b = first.new_zeros(1, seq, *[1] * (first.dim() - 1)) if b is None else b
    if torch.compiler.is_exporting():  # √seq of a symbolic length is unknown
        ends = chunk_states(first, a, b.expand(len(first), -1, *first.shape[1:]))
        return ends[:, 1:], ends[:, -1]
    size = math.isqrt(seq)
    padding = (0, 0) * (first.dim() - 1) + (0, -seq % size)
    a = F.pad(a, padding, value=1.0).unflatten(1, (-1, size))
    b = F.pad(b, padding).unflatten(1, (-1, size)).expand(len(first), -1, size, *first.shape[1:])
    states, factors = [b[:, :, 0]], [a[:, :, 0]]
    for factor, term in zip(a.unbind(2)[1:], b.unbind(2)[1:], strict=True):
        states.append(torch.addcmul(term, factor, states[-1]))
        factors.append(factor * factors[-1])
    before = chunk_states(first, factors[-1].expand(len(first), *[-1] * first.dim()), states[-1])[:, :-1, None]
    ends = torch.addcmul(torch.stack(states, 2), torch.stack(factors, 2), before).flatten(1, 2)[:, :seq]
    return ends, ends[:, -1]


def matrix_steps(
    step: Callable[..., Tensors],
    linear: tuple[Callable[..., Tensors], ...],
    axes: tuple[Axes, ...],
    states: Tensors,
    tokens: Tensors,
    constants: Tensors,
    mask: Tensor | None,
) -> tuple[Tensors, Tensors]:
    """Return the last states and the outputs [batch, seq, ...] of `one_by_one`, for steps that are affine in the state.

    `linear` has the linear part of each state's step: it multiplies all columns by one matrix [keys, keys].
    Chunks run in parallel three times: from zero, for the term that each adds; from the identity, for the matrix that
    each multiplies by; and from their initial states, for the outputs. That is three times the work in far fewer calls:
    on CPUs, large states are faster token by token."""
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
        basis = unit_columns(first, *axis)  # [blocks, ...]: the identity in blocks of the state's number of columns
        blocks = len(basis)
        rows = tuple(x.repeat_interleave(blocks, 0) for x in (*cut, shown))
        basis = basis.repeat(batch * count, *[1] * (basis.dim() - 1))
        ((basis,), _) = one_by_one(function, (basis,), rows[:-1], constants, rows[-1])
        matrices = to_matrices(basis, *axis).unflatten(0, (batch, count, blocks)).movedim(2, -2).flatten(-2)
        written = to_matrices(b, *axis).unflatten(0, (batch, count))
        before, after = chunk_matrix_states(to_matrices(first, *axis), matrices[..., : matrices.shape[-2]], written)
        starts.append(from_matrices(before.flatten(0, 1), *axis, first))
        last.append(from_matrices(after, *axis, first))
    _, outputs = one_by_one(step, tuple(starts), tuple(cut), constants, shown)
    joined = (y.unflatten(0, (batch, count)).flatten(1, 2) for y in outputs)
    return tuple(last), tuple(first_tokens(y, seq) for y in joined)


def in_chunks(x: Tensor, count: int, size: int) -> Tensor:
    """Return x [batch, seq, ...] as `count` chunks per row, [batch · count, size, ...], zero-padded at the end."""
    padded = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, count * size - x.shape[1]))
    return padded.view(x.shape[0] * count, size, *x.shape[2:])


def to_matrices(state: Tensor, order: tuple[int, ...], columns: bool) -> Tensor:
    """Return state.permute(order) as [batch, groups, keys, columns]; without `columns`, one column is added."""
    laid = state.permute(order) if columns else state.permute(order)[..., None]
    return laid.flatten(1, -3) if laid.dim() > 3 else laid[:, None]


def from_matrices(x: Tensor, order: tuple[int, ...], columns: bool, like: Tensor) -> Tensor:
    """Return x [batch, groups, keys, columns] as a state with the axes of `like`: the inverse of `to_matrices`."""
    laid = x.reshape(x.shape[0], *(like.shape[axis] for axis in order[1:]))
    return laid.permute([order.index(axis) for axis in range(len(order))])


def unit_columns(like: Tensor, order: tuple[int, ...], columns: bool) -> Tensor:
    """Return states [blocks, ...] like `like` that together have the columns of the identity matrix [keys, keys]."""
    keys, width = (like.shape[order[-2]], like.shape[order[-1]]) if columns else (like.shape[order[-1]], 1)
    blocks, groups = -(-keys // width), math.prod(like.shape[axis] for axis in order[1 : -2 if columns else -1])
    eye = torch.eye(keys, blocks * width, dtype=like.dtype, device=like.device)
    split = eye.unflatten(1, (blocks, width)).movedim(1, 0)  # [blocks, keys, columns]
    return from_matrices(split[:, None].expand(-1, groups, -1, -1), order, columns, like)
