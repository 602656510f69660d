"""Operations on the caches of generated PyTorch modules, for all kinds of caches.

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

from ..compiled_folder import get_growth


def iter_layers(cache: Any) -> Iterator[Any]:
    """Yield the cache objects of all layers, in order; layers without a cache (None) are skipped."""
    if isinstance(cache, list | tuple):
        for item in cache:
            yield from iter_layers(item)
    elif cache is not None:
        yield cache


def iter_tensors(layer: Any) -> Iterator[Tensor]:
    """Yield the tensors among the attributes of a cache object, including those in tuples."""
    for value in vars(layer).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def is_state(layer: Any) -> bool:
    """Return whether the cache object `layer` is a recurrent state."""
    return get_growth(layer) is Growth.CONSTANT


def is_cross(layer: Any) -> bool:
    """Return whether the cache object `layer` has the cross-attention keys and values of an encoded source."""
    return get_growth(layer) is Growth.SOURCE


def can_rewind(cache: Any) -> bool:
    """Return whether rows of `cache` can drop their last tokens: it has no recurrent states and no rolling caches."""
    return all(get_growth(layer).can_rewind for layer in iter_layers(cache))


def narrow_rows(cache: Any, first: int, rows: int) -> Any:
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


def count_bytes(cache: Any) -> int:
    """Return the size of all tensors of `cache` in bytes."""
    return sum(t.nbytes for layer in iter_layers(cache) for t in iter_tensors(layer))


def clear_states(cache: Any) -> None:
    """Set the recurrent states of all rows of `cache` to their initial values. Key-value caches need no reset, because
    no row reads beyond its length."""
    for layer in filter(is_state, iter_layers(cache)):
        for tensor, start in zip(iter_tensors(layer), getattr(layer, "starts", itertools.repeat(0.0)), strict=False):
            tensor.fill_(start)


def gather_rows(cache: Any, rows: Tensor, moved: Tensor, used: int) -> None:
    """Copy batch row `rows[r]` of every tensor to row r, for each r in `moved`. Of caches that grow by a slot per
    token, only the first `used` slots are copied. Cross-attention caches are left out, see `gather_sources`."""
    for layer in iter_layers(cache):
        for tensor in () if is_cross(layer) else iter_tensors(layer):
            used_slots = tensor[:, :, :used] if get_growth(layer) is Growth.TEXT else tensor
            # Advanced indexing copies the right side first, so rows may swap places.
            used_slots[moved] = used_slots[rows[moved]]


def gather_sources(cache: Any, rows: Tensor) -> None:
    """Replace the tensors of cross-attention caches by new tensors, in which batch row r is the old row `rows[r]`."""
    for layer in filter(is_cross, iter_layers(cache)):
        layer.kept = tuple(None if t is None else t[rows] for t in layer.kept)


def join_sources(cache: Any, of: list[Any]) -> None:
    """Set the cross-attention caches of `cache` to those of the caches in `of`, concatenated along the batch axis and
    zero-padded to the longest source."""
    crossing = [[layer for layer in iter_layers(source) if is_cross(layer)] for source in of]
    for layer, *parts in zip(filter(is_cross, iter_layers(cache)), *crossing, strict=True):
        layer.kept = tuple(_concatenate(list(same)) for same in zip(*(p.kept for p in parts), strict=True))


def _concatenate(parts: list[Any]) -> Tensor | None:
    """Concatenate `parts` along axis 0, zero-padded to the largest size of other axes; None if parts are None."""
    if parts[0] is None:
        return None
    sizes = [max(sizes) for sizes in zip(*(p.shape for p in parts), strict=True)][1:]
    stacked: Tensor = parts[0].new_zeros(sum(len(p) for p in parts), *sizes)
    at = 0
    for part in parts:
        stacked[(slice(at, at + len(part)), *map(slice, part.shape[1:]))] = part
        at += len(part)
    return stacked


def copy_cache(cache: Any, other: Any) -> None:
    """Copy the contents of `other` (same model and batch size, at most the same capacity) into `cache`. Cross-attention
    caches are not copied: `cache` then shares the tensors of `other`."""
    for mine, theirs in zip(iter_layers(cache), iter_layers(other), strict=True):
        if is_cross(mine):
            mine.kept = theirs.kept
            continue
        for to, values in zip(iter_tensors(mine), iter_tensors(theirs), strict=True):
            to[tuple(map(slice, values.shape))] = values


def list_states(cache: Any) -> list[Tensor]:
    """Return the tensors of the recurrent states of `cache`, which a repeated step changes, unlike key-value slots."""
    return [t for layer in iter_layers(cache) if is_state(layer) for t in iter_tensors(layer)]


def new_cache(model: Any, batch: int, capacity: int) -> Any:
    """Return a new cache of the generated module `model` for `batch` rows of `capacity` tokens, in inference mode."""
    with torch.inference_mode():
        return model.new_cache(batch, capacity)
