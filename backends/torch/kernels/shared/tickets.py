"""Tickets tell blocks that share a result which of them is the last, without a second launch.

Each stores its part and takes a ticket; the one with the last ticket sees all parts, adds them in their order, so that
the result does not depend on who came last, and puts the counter back to 0 for the next launch or replay of a graph.
"""

from __future__ import annotations

import torch

from .launch import jit, tl

_counters: dict[tuple[int, int], torch.Tensor] = {}


@jit
def is_last(ticket, blocks):
    """Tell whether this is the last of `blocks` blocks to come here; what all of them stored is then visible to it.

    Read that with the cache modifier ".cg": a first-level cache may hold what was there before.
    """
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == blocks - 1
    if last:
        tl.store(ticket, 0)
    return last


def counters(x: torch.Tensor, number: int) -> torch.Tensor:
    """`number` or more counters i32 at 0 on the device of x, which launches on a stream share, as they come in turn.

    In a CUDA graph under capture they are new, and each replay first sets them to 0, which is a kernel more. A model
    that is captured saves that by keeping `torch.zeros(number, dtype=torch.int32)` of its own.
    """
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.zeros(number, dtype=torch.int32, device=x.device)
    key = (x.get_device(), torch.cuda.current_stream(x.device).cuda_stream)
    if key not in _counters or len(_counters[key]) < number:
        _counters[key] = torch.zeros(max(number, 1024), dtype=torch.int32, device=x.device)
    return _counters[key]


class Tickets:
    """The counters of one model, which runs on one stream: `each` for every row of a batch.

    They are made when a batch of some size first comes and are kept, as graphs that were captured count on them.
    """

    def __init__(self, each: int) -> None:
        self.each = each
        self._made: dict[tuple[torch.device, int], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The counters, i32 at 0 between launches, for the rows of x, on its device."""
        key = x.device, len(x)
        if key not in self._made:
            self._made[key] = torch.zeros(self.each * len(x), dtype=torch.int32, device=x.device)
        return self._made[key]
