"""Operations on the caches of generated PyTorch modules, for any kind of layer.

A cache is a list of the caches of all layers: objects (or tuples and lists of them) whose tensors have the batch as
first axis. Each object names how it grows: key-value caches have slots on the third axis, recurrent states are reset
at the start of a sequence, and cross-attention caches hold keys and values of the sources.
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
    """Yield the cache objects of all layers in order."""
    if isinstance(cache, list | tuple):
        for item in cache:
            yield from layers(item)
    elif cache is not None:
        yield cache


def tensors(layer: Any) -> Iterator[Tensor]:
    """Yield the tensors of one cache object."""
    for value in vars(layer).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def is_state(layer: Any) -> bool:
    """Return whether a cache object is a recurrent state."""
    return growth_of(layer) is Growth.CONSTANT


def is_cross(layer: Any) -> bool:
    """Return whether a cache object holds keys and values of an encoded source."""
    return growth_of(layer) is Growth.SOURCE


def rewinds(cache: Any) -> bool:
    """Return whether rows can drop their last tokens, which recurrent states and rolling caches cannot."""
    return all(growth_of(layer).rewinds for layer in layers(cache))


def narrow(cache: Any, first: int, rows: int) -> Any:
    """Return a cache of `rows` rows from `first` on, whose tensors are views into `cache`."""
    return _map_tensors(cache, lambda t: t[first : first + rows])


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(v, change) for v in value)
    if isinstance(value, list):
        mapped = copy.copy(value)  # with the attributes of a subclass
        mapped[:] = [_map_tensors(v, change) for v in value]
        return mapped
    if not hasattr(value, "__dict__"):
        return value
    mapped = copy.copy(value)
    vars(mapped).update({name: _map_tensors(v, change) for name, v in vars(value).items()})
    return mapped


def nbytes(cache: Any) -> int:
    """Return the bytes allocated by all tensors."""
    return sum(t.nbytes for layer in layers(cache) for t in tensors(layer))


def clear(cache: Any) -> None:
    """Reset states to the start of a sequence. Key-value caches need no reset: no row reads beyond its length."""
    for layer in filter(is_state, layers(cache)):
        for tensor, start in zip(tensors(layer), getattr(layer, "starts", itertools.repeat(0.0)), strict=False):
            tensor.fill_(start)


def gather(cache: Any, rows: Tensor, moved: Tensor, used: int) -> None:
    """Copy row `rows[r]` to every row r in `moved`; of caches with slots for all tokens, the first `used` slots.

    Caches of sources are unchanged, see `gather_sources`.
    """
    for layer in layers(cache):
        for tensor in () if is_cross(layer) else tensors(layer):
            used_slots = tensor[:, :, :used] if growth_of(layer) is Growth.TEXT else tensor
            # Advanced indexing copies the right side first, so rows may swap places.
            used_slots[moved] = used_slots[rows[moved]]


def gather_sources(cache: Any, rows: Tensor) -> None:
    """Replace the sources so that row r attends to the source of row `rows[r]`; allocate new tensors."""
    for layer in filter(is_cross, layers(cache)):
        layer.kept = tuple(None if t is None else t[rows] for t in layer.kept)


def share_sources(cache: Any, of: list[Any]) -> None:
    """Let `cache` attend to the sources of the caches `of`, concatenated along the batch and padded with zeros."""
    crossing = [[layer for layer in layers(source) if is_cross(layer)] for source in of]
    for layer, *parts in zip(filter(is_cross, layers(cache)), *crossing, strict=True):
        layer.kept = tuple(_concatenate(list(same)) for same in zip(*(p.kept for p in parts), strict=True))


def _concatenate(parts: list[Any]) -> Tensor | None:
    """Concatenate tensors along the first axis, with zeros up to the longest on every other axis; None if None."""
    if parts[0] is None:
        return None
    sizes = [max(sizes) for sizes in zip(*(p.shape for p in parts), strict=True)][1:]
    stacked: Tensor = parts[0].new_zeros(sum(len(p) for p in parts), *sizes)
    at = 0
    for part in parts:
        stacked[(slice(at, at + len(part)), *map(slice, part.shape[1:]))] = part
        at += len(part)
    return stacked


def take(cache: Any, other: Any) -> None:
    """Copy `other`, a cache of the same model with the same number of rows and at most this capacity, into `cache`."""
    for mine, theirs in zip(layers(cache), layers(other), strict=True):
        if is_cross(mine):
            mine.kept = theirs.kept
            continue
        for to, values in zip(tensors(mine), tensors(theirs), strict=True):
            to[tuple(map(slice, values.shape))] = values


def mutable(cache: Any) -> list[Tensor]:
    """Return the tensors that a repeated call with the same tokens changes again, which are those of states."""
    return [t for layer in layers(cache) if is_state(layer) for t in tensors(layer)]


def new_cache(model: Any, batch: int, capacity: int) -> Any:
    """Return a new cache of the generated `model` without autograd."""
    with torch.inference_mode():
        return model.new_cache(batch, capacity)
