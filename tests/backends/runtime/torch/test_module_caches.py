"""Caches of generated modules: rows are narrowed, moved, cleared and copied, whatever the kind of cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from weft.backends.runtime.torch import module_caches as caches


def text(batch: int = 3, capacity: int = 4) -> Any:
    """Return keys and values [batch, heads, capacity, width]; elements are 10 · row + slot."""
    values = (10.0 * torch.arange(batch)[:, None] + torch.arange(capacity)).reshape(batch, 1, capacity, 1)
    return SimpleNamespace(growth="text", keys=values, values=values.clone(), heads=1)


def state(batch: int = 3) -> Any:
    return SimpleNamespace(growth="constant", h=torch.arange(batch * 2.0).reshape(batch, 2), starts=(-1.0,))


def source(batch: int = 3, length: int = 2) -> Any:
    return SimpleNamespace(growth="source", kept=(torch.ones(batch, length, 2) * batch, None))


def test_layers_are_found_in_nested_lists() -> None:
    first, second, third = text(), state(), source()
    cache = [first, None, (second, [third])]
    assert list(caches.iter_layers(cache)) == [first, second, third]
    assert [caches.is_state(x) for x in (first, second, third)] == [False, True, False]
    assert [caches.is_cross(x) for x in (first, second, third)] == [False, False, True]
    assert [len(list(caches.iter_tensors(x))) for x in (first, second, third)] == [2, 1, 1]
    assert caches.list_states(cache) == [second.h]


def test_only_text_and_sources_can_rewind() -> None:
    assert caches.can_rewind([text(), source()]) and caches.can_rewind([])
    assert not caches.can_rewind([text(), state()])
    assert not caches.can_rewind([SimpleNamespace(growth="window")])


def test_bytes_are_those_of_all_tensors() -> None:
    assert caches.count_bytes([text(), (state(), None), source()]) == 4 * (2 * 3 * 4 + 3 * 2 + 3 * 2 * 2)


def test_narrow_rows_are_views() -> None:
    class Layers(list[Any]):
        length = 5

    cache = Layers([text(), (state(),)])
    narrow = caches.narrow_rows(cache, 1, 2)
    assert isinstance(narrow, Layers) and narrow[0].keys.shape == (2, 1, 4, 1) and narrow[0].heads == 1
    narrow[0].keys[0] = 7
    narrow[1][0].h[1] = 7
    assert (cache[0].keys[1] == 7).all() and (cache[1][0].h[2] == 7).all() and (cache[0].keys[2] != 7).any()


def test_states_are_reset_to_their_starts() -> None:
    cache = [text(), state(), SimpleNamespace(growth="constant", h=torch.ones(2))]
    keys = cache[0].keys.clone()
    caches.clear_states(cache)
    assert (cache[1].h == -1).all() and (cache[2].h == 0).all() and (cache[0].keys == keys).all()


def test_rows_swap_places_in_used_slots() -> None:
    cache = [text(), state(), source()]
    rows = torch.tensor([1, 0, 2])
    caches.gather_rows(cache, rows, torch.tensor([0, 1]), 2)
    assert cache[0].keys[:, 0, :, 0].tolist() == [[10, 11, 2, 3], [0, 1, 12, 13], [20, 21, 22, 23]]
    assert cache[1].h[:, 0].tolist() == [2, 0, 4]


def test_sources_follow_their_rows() -> None:
    cache = [text(), source()]
    cache[1].kept = (torch.arange(3.0)[:, None], None)
    caches.gather_sources(cache, torch.tensor([2, 2, 0]))
    assert cache[1].kept[0][:, 0].tolist() == [2, 2, 0] and cache[1].kept[1] is None


def test_sources_are_joined_and_padded_to_the_longest() -> None:
    cache = [text(), source()]
    caches.join_sources(cache, [[text(), source(1, 3)], [text(), source(2, 1)]])
    assert cache[1].kept[0][..., 0].tolist() == [[1, 1, 1], [2, 0, 0], [2, 0, 0]] and cache[1].kept[1] is None


def test_smaller_cache_is_copied_into_a_larger_one() -> None:
    new, old = [text(3, 6), state(), source()], [text(3, 4), state(), source(3, 9)]
    for tensor in (old[0].keys, old[1].h):
        tensor.mul_(-2).sub_(1)
    caches.copy_cache(new, old)
    assert (new[0].keys[:, :, :4] == old[0].keys).all() and new[0].keys[0, 0, 4:, 0].tolist() == [4, 5]
    assert (new[1].h == old[1].h).all() and new[2].kept is old[2].kept


def test_new_cache_is_made_in_inference_mode() -> None:
    model = SimpleNamespace(new_cache=lambda batch, capacity: torch.zeros(batch, capacity))
    made = caches.new_cache(model, 2, 3)
    assert made.shape == (2, 3) and made.is_inference()
