"""Lookup of the tokens that chose an expert."""

from __future__ import annotations

import torch

from weft.backends.torch.kernels.shared.expert_tokens import count_tokens, token_slots
from weft.backends.torch.kernels.shared.launch import jit, tl

CHOSEN = [3, 1, 3, 0, 1, 3, 3, 2, 3, 1]


@jit
def lookup_kernel(chosen, counts, slots, number, first, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    expert = tl.program_id(0)
    tl.store(counts + expert, count_tokens(chosen, expert, number, AT_ONCE))
    tl.store(slots + expert * ROWS + tl.arange(0, ROWS), token_slots(chosen, expert, number, first, ROWS, AT_ONCE))


def run(device: torch.device, number: int, first: int) -> tuple[list[int], list[list[int]]]:
    """Look up four experts and one that nobody chose, in tiles of 4 choices; return counts and two slots of each."""
    chosen = torch.tensor(CHOSEN, dtype=torch.int32, device=device)
    counts = torch.zeros(5, dtype=torch.int32, device=device)
    slots = torch.zeros(5, 2, dtype=torch.int32, device=device)
    lookup_kernel[(5,)](chosen, counts, slots, number, first, ROWS=2, AT_ONCE=4)
    return counts.tolist(), slots.tolist()


def test_counts_and_first_slots_of_each_expert(device: torch.device) -> None:
    counts, slots = run(device, len(CHOSEN), 0)
    assert counts == [1, 3, 1, 5, 0]
    assert slots == [[3, -1], [1, 4], [7, -1], [0, 2], [-1, -1]]


def test_later_tiles_skip_the_first_slots(device: torch.device) -> None:
    _, slots = run(device, len(CHOSEN), 2)
    assert slots == [[-1, -1], [9, -1], [-1, -1], [5, 6], [-1, -1]]


def test_choices_after_the_number_of_slots_do_not_count(device: torch.device) -> None:
    assert run(device, 3, 0) == ([0, 1, 0, 2, 0], [[-1, -1], [1, -1], [-1, -1], [0, 2], [-1, -1]])
