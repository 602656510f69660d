"""Visible keys of a KV cache and the slots that hold them, against the rule of each pair of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.shared.cached_keys import (
    CacheMask,
    check_positions,
    key_slots,
    own_slot,
    visible_range,
    write_cache,
)
from weft.backends.torch.kernels.shared.launch import jit, tl

from .....masks import sees

CAPACITY = 12


@jit
def list_keys_kernel(
    position, found, slots, count,
    WINDOW: tl.constexpr, KEEP: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    kept, first, number = visible_range(tl.load(position), WINDOW, KEEP, CHUNK, STEP)
    i = tl.arange(0, 32)
    at, slot = key_slots(i, kept, first, KEEP, RING, STEP)
    tl.store(found + i, at)
    tl.store(slots + i, slot)
    tl.store(count, number)


@jit
def own_slot_kernel(position, slot, capacity, keep, ROLLING: tl.constexpr):
    at = tl.arange(0, 32)
    tl.store(slot + at, own_slot(tl.load(position + at), capacity, keep, ROLLING))


MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the mask, settings of the rule
    "all": ({}, {}),
    "window": ({"window": 4}, {"window": 4}),
    "window and first keys": ({"window": 4, "keep_first": 3}, {"window": 4, "keep_first": 3}),
    "chunks": ({"chunk": 5}, {"pattern": "chunked", "stride": 5}),
    "dilated": ({"dilation": 3}, {"pattern": "dilated", "stride": 3}),
    "dilated window": ({"dilation": 2, "window": 5}, {"pattern": "dilated", "stride": 2, "window": 5}),
}


@pytest.mark.parametrize("name", MASKS)
def test_visible_keys_are_those_of_the_rule(device: torch.device, name: str) -> None:
    fields, rule = MASKS[name]
    mask = CacheMask(24, **fields)
    for position in (0, 1, 4, 7, 12, 23):
        wanted = [j for j in range(position + 1) if sees(position, j, causal=True, **rule)]
        found, slots, count = (torch.zeros(32, dtype=torch.int32, device=device) for _ in range(3))
        at = torch.tensor([position], device=device)
        constants = {**mask.constants, "CHUNK": mask.chunk or 0, "STEP": mask.dilation}
        list_keys_kernel[(1,)](at, found, slots, count, **constants)
        assert sorted(found[: int(count[0])].tolist()) == wanted
        assert torch.equal(found, slots)  # the cache does not roll
        visible, distance = mask.visible(at)
        assert visible[0].nonzero().flatten().tolist() == wanted
        assert (distance[0, wanted] + position).tolist() == wanted
        assert len(wanted) <= mask.reach


def test_a_rolling_cache_reuses_slots_except_the_first(device: torch.device) -> None:
    """Capacity 6 with 2 kept: positions 2, 3, 4, 5 are overwritten by 6, 7, 8, 9 and so on."""
    at = torch.arange(32, device=device)
    slots = torch.empty_like(at)
    own_slot_kernel[(1,)](at, slots, 6, 2, ROLLING=True)
    assert slots[:12].tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3]
    own_slot_kernel[(1,)](at, slots, 6, 2, ROLLING=False)
    assert torch.equal(slots, at)


@pytest.mark.parametrize("position", [0, 3, 5, 6, 9, 20])
def test_keys_of_a_rolling_cache_are_found_in_their_slots(device: torch.device, position: int) -> None:
    mask = CacheMask(6, window=4, keep_first=2, rolling=True)
    found, slots, count = (torch.zeros(32, dtype=torch.int32, device=device) for _ in range(3))
    at = torch.tensor([position], device=device)
    list_keys_kernel[(1,)](at, found, slots, count, **mask.constants, CHUNK=0, STEP=1)
    number = int(count[0])
    keys = found[:number].tolist()
    assert sorted(keys) == [j for j in range(position + 1) if sees(position, j, causal=True, window=4, keep_first=2)]
    assert slots[:number].tolist() == [j if j < 2 else 2 + (j - 2) % 4 for j in keys]
    visible, distance = mask.visible(at)
    assert sorted((distance[0] + position)[visible[0]].tolist()) == sorted(keys)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rolling": True}, "a rolling cache of 8 keys does not hold window=None"),
        ({"rolling": True, "window": 4, "keep_first": 8}, "does not hold window=4 and keep_first=8"),
        ({"window": 4, "keep_first": 1, "chunk": 4}, "keep_first=1 cannot be combined with chunk=4"),
        (
            {"window": 4, "keep_first": 1, "dilation": 2},
            "cannot be combined with chunk=None and dilation=2",
        ),
    ],
)
def test_masks_that_contradict_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheMask(8, **fields)


def test_reach_is_the_most_keys_that_a_token_reads() -> None:
    assert [CacheMask(20, **fields).reach for fields in ({}, {"window": 4, "keep_first": 3}, {"chunk": 5})] == [
        20,
        7,
        5,
    ]
    assert CacheMask(20, dilation=3).reach == 7
    assert CacheMask(20, window=64).reach == 20


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("position", [-1, 0, 5, CAPACITY - 1, CAPACITY, 40])
def test_a_write_to_one_sequence_is_that_to_each_row_of_a_batch(position: int, rolling: bool) -> None:
    """On a CPU the position of one sequence is read at once; positions without a slot write nothing."""
    one = torch.randn(1, 2, CAPACITY, 8, generator=torch.Generator().manual_seed(0))
    two, before = one.repeat(2, 1, 1, 1), one.clone()
    new = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(1))
    write_cache(one, new, torch.tensor([[position]]), rolling, 3)
    write_cache(two, new.repeat(2, 1, 1), torch.tensor([[position], [position]]), rolling, 3)
    assert torch.equal(one[0], two[0]) and torch.equal(one[0], two[1])
    assert torch.equal(one, before) == (position < 0 or (position >= CAPACITY and not rolling))


def test_a_skipped_token_does_not_undo_the_write_of_another(device: torch.device) -> None:
    """Positions −1 and 9 have no slot in a cache of 4; they must not touch the slots 0 and 3 next to them."""
    cache = torch.full((2, 1, 4, 1), 7.0, device=device)
    new = torch.arange(1.0, 9.0, device=device).view(8, 1, 1)
    write_cache(cache, new, torch.tensor([[0, -1, 3, 9], [9, -1, 8, 5]], device=device), False, 0)
    assert cache.flatten(1).tolist() == [[1, 7, 7, 3], [7, 7, 7, 7]]


def test_check_positions_wants_one_per_row() -> None:
    check_positions(torch.zeros(2, 1), torch.zeros(2, 4, 8))
    with pytest.raises(ValueError, match=r"positions \[3\] must be one per row of q \[2, 4, 8\]"):
        check_positions(torch.zeros(3), torch.zeros(2, 4, 8))
