"""Lookup of an expert's tokens by each block, without a kernel that sorts or counts tokens between router and expert.

The router writes `chosen` [slots]: slot s is choice s mod k of token ⌊s / k⌋. A block of expert e reads all of `chosen`
and collects the slots equal to e, one tile of rows at a time.
"""

from __future__ import annotations

from .launch import jit, tl

AT_ONCE = 128  # slots that a block compares at a time


@jit
def count_tokens(chosen, expert, slots, AT_ONCE: tl.constexpr):
    """Return the number of the first `slots` entries of `chosen` that equal `expert`; AT_ONCE are read at a time."""
    s = tl.arange(0, AT_ONCE)
    found = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, slots, AT_ONCE):
        found += (tl.load(chosen + start + s, mask=start + s < slots, other=-1) == expert).to(tl.int32)
    return tl.sum(found, axis=0)


@jit
def token_slots(chosen, expert, slots, first, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return the next ROWS indices below `slots` at which `chosen` equals `expert`, after skipping `first` of them: i32
    [ROWS], −1 after the last."""
    s, wanted = tl.arange(0, AT_ONCE), first + tl.arange(0, ROWS)
    found, before = tl.zeros([ROWS], tl.int32), 0
    for start in range(0, slots, AT_ONCE):
        mine = (tl.load(chosen + start + s, mask=start + s < slots, other=-1) == expert).to(tl.int32)
        number = before + tl.cumsum(mine, axis=0) - 1
        here = (mine > 0)[None, :] & (number[None, :] == wanted[:, None])
        found += tl.sum(tl.where(here, start + s[None, :] + 1, 0), axis=1)
        before += tl.sum(mine, axis=0)
    return found - 1
