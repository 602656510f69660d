"""Recurrences whose step is a function of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .indexing import wide

Tensors = tuple[Tensor, ...]


def first_states(
    past: Tensor | Tensors | None, x: Tensor, starts: tuple[tuple[tuple[int, ...], float], ...]
) -> Tensors:
    """The states before the first token of x [batch, seq, ...]: `past`, or of each the shape of a row and the number
    that fills it."""
    if past is None:
        return tuple(wide(x.new_zeros(0)).new_full((x.shape[0], *row), value) for row, value in starts)
    return tuple(map(wide, past if isinstance(past, tuple) else (past,)))


def kept_where(hidden: Tensor, old: Tensors, new: Tensors) -> Tensors:
    """The `old` states of the rows that are `hidden` [batch], the `new` of others."""
    return tuple(torch.where(hidden.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(old, new, strict=True))


def scan(
    step: Callable[..., Tensors],
    states: Tensors,
    tokens: Tensors,
    constants: Tensors = (),
    mask: Tensor | None = None,
) -> tuple[Tensor | Tensors, Tensor | Tensors]:
    """The outputs [batch, seq, ...] and the last states of states, outputs = step(states, tokens, constants), one token
    [batch, seq, ...] after the other, in f32. States pass over tokens where `mask` [batch, seq] is 0."""
    count, rows, constants = len(states), list[Tensors](), tuple(map(wide, constants))
    for t, inputs in enumerate(zip(*(wide(x).unbind(1) for x in tokens), strict=True)):
        made = step(*states, *inputs, *constants)
        states = made[:count] if mask is None else kept_where(mask[:, t] == 0, states, made[:count])
        rows.append(made[count:])
    outputs = tuple(torch.stack(column, 1).to(tokens[0].dtype) for column in zip(*rows, strict=True))
    return outputs if len(outputs) > 1 else outputs[0], states if count > 1 else states[0]
