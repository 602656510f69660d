"""Operations on the caches of generated PyTorch modules, for any kind of layer.

A cache is a list with one item per layer: a cache object, or a tuple or list of cache objects. Axis 0 of their tensors
is the batch. There are three kinds: key-value caches (axis 2 has a slot per token), recurrent states (reset at the
start of a sequence), and cross-attention caches (keys and values of the encoded sources).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.ir.schema.states import Growth

from ..state_io import growth_of


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
    return all(growth_of(layer).can_rewind for layer in layers(cache))


def narrow(cache: Any, first: int, rows: int) -> Any:
    """Return a cache of the `rows` batch rows from `first` on, whose tensors are views into `cache`."""
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
    """Return the size of all tensors of `cache` in bytes."""
    return sum(t.nbytes for layer in layers(cache) for t in tensors(layer))


def clear(cache: Any) -> None:
    """Set the recurrent states of `cache` to their initial values. Key-value caches need no reset, because no row
    reads beyond its length."""
    for layer in filter(is_state, layers(cache)):
        for tensor, start in zip(tensors(layer), getattr(layer, "starts", itertools.repeat(0.0)), strict=False):
            tensor.fill_(start)


def gather(cache: Any, rows: Tensor, moved: Tensor, used: int) -> None:
    """Copy batch row `rows[r]` of every tensor to row r, for each r in `moved`.

    Caches with a slot per token copy only the first `used` slots; for cross-attention caches see `gather_sources`.
    """
    for layer in layers(cache):
        for tensor in () if is_cross(layer) else tensors(layer):
            used_slots = tensor[:, :, :used] if growth_of(layer) is Growth.TEXT else tensor
            # Advanced indexing copies the right side first, so rows may swap places.
            used_slots[moved] = used_slots[rows[moved]]


def gather_sources(cache: Any, rows: Tensor) -> None:
    """Replace the tensors of cross-attention caches by new ones, so that batch row r attends to the source of row
    `rows[r]`."""
    for layer in filter(is_cross, layers(cache)):
        layer.kept = tuple(None if t is None else t[rows] for t in layer.kept)


def share_sources(cache: Any, of: list[Any]) -> None:
    """Set the cross-attention caches of `cache` to the concatenation of the caches in `of` along the batch axis,
    zero-padded to the longest source."""
    crossing = [[layer for layer in layers(source) if is_cross(layer)] for source in of]
    for layer, *parts in zip(filter(is_cross, layers(cache)), *crossing, strict=True):
        layer.kept = tuple(_concatenate(list(same)) for same in zip(*(p.kept for p in parts), strict=True))


def _concatenate(parts: list[Any]) -> Tensor | None:
    """Return `parts` concatenated along axis 0, zero-padded to the largest size of each other axis; None if `parts`
    are None."""
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
    """Copy the contents of `other` (same model and batch size, at most the same capacity) into `cache`;
    cross-attention caches share the tensors of `other` instead."""
    for mine, theirs in zip(layers(cache), layers(other), strict=True):
        if is_cross(mine):
            mine.kept = theirs.kept
            continue
        for to, values in zip(tensors(mine), tensors(theirs), strict=True):
            to[tuple(map(slice, values.shape))] = values


def mutable(cache: Any) -> list[Tensor]:
    """Return the tensors of recurrent states: unlike key-value slots they change again if a step is repeated."""
    return [t for layer in layers(cache) if is_state(layer) for t in tensors(layer)]


def new_cache(model: Any, batch: int, capacity: int) -> Any:
    """Return a new cache of the generated `model` for `batch` rows of `capacity` tokens, without autograd."""
    with torch.inference_mode():
        return model.new_cache(batch, capacity)
