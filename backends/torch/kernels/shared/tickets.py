"""Ticket counters: the last of the programs that share a result reduces it, without a second launch.

Each program stores its part and takes a ticket. The program with the last ticket sees all parts, adds them in a fixed
order, so that the result does not depend on the order of arrival, and resets the counter to 0 for the next launch or
CUDA graph replay.
"""

from __future__ import annotations

import torch

from .launch import jit, tl

_counters: dict[tuple[int, int], torch.Tensor] = {}


@jit
def is_last(ticket, blocks):
    """Take a ticket: return whether this program is the last of `blocks` programs to call this with the counter at
    pointer `ticket`. The last program sees the earlier stores of all, and resets the counter to 0. Read these stores
    with the cache modifier ".cg": the L1 cache may hold stale values."""
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == blocks - 1
    if last:
        tl.store(ticket, 0)
    return last


def zero_counters(x: torch.Tensor, number: int) -> torch.Tensor:
    """Return at least `number` counters, i32 zeros, on the device of x. All launches of a stream share them, because
    they run one after the other. During capture of a CUDA graph new counters are allocated, and each replay first
    zeroes them with one more kernel. A captured model avoids that by keeping its own `torch.zeros(number,
    dtype=torch.int32)`."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.zeros(number, dtype=torch.int32, device=x.device)
    key = (x.get_device(), torch.cuda.current_stream(x.device).cuda_stream)
    if key not in _counters or len(_counters[key]) < number:
        _counters[key] = torch.zeros(max(number, 1024), dtype=torch.int32, device=x.device)
    return _counters[key]


class Tickets:
    """The ticket counters of one model, which runs on one stream: `each` counters per batch row. They are allocated at
    the first batch of each size and never freed, because captured CUDA graphs use them."""

    def __init__(self, each: int) -> None:
        self.each = each
        self._made: dict[tuple[torch.device, int], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the counters, i32 at 0 between launches, for the batch rows of x, on its device."""
        key = x.device, len(x)
        if key not in self._made:
            self._made[key] = torch.zeros(self.each * len(x), dtype=torch.int32, device=x.device)
        return self._made[key]
