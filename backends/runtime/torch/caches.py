"""Caches of generated PyTorch modules, whatever their layers keep.

A cache is a list of what the layers keep: objects (or tuples and lists of them) whose tensors have a row of the batch
per entry of their first axis. They say themselves how they grow: caches of keys have slots on their third axis, states
are zero at the start of a text, and others keep what cross-attention reads of sources.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.ir.schema.states import Growth

from ..carried import growth_of


def layers(cache: Any) -> Iterator[Any]:
    """The objects that keep something, in order."""
    if isinstance(cache, list | tuple):
        for item in cache:
            yield from layers(item)
    elif cache is not None:
        yield cache


def tensors(layer: Any) -> Iterator[Tensor]:
    """The tensors of one of `layers`."""
    for value in vars(layer).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def is_state(layer: Any) -> bool:
    """Return whether a layer keeps a state, not keys."""
    return growth_of(layer) is Growth.CONSTANT


def is_cross(layer: Any) -> bool:
    """Return whether a layer keeps keys and values of an encoded source."""
    return growth_of(layer) is Growth.SOURCE


def rewinds(cache: Any) -> bool:
    """Return whether rows can drop tokens: impossible once states or rolling caches have lost some."""
    return all(growth_of(layer).rewinds for layer in layers(cache))


def narrowed(cache: Any, first: int, rows: int) -> Any:
    """`cache` of `rows` rows from `first` on: its tensors are views, which calls write into."""
    return _mapped(cache, lambda t: t[first : first + rows])


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    if isinstance(value, list):
        made = copy.copy(value)  # with what a subclass says of itself
        made[:] = [_mapped(v, change) for v in value]
        return made
    if not hasattr(value, "__dict__"):
        return value
    made = copy.copy(value)
    vars(made).update({name: _mapped(v, change) for name, v in vars(value).items()})
    return made


def nbytes(cache: Any) -> int:
    """Bytes allocated."""
    return sum(t.nbytes for layer in layers(cache) for t in tensors(layer))


def clear(cache: Any) -> None:
    """States as at the start of a text. Caches of keys need no clearing: no row looks beyond its length."""
    for layer in filter(is_state, layers(cache)):
        for tensor, start in zip(tensors(layer), getattr(layer, "starts", itertools.repeat(0.0)), strict=False):
            tensor.fill_(start)


def gather(cache: Any, rows: Tensor, moved: Tensor, used: int) -> None:
    """Row r continues what row `rows[r]` holds, where `moved`; of caches that have slots for all tokens, `used` slots.

    What is kept of sources stays as it is, see `read_again`.
    """
    for layer in layers(cache):
        for tensor in () if is_cross(layer) else tensors(layer):
            held = tensor[:, :, :used] if growth_of(layer) is Growth.TEXT else tensor
            # Indexing by numbers copies the right side first, so rows may swap places.
            held[moved] = held[rows[moved]]


def read_again(cache: Any, rows: Tensor) -> None:
    """Row r reads the source that row `rows[r]` did: tensors of their own."""
    for layer in filter(is_cross, layers(cache)):
        layer.kept = tuple(None if t is None else t[rows] for t in layer.kept)


def share_sources(cache: Any, of: list[Any]) -> None:
    """`cache` reads the sources of the caches `of`, one after the other, padded with zeros to the longest."""
    crossing = [[layer for layer in layers(one) if is_cross(layer)] for one in of]
    for layer, *parts in zip(filter(is_cross, layers(cache)), *crossing, strict=True):
        layer.kept = tuple(_stacked(list(same)) for same in zip(*(p.kept for p in parts), strict=True))


def _stacked(parts: list[Any]) -> Tensor | None:
    """Tensors under each other, each axis as long as the longest."""
    if parts[0] is None:
        return None
    sizes = [max(sizes) for sizes in zip(*(p.shape for p in parts), strict=True)][1:]
    whole: Tensor = parts[0].new_zeros(sum(len(p) for p in parts), *sizes)
    at = 0
    for part in parts:
        whole[(slice(at, at + len(part)), *map(slice, part.shape[1:]))] = part
        at += len(part)
    return whole


def take(cache: Any, other: Any) -> None:
    """The contents of `other`, a cache of the same model, of as many rows and of no larger capacity."""
    for mine, theirs in zip(layers(cache), layers(other), strict=True):
        if is_cross(mine):
            mine.kept = theirs.kept
            continue
        for to, values in zip(tensors(mine), tensors(theirs), strict=True):
            to[tuple(map(slice, values.shape))] = values


def mutable(cache: Any) -> list[Tensor]:
    """The tensors that a call of the same tokens changes again: those of states."""
    return [t for layer in layers(cache) if is_state(layer) for t in tensors(layer)]


def new_cache(model: Any, batch: int, capacity: int) -> Any:
    """A cache of the generated `model`, not touched by autograd."""
    with torch.inference_mode():
        return model.new_cache(batch, capacity)
