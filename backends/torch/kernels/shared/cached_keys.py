"""The visible keys of a KV cache for the newest token of a sequence, and the slots that hold them.

Position p is in slot p. A rolling cache of capacity C stores it in slot p mod C. If a rolling cache never overwrites
its first `keep` slots, a position p ≥ keep is in slot keep + (p − keep) mod (C − keep).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launch import jit, tl


@jit
def visible_range(position, WINDOW: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr = 0, STEP: tl.constexpr = 1):
    """Return (kept, first, count), i32, of the keys that the query at `position` attends to. These are the first `kept`
    = min(KEEP, position + 1) keys of the sequence (0 if WINDOW is 0), then `count` − `kept` keys at the positions
    `first`, `first` + STEP, …, `position`. The latter are among the last WINDOW keys (0: all) and in the query's chunk
    of CHUNK positions (0: all)."""
    end = position.to(tl.int32) + 1
    sink_count = 0
    first = 0
    if WINDOW > 0:
        sink_count = tl.minimum(end, KEEP)
        first = tl.maximum(end - WINDOW, sink_count)
    if CHUNK > 0:
        first = tl.maximum(first, (end - 1) // CHUNK * CHUNK)
    window_keys = tl.maximum(end - first, 0)
    if STEP > 1:
        window_keys = tl.cdiv(window_keys, STEP)
        first = end - 1 - (window_keys - 1) * STEP
    return sink_count, first, sink_count + window_keys


@jit
def key_slots(i, kept, first, KEEP: tl.constexpr, RING: tl.constexpr, STEP: tl.constexpr = 1):
    """Return the positions and the cache slots of the visible keys with indices i, 0 ≤ i < `count`. `visible_range`
    returns `kept`, `first` and `count`. RING is the number of slots that roll, after the first KEEP slots; it is 0 for
    a cache that does not roll."""
    at = tl.where(i < kept, i, first + (i - kept) * STEP)
    if RING > 0:
        return at, tl.where(at < KEEP, at, KEEP + (at - KEEP) % RING)
    return at, at


@jit
def own_slot(position, capacity, keep, ROLLING: tl.constexpr):
    """Return the slot of the key at `position`: `position`, or with ROLLING as in the module docstring. The caller must
    not store a key whose slot is `capacity` or more, or negative."""
    if ROLLING:
        position = tl.where(position < keep, position, keep + (position - keep) % (capacity - keep))
    return position


@jit
def prefetch_cache(rows, slot, stride, capacity, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Prefetch the cache rows at `slot` [n] into L2, in lines of 128 bytes. `rows` points to slot 0; slots are `stride`
    elements apart. A row has WIDTH elements, and PADDED is the next power of 2. Slots are clamped to `capacity` − 1. A
    prefetch reads no value, and all writes of the device go through L2. So this may run before `wait_for_previous`,
    with a position that is out of date: the prefetch then helps less but does no harm."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = PADDED // LINE if PADDED > LINE else 1
    column = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    slot = tl.minimum(tl.maximum(slot, 0), capacity - 1).to(tl.int64)
    at = (rows + slot[:, None] * stride + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@dataclass(frozen=True)
class CacheMask:
    """The mask of a new token over the keys of a KV cache. A key up to the token is visible if all fields admit it.

    - capacity: number of slots of the cache
    - window: the key is among the last `window` keys or the first `keep_first`; None admits all keys
    - rolling: slots are reused; in a cache with fewer slots than `window`, all stored keys are visible
    - chunk: the key is in the token's own chunk of this many positions; None admits all keys
    - dilation: the distance of the key from the token is a multiple of `dilation`

    Raises:
        ValueError: if a cache rolls without a window or with `keep_first` ≥ `capacity`, or if `keep_first` is given
            with `chunk` or `dilation`.
    """

    capacity: int
    window: int | None = None
    keep_first: int = 0
    rolling: bool = False
    chunk: int | None = None
    dilation: int = 1

    def __post_init__(self) -> None:
        settings = f"window={self.window} and keep_first={self.keep_first}"
        if self.rolling and (self.window is None or self.keep_first >= self.capacity):
            raise ValueError(f"a rolling cache of {self.capacity} keys does not hold {settings}")
        if self.keep_first and (self.chunk is not None or self.dilation > 1):
            pattern = f"chunk={self.chunk} and dilation={self.dilation}"
            raise ValueError(f"keep_first={self.keep_first} cannot be combined with {pattern}")

    @property
    def constants(self) -> dict[str, int]:
        """Return WINDOW, KEEP and RING, without CHUNK and STEP, of `visible_range` and `key_slots` as constexpr."""
        window, keep = self.window or 0, 0 if self.window is None else self.keep_first
        ring = self.capacity - keep if self.rolling else 0
        return {"WINDOW": min(window, ring) if self.rolling else window, "KEEP": keep, "RING": ring}

    @property
    def reach(self) -> int:
        """Return the largest number of keys that a token attends to."""
        most = self.capacity if self.window is None else min(self.capacity, self.window + self.keep_first)
        return -(-min(most, self.chunk or most) // self.dilation)

    def visible(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors [batch, capacity] for the tokens at `positions` [batch]: whether each slot is visible,
        bool, and the position of its key − the position of the token, i64 (≤ 0 where visible)."""
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


def write_cache(
    cache: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, rolling: bool, keep_first: int
) -> None:
    """Write keys or values of tokens, `new` [batch·seq, heads, d], into `cache` [batch, heads, capacity, d], in place,
    at the slots of their `positions` (see `own_slot`). Tokens whose slot is outside the cache are skipped. The other
    tokens of a batch row must have different slots."""
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
    token, each = torch.arange(len(slot), device=cache.device), len(slot) // len(cache)
    row = token // each
    if each > 1 and not everywhere:
        # A skipped token repeats the last write of its row: the old value could undo another token's write.
        last = torch.where(inside, token, -1).view(-1, each).amax(1)[row]
        token = torch.where(inside | (last < 0), token, last)
        slot, new, inside = slot[token], new[token], inside[token]
    slot, new = slot.clamp(0, capacity - 1), new.to(cache.dtype)
    cache[row, :, slot] = new if everywhere else torch.where(inside[:, None, None], new, cache[row, :, slot])


def check_positions(positions: torch.Tensor, q: torch.Tensor) -> None:
    """Check that `positions` has one position per batch row of q; raise ValueError otherwise."""
    if positions.numel() != q.shape[0]:
        raise ValueError(f"positions {[*positions.shape]} must be one per row of q {[*q.shape]}")
