"""The keys of a cache that the newest token of a text sees, and the slots that hold them.

Position p is in slot p. In a rolling cache it is in slot p modulo the capacity; if the first `keep` slots stay, in slot
keep + (p − keep) modulo the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launch import jit, tl


@jit
def visible_range(position, WINDOW: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr = 0, STEP: tl.constexpr = 1):
    """Return what the query at `position` sees: the number of keys at the start of the text, the first position of the
    other keys, and the number of all, i32. Without WINDOW (0) all keys are others; of these those of its CHUNK (0:
    all), and of these every STEP-th, counted from the query."""
    end = position.to(tl.int32) + 1
    kept = 0
    first = 0
    if WINDOW > 0:
        kept = tl.minimum(end, KEEP)
        first = tl.maximum(end - WINDOW, kept)
    if CHUNK > 0:
        first = tl.maximum(first, (end - 1) // CHUNK * CHUNK)
    others = tl.maximum(end - first, 0)
    if STEP > 1:
        others = tl.cdiv(others, STEP)
        first = end - 1 - (others - 1) * STEP
    return kept, first, kept + others


@jit
def slots(i, kept, first, KEEP: tl.constexpr, RING: tl.constexpr, STEP: tl.constexpr = 1):
    """The positions and the slots of the keys numbered `i` of those seen; RING slots behind KEEP roll, or none (0)."""
    at = tl.where(i < kept, i, first + (i - kept) * STEP)
    if RING > 0:
        return at, tl.where(at < KEEP, at, KEEP + (at - KEEP) % RING)
    return at, at


@jit
def own_slot(position, capacity, keep, ROLLING: tl.constexpr):
    """The slot that the key of a new token at `position` goes to, in a cache of `capacity`; outside of it: nowhere."""
    if ROLLING:
        position = tl.where(position < keep, position, keep + (position - keep) % (capacity - keep))
    return position


@jit
def prefetch(rows, slot, stride, capacity, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Ask for the `rows` of WIDTH numbers at `slot` [n] in L2, line by line of 128 bytes.

    It reads no value, and L2 is where all writes of the device arrive. So this may come before `gdc_wait`, with a
    position that is out of date: then it helps less, and harms nothing.
    """
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = PADDED // LINE if PADDED > LINE else 1
    column = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    slot = tl.minimum(tl.maximum(slot, 0), capacity - 1).to(tl.int64)
    at = (rows + slot[:, None] * stride + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@dataclass(frozen=True)
class Mask:
    """The keys that a new token sees in a cache of `capacity`: the last `window` of them and the first `keep_first`,
    those of its `chunk`, and of these every `dilation`-th. A `rolling` cache below its window shows the keys it holds.

    Raises:
        ValueError: if a cache rolls without a window, or keeps nothing but its first keys, or there is `keep_first`
            with `chunk` or `dilation`.
    """

    capacity: int
    window: int | None = None
    keep_first: int = 0
    rolling: bool = False
    chunk: int | None = None
    dilation: int = 1

    def __post_init__(self) -> None:
        given = f"window={self.window} and keep_first={self.keep_first}"
        if self.rolling and (self.window is None or self.keep_first >= self.capacity):
            raise ValueError(f"a rolling cache of {self.capacity} keys does not hold {given}")
        if self.keep_first and (self.chunk is not None or self.dilation > 1):
            others = f"chunk={self.chunk} and dilation={self.dilation}"
            raise ValueError(f"keep_first={self.keep_first} does not go with {others}")

    @property
    def constants(self) -> dict[str, int]:
        """The constants of `visible_range` and `slots`, but for CHUNK and STEP."""
        window, keep = self.window or 0, 0 if self.window is None else self.keep_first
        ring = self.capacity - keep if self.rolling else 0
        return {"WINDOW": min(window, ring) if self.rolling else window, "KEEP": keep, "RING": ring}

    @property
    def reach(self) -> int:
        """Return the largest number of keys that a token sees."""
        most = self.capacity if self.window is None else min(self.capacity, self.window + self.keep_first)
        return -(-min(most, self.chunk or most) // self.dilation)

    def visible(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots that tokens at `positions` [batch] see, bool [batch, capacity], and the distance to each (≤ 0)."""
        newest = positions.reshape(-1, 1)
        at = torch.arange(self.capacity, device=positions.device)[None]
        if self.rolling:
            rolled = newest - (newest - at) % (self.capacity - self.keep_first)
            at = torch.where(at < self.keep_first, at, torch.where(rolled < self.keep_first, -1, rolled))
            there = (at >= 0) & (at <= newest)
        else:
            there = at <= newest
        if self.window is not None:
            there &= (newest - at < self.window) | (at < self.keep_first)
        if self.chunk is not None:
            there &= newest // self.chunk == at // self.chunk
        if self.dilation > 1:
            there &= (newest - at) % self.dilation == 0
        return there, at - newest


def write(cache: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, rolling: bool, keep_first: int) -> None:
    """Write tokens, `new` [batch·seq, heads, d], into their slots of `cache` [batch, heads, capacity, d], if there are
    such slots: what `own_slot` says. Only the last of those in one slot stays."""
    capacity, slot = cache.shape[2], positions.reshape(-1)
    if rolling:
        slot = torch.where(slot < keep_first, slot, keep_first + (slot - keep_first) % (capacity - keep_first))
    if len(slot) == 1 and not cache.is_cuda:
        only = int(slot)
        if 0 <= only < capacity:
            cache[0, :, only] = new[0]
        return
    inside = (slot >= 0) & (slot < capacity)
    everywhere = not cache.is_cuda and bool(inside.all())  # a GPU is not waited for
    row = torch.arange(len(slot), device=cache.device) // (len(slot) // len(cache))
    slot, new = slot.clamp(0, capacity - 1), new.to(cache.dtype)
    cache[row, :, slot] = new if everywhere else torch.where(inside[:, None, None], new, cache[row, :, slot])


def check_positions(positions: torch.Tensor, q: torch.Tensor) -> None:
    """Check that `positions` are one per row of q.

    Raises:
        ValueError: if they are not.
    """
    if positions.numel() != q.shape[0]:
        raise ValueError(f"positions {[*positions.shape]} must be one per row of q {[*q.shape]}")
