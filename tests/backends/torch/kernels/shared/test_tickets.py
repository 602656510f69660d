"""Ticket counters, with which the last program of a group reduces the results of all."""

from __future__ import annotations

import torch

from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.tickets import Tickets, is_last, zero_counters


@jit
def sum_kernel(parts, total, ticket, blocks):
    tl.store(parts + tl.program_id(0), tl.program_id(0) + 1)
    if is_last(ticket, blocks):
        at = tl.arange(0, 8)
        there = tl.load(parts + at, mask=at < blocks, other=0, cache_modifier=".cg")
        tl.store(total, tl.sum(there, axis=0))


def test_the_last_program_sees_all_parts_and_resets_the_counter(device: torch.device) -> None:
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    for blocks in (5, 7):
        parts = torch.zeros(8, dtype=torch.int32, device=device)
        total = torch.zeros(1, dtype=torch.int32, device=device)
        sum_kernel[(blocks,)](parts, total, ticket, blocks)
        assert total.item() == blocks * (blocks + 1) // 2
        assert ticket.item() == 0


def test_counters_are_at_zero(device: torch.device) -> None:
    counters = zero_counters(torch.zeros(1, device=device), 3)
    assert len(counters) >= 3 and counters.dtype == torch.int32 and not counters.any()


def test_counters_of_a_batch_size_are_kept() -> None:
    """A captured CUDA graph goes on counting in them after other batches."""
    tickets, one, two = Tickets(5), torch.zeros(1, 1), torch.zeros(2, 1)
    first = tickets(one)
    assert first.tolist() == [0] * 5 and first.dtype == torch.int32
    assert len(tickets(two)) == 10 and tickets(one) is first
