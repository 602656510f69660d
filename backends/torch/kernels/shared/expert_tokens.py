"""Lookup of an expert's tokens by each block, without a kernel that sorts or counts tokens between router and expert.

The router writes `chosen` [slots]: slot s holds the expert of choice s mod k of token ⌊s / k⌋. A block of expert e
reads all of `chosen` and collects the slots that hold e.
"""

from __future__ import annotations

from .launch import jit, tl

AT_ONCE = 128  # slots that a block compares at a time


@jit
def count_tokens(chosen, expert, slots, AT_ONCE: tl.constexpr):
    """Return the number of the first `slots` entries of `chosen` that equal `expert`; AT_ONCE are read at a time."""
    s = tl.arange(0, AT_ONCE)
    counts = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, slots, AT_ONCE):
        counts += (tl.load(chosen + start + s, mask=start + s < slots, other=-1) == expert).to(tl.int32)
    return tl.sum(counts, axis=0)


@jit
def token_slots(chosen, expert, slots, first, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return, as i32 [ROWS], the slots s < `slots` with `chosen`[s] = `expert` in increasing order, without the first
    `first` of them; −1 after the last. AT_ONCE slots are read at a time."""
    s, wanted = tl.arange(0, AT_ONCE), first + tl.arange(0, ROWS)
    slot, before = tl.zeros([ROWS], tl.int32), 0
    for start in range(0, slots, AT_ONCE):
        mine = (tl.load(chosen + start + s, mask=start + s < slots, other=-1) == expert).to(tl.int32)
        number = before + tl.cumsum(mine, axis=0) - 1
        here = (mine > 0)[None, :] & (number[None, :] == wanted[:, None])
        slot += tl.sum(tl.where(here, start + s[None, :] + 1, 0), axis=1)
        before += tl.sum(mine, axis=0)
    return slot - 1
