"""Multi-head latent attention of one new token per row to its cache, absorbed form (DeepSeek-V2, arXiv 2405.04434).

All heads share one cache. A row has `rank` elements that are both key and value, and rotary elements that are part of
the key only. A program loads a row once for both, and takes 16 to 64 heads through one split of the keys. Splits, their
merge, and the prefetch before `wait_for_previous` are as in `decode_attention`.
"""

from __future__ import annotations

import math

import torch

from .shared import launch, split_keys
from .shared.cached_keys import CacheMask, check_positions, key_slots, prefetch_cache, visible_range
from .shared.launch import DTYPES, jit, start_next, tl, uses_torch, wait_for_previous
from .shared.online_softmax import HOPPER, attend, scale_scores, shared_memory, to_base2, update_softmax
from .shared.operands import gradient_refusal, power_of_2
from .shared.split_keys import keys_per_split, store_split

HEADS = 64  # that a program takes at most
WIDEST = 512  # rank: sums of 64 heads then take half of the registers of 8 warps


@jit
def latent_kernel(
    q, cache, positions, sinks, out, partial, state, tickets, batch_stride, capacity, scale,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    GROUP: tl.constexpr, TAKEN: tl.constexpr, KEYS: tl.constexpr, LEAN: tl.constexpr,
    WINDOW: tl.constexpr, KEEP: tl.constexpr, RING: tl.constexpr, SOFTCAP: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLUMNS: tl.constexpr, MERGE_STEP: tl.constexpr, INSIDE: tl.constexpr,
    PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Attend TAKEN of all GROUP heads to one split of the keys, KEYS keys at a time; store the sums by `store_split`.
    Grid [splits, blocks of heads, batch]."""
    split, splits, block, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    cache += batch.to(tl.int64) * batch_stride
    n = tl.arange(0, KEYS)
    if PDL:
        start_next(PDL)
        sink_count, first, keys = visible_range(tl.load(positions + batch, cache_modifier=".cg"), WINDOW, KEEP)
        _, slot = key_slots(split * keys_per_split(keys, splits, KEYS) + n, sink_count, first, KEEP, RING)
        prefetch_cache(cache, slot, RANK + ROPE, capacity, RANK + ROPE, 2 * RANK_PADDED)
        wait_for_previous(PDL)

    sink_count, first, keys = visible_range(tl.load(positions + batch, cache_modifier=".cg"), WINDOW, KEEP)
    share = keys_per_split(keys, splits, KEYS)
    used = tl.maximum(tl.cdiv(keys, share), 1)
    if split >= used:
        return

    r, c, p = tl.arange(0, TAKEN), tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
    real = (block * TAKEN + r < GROUP)[:, None]
    row = batch * GROUP + block * TAKEN
    query = q + (row + r)[:, None] * (RANK + ROPE)
    latent_query = tl.load(query + c[None, :], real & (c < RANK)[None, :], other=0.0)
    rope_query = tl.load(query + RANK + p[None, :], real & (p < ROPE)[None, :], other=0.0)
    m = tl.full([TAKEN], -float("inf"), tl.float32)
    total = tl.zeros([TAKEN], tl.float32)
    acc = tl.zeros([TAKEN, RANK_PADDED], tl.float32)
    if sinks is not None:  # a key of split 0, with value 0
        sink = tl.load(sinks + block * TAKEN + r, block * TAKEN + r < GROUP, other=0.0)
        m = tl.where(split == 0, to_base2(sink), m)
        total = tl.where(split == 0, 1.0, total)
    if INTERP:
        latent_query, rope_query = latent_query.to(tl.float32), rope_query.to(tl.float32)
    end = tl.minimum((split + 1) * share, keys)
    for start in tl.range(split * share, end, KEYS, disable_licm=LEAN):
        i = start + n
        _, slot = key_slots(i, sink_count, first, KEEP, RING)
        key = cache + slot.to(tl.int64)[:, None] * (RANK + ROPE)
        latent_there = (i < end)[:, None] if RANK == RANK_PADDED else (i < end)[:, None] & (c < RANK)[None, :]
        rope_there = (i < end)[:, None] if ROPE == ROPE_PADDED else (i < end)[:, None] & (p < ROPE)[None, :]
        latent = tl.load(key + c[None, :], latent_there, other=0.0)
        rope = tl.load(key + RANK + p[None, :], rope_there, other=0.0)
        if INTERP:
            latent, rope = latent.to(tl.float32), rope.to(tl.float32)
        product = tl.dot(latent_query, tl.trans(latent), input_precision="tf32x3")
        product = tl.dot(rope_query, tl.trans(rope), product, input_precision="tf32x3")
        score = tl.where((i < end)[None, :], scale_scores(product, scale, SOFTCAP), -float("inf"))
        m, total, acc = update_softmax(m, total, acc, score, latent)

    group = batch * tl.num_programs(1) + block
    store_split(
        out, partial, state, tickets, acc, m, total, group, split, splits, used,
        GROUP, TAKEN, RANK, MERGE_ROWS, MERGE_COLUMNS, MERGE_STEP, INSIDE,
    )  # fmt: skip


def refusal(rank: int, rope_dim: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel does not support rows of `rank` + `rope_dim` elements; None if it does."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    widest = WIDEST if dtype.itemsize == 2 else WIDEST // 4  # products of f32 take three times the registers
    if rank > widest or rope_dim > 128:
        return f"rank {rank} and {rope_dim} rotary features of {dtype} exceed the kernel's {widest} and 128"
    return None


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    rank: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    keep_first: int = 0,
    softcap: float | None = None,
    rolling: bool = False,
    sinks: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    splits: int | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ) v for one new token per batch row, whose latent is already in the cache.

    q [batch, heads, rank + rope_dim], with the keys' up-projection absorbed; cache [batch, 1, capacity, rank +
    rope_dim], whose rows are keys and whose first `rank` columns are values; positions i64 [batch] or [batch, 1] → the
    weighted sums of latents [batch, heads, rank]. The default `scale`, 1/√(rank + rope_dim), fits no known model: pass
    the scale of the heads before absorption. Other keywords and errors: see `decode_attention`.
    """
    _check(q, cache, positions, rank)
    (batch, heads, width), capacity = q.shape, cache.shape[2]
    rope = width - rank
    mask = CacheMask(capacity, window, keep_first, rolling)
    if uses_torch(
        kernel, lambda: launch.refusal(q) or refusal(rank, rope, q.dtype) or gradient_refusal(q, cache, sinks)
    ):
        there, _ = mask.visible(positions)
        y = attend(q[:, :, None], cache, cache[..., :rank], there[:, None, None], scale, softcap=softcap, sinks=sinks)
        return y[:, :, 0]
    shape, warps = _shape(rank, rope, heads, q.element_size(), shared_memory(q))
    return split_keys.launch(
        latent_kernel,
        (q.contiguous(), cache, positions.contiguous(), sinks),
        (cache.stride(0), capacity, 1 / math.sqrt(width) if scale is None else scale),
        {**shape, **mask.constants, "SOFTCAP": softcap or 0.0},
        out=q.new_empty(batch, heads, rank),
        groups=-(-heads // shape["TAKEN"]),
        most=-(-mask.reach // shape["KEYS"]),
        splits=splits,
        tickets=tickets,
        warps=warps,
    )


def _check(q: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, rank: int) -> None:
    """Raise ValueError unless q, cache, positions and rank have the shapes of `latent_decode`."""
    belong = q.dim() == 3 and cache.shape[:2] == (q.shape[0], 1) and cache.shape[3:] == q.shape[2:]
    if not belong or not 0 < rank <= q.shape[2]:
        raise ValueError(
            f"q {[*q.shape]} and cache {[*cache.shape]} must be [batch, heads, {rank} + rope] and its cache"
        )
    if cache.stride()[2:] != (q.shape[2], 1):
        raise ValueError(f"cache rows must be contiguous, but the strides are {cache.stride()}")
    if q.dtype != cache.dtype:
        raise ValueError(f"q {q.dtype} and cache {cache.dtype} differ in dtype")
    check_positions(positions, q)


def _shape(rank: int, rope: int, heads: int, size: int, room: int) -> tuple[dict[str, int], int]:
    """Return the constexpr arguments and the number of warps for latents of `rank` + `rope` elements of `size` bytes,
    `heads` query heads, and `room` bytes of shared memory. A block takes 16, 32 or 64 heads. With 16, two stages of
    keys leave room for a second program on a multiprocessor; with 32, 64 keys at a time occupy 8 warps; with 64,
    products are asynchronous (wgmma), and LEAN recomputes loop invariants, which registers would not hold."""
    padded = power_of_2(rank, 16) + power_of_2(rope, 16)
    heads_per_block = min(HEADS if size == 2 and room >= HOPPER else 16, power_of_2(heads, 16))
    stage = 80 * 1024 if heads_per_block == 32 else 40 * 1024
    keys = power_of_2(stage // (padded * size) + 1) // 2
    shape = {
        **{"RANK": rank, "RANK_PADDED": power_of_2(rank, 16), "ROPE": rope, "ROPE_PADDED": power_of_2(rope, 16)},
        **{"GROUP": heads, "TAKEN": heads_per_block, "KEYS": min(64, max(16, keys)), "LEAN": heads_per_block == 64},
        **split_keys.merge_constants(heads_per_block, power_of_2(rank, 16)),
    }
    return shape, 4 if heads_per_block == 16 and size == 2 else 8
