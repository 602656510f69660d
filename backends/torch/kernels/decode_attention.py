"""Decode attention of one new token per row: grouped-query Flash-Decoding over split keys of a cache.

One program takes up to 64 query heads of a KV head, as the rows of a matrix product, through one split of the keys
(Flash-Decoding, Dao 2023; grouped queries: Ainslie 2023, arXiv 2305.13245; softmax: Dao 2022, arXiv 2205.14135). The
launch fixes the number of splits. They divide the keys that a row's query attends to, which follow from `positions` on
the device; splits without keys end at once. So one CUDA graph serves any length. For the merge see `split_keys`.

Under programmatic dependent launch this kernel may start while earlier kernels still run. It reads their outputs (the
query, the newest key and value, the positions) after `wait_for_previous`; before, it only prefetches the cache into L2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from .prefill.prefill_attention import prefill_attention
from .shared import launch, split_keys
from .shared.cached_keys import CacheMask, check_positions, key_slots, prefetch_cache, visible_range
from .shared.float8 import FLOAT8, check_scales, float8_to, from_bytes
from .shared.launch import DTYPES, jit, start_next, tl, uses_torch, wait_for_previous
from .shared.online_softmax import attend, check_heads, scale_scores, to_base2, update_softmax
from .shared.operands import gradient_refusal, power_of_2
from .shared.split_keys import keys_per_split, store_split

HEADS = 64  # query heads that a program takes at most
WIDEST = 1536  # numbers of a key and its value, padded: what shared memory holds
MOST_QUERIES = 16  # tokens of a row that the kernel takes at once, as in speculative decoding
STAGE = 36 * 1024  # bytes of keys and values per stage: three programs fit on a multiprocessor, two stages each


@jit
def decode_kernel(
    q, k, v, k_scale, v_scale, positions, sinks, slopes, out, partial, state, tickets,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot, capacity, scale,
    D: tl.constexpr, D_PADDED: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr,
    GROUP: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, KEEP: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    SOFTCAP: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_COLUMNS: tl.constexpr, MERGE_STEP: tl.constexpr,
    INSIDE: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Attend TAKEN of the GROUP query heads of a KV head to one split of the keys, KEYS keys at a time; store the sums
    by `store_split`. Grid [splits, kv_heads · blocks of heads, batch]. With several QUERIES (tokens per batch row),
    GROUP counts the heads of all tokens, ordered [token, head]."""
    split, splits, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    BLOCKS: tl.constexpr = (GROUP + TAKEN - 1) // TAKEN
    kv_head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    k += batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
    v += batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head
    n = tl.arange(0, KEYS)
    newest = positions + batch * QUERIES + (QUERIES - 1)
    if PDL:
        start_next(PDL)
        sink_count, first, keys = visible_range(tl.load(newest, cache_modifier=".cg"), WINDOW, KEEP, CHUNK, STEP)
        at, slot = key_slots(split * keys_per_split(keys, splits, KEYS) + n, sink_count, first, KEEP, RING, STEP)
        prefetch_cache(k, slot, k_slot, capacity, D, D_PADDED)
        prefetch_cache(v, slot, v_slot, capacity, DV, DV_PADDED)
        wait_for_previous(PDL)

    position = tl.load(newest, cache_modifier=".cg")
    sink_count, first, keys = visible_range(position, WINDOW, KEEP, CHUNK, STEP)
    share = keys_per_split(keys, splits, KEYS)
    used = tl.maximum(tl.cdiv(keys, share), 1)
    if split >= used:
        return

    r, d, dv = tl.arange(0, ROWS), tl.arange(0, D_PADDED), tl.arange(0, DV_PADDED)
    real = (r < TAKEN) & (block * TAKEN + r < GROUP)
    head = kv_head * GROUP + block * TAKEN + r
    row = batch * (tl.num_programs(1) // BLOCKS * GROUP) + head
    if QUERIES > 1:
        HEADS: tl.constexpr = GROUP // QUERIES  # of a KV head and query
        number = (block * TAKEN + r) // HEADS  # of the query
        head = kv_head * HEADS + (block * TAKEN + r) % HEADS
        row = (batch * QUERIES + number) * (tl.num_programs(1) // BLOCKS * HEADS) + head
    query = tl.load(q + row[:, None] * D + d[None, :], real[:, None] & (d < D)[None, :], other=0.0)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
    if sinks is not None:  # a key of split 0, with value 0
        m = tl.where(split == 0, to_base2(tl.load(sinks + head, real, other=0.0)), m)
        total = tl.where(split == 0, 1.0, total)
    if slopes is not None:
        slope = to_base2(tl.load(slopes + head, real, other=0.0))
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
        if query.dtype == tl.bfloat16:  # the hardware takes floats of 8 bits to fp16, which holds all of them
            query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    if INTERP:
        query = query.to(tl.float32)
    end = tl.minimum((split + 1) * share, keys)
    for start in tl.range(split * share, end, KEYS):
        i = start + n
        at, slot = key_slots(i, sink_count, first, KEEP, RING, STEP)
        slot_rows = slot.to(tl.int64)[:, None]
        key = tl.load(k + slot_rows * k_slot + d[None, :], (i < end)[:, None] & (d < D)[None, :], other=0.0)
        value = tl.load(v + slot_rows * v_slot + dv[None, :], (i < end)[:, None] & (dv < DV)[None, :], other=0.0)
        if k_scale is not None:
            key, value = float8_to(key, query.dtype), float8_to(value, query.dtype)
        if INTERP:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = scale_scores(tl.dot(query, tl.trans(key), input_precision="tf32x3"), scale, SOFTCAP)
        distance = (at - position)[None, :]
        if QUERIES > 1:
            distance += (QUERIES - 1 - number)[:, None]
            score = tl.where(distance <= 0, score, -float("inf"))
        if slopes is not None:
            score += slope[:, None] * distance.to(tl.float32)
        score = tl.where((i < end)[None, :], score, -float("inf"))
        m, total, acc = update_softmax(m, total, acc, score, value)

    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head)
    group = batch * tl.num_programs(1) + tl.program_id(1)
    store_split(
        out, partial, state, tickets, acc, m, total, group, split, splits, used,
        GROUP, TAKEN, DV, MERGE_ROWS, MERGE_COLUMNS, MERGE_STEP, INSIDE,
    )  # fmt: skip


def refusal(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel does not support these head sizes and `dtype`; None if it does."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    if (padded := power_of_2(head_dim) + power_of_2(value_dim)) > WIDEST // (dtype.itemsize // 2):
        return f"a key and its value have {padded} elements, more than shared memory holds"
    return None


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    start: int = 0,
    scale: float | None = None,
    window: int | None = None,
    keep_first: int = 0,
    softcap: float | None = None,
    rolling: bool = False,
    chunk: int | None = None,
    dilation: int = 1,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    splits: int | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ) v for one new token per batch row, whose key and value are already in the cache.

    q [batch, heads, d] or [batch, 1, heads, d], k [batch, kv_heads, capacity, d], v [batch, kv_heads, capacity, dv],
    positions i64 [batch] or [batch, 1] of the new tokens → like q, with dv instead of d. Positions are below capacity
    unless `rolling`; a row at a negative position has no keys, and its result is 0. q [batch, seq, heads, d] are
    several consecutive tokens per row, at positions [batch, seq] from `start` on: up to 16 are one launch if all
    earlier keys are visible; otherwise `prefill_attention` is called. `kernel` is as in `uses_torch`; the kernel is for
    inference, gradients come from torch.

    - scale: 1/√d by default
    - window: the last `window` keys and the first `keep_first` are visible
    - chunk: only keys in the query's own chunk of positions are visible
    - dilation: only keys whose distance is a multiple of `dilation` are visible
    - rolling: position p is in slot p modulo capacity, after `keep_first` slots that are never overwritten; if capacity
      is below `window`, all stored keys are visible
    - softcap: scores s become softcap · tanh(s / softcap)
    - sinks: [heads], scores of one more key per head, with value 0
    - slopes: [heads], ALiBi: slope · (key position − query position) is added to scores
    - k_scale, v_scale: f32 [kv_heads], scales of an FP8 cache, whose k and v are u8, the bytes of e4m3 values
    - tickets: counters that are 0 between launches (see `zero_counters`); batch · heads suffice
    - splits: number of parts of the keys that run in parallel, by default chosen for the device

    Raises:
        ValueError: if shapes, strides or dtypes do not fit, `keep_first` is given with `chunk` or `dilation`, or
            `rolling` with several tokens, without `window`, or with `keep_first` ≥ capacity.
    """
    if q.ndim == 4:
        score: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "slopes": slopes}
        score |= {"k_scale": k_scale, "v_scale": v_scale}
        check_scales(k, v, k_scale, v_scale)
        check_heads(q.transpose(1, 2), k, v, 4, "[batch, seq, heads, d] and its caches", k_scale is not None)
        if positions.shape != q.shape[:2]:
            raise ValueError(f"positions {[*positions.shape]} must be one for each token of q {[*q.shape]}")
        seen: dict[str, Any] = {"window": window, "keep_first": keep_first, "chunk": chunk, "dilation": dilation}
        if q.shape[1] > 1:
            if rolling:
                raise ValueError("a rolling cache takes one token at a time: several could overwrite the first")
            if uses_torch(kernel, _several_refusal, q, k, v, sinks, slopes, **seen):
                return prefill_attention(q, k, v, start, **seen, **score, kernel=kernel)
            return _launch(q, k, v, positions, CacheMask(k.shape[2]), 1, 0, splits, tickets, **score)
        seen |= {"rolling": rolling, "tickets": tickets, "splits": splits}
        return decode_attention(q[:, 0], k, v, positions, **seen, **score, kernel=kernel)[:, None]
    coded = k_scale is not None and v_scale is not None
    check_scales(k, v, k_scale, v_scale)
    check_heads(q, k, v, 3, "[batch, heads, d] and its caches", coded)
    check_positions(positions, q)
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(
            f"the last axes of k and v must have stride 1, but the strides are {k.stride()} and {v.stride()}"
        )
    d, dv, capacity = q.shape[2], v.shape[3], k.shape[2]
    mask = CacheMask(capacity, window, keep_first, rolling, chunk, dilation)
    if uses_torch(
        kernel,
        lambda: (
            launch.refusal(q, k_scale is not None)
            or refusal(d, dv, q.dtype)
            or gradient_refusal(q, k, v, sinks, slopes)
        ),
    ):
        there: torch.Tensor | None
        if len(q) == 1 and q.device.type == "cpu" and not rolling and not torch.compiler.is_compiling():
            # One sequence on a CPU: skip the slots after its last token, which are most of a cache at first.
            last = int(positions)
            mask = replace(mask, capacity=max(1, min(capacity, last + 1)))
            k, v = k[:, :, : mask.capacity], v[:, :, : mask.capacity]
        else:
            last = -1
        if last >= 0 and slopes is None and mask == CacheMask(mask.capacity):
            there = bias = None
        else:
            visible, distance = mask.visible(positions)
            there = visible[:, None, None]
            bias = None if slopes is None else slopes[None, :, None, None] * distance[:, None, None]
        asked = q
        if k_scale is not None and v_scale is not None:
            asked = q.to(torch.promote_types(q.dtype, torch.float32))
            k, v = from_bytes(k, k_scale, asked.dtype), from_bytes(v, v_scale, asked.dtype)
        y = attend(asked[:, :, None], k, v, there, scale, softcap=softcap, sinks=sinks, bias=bias)
        return y[:, :, 0].to(q.dtype)
    how: dict[str, Any] = {"sinks": sinks, "slopes": slopes, "k_scale": k_scale, "v_scale": v_scale}
    how |= {"scale": scale, "softcap": softcap}
    return _launch(q[:, None], k, v, positions, mask, dilation, chunk or 0, splits, tickets, **how)[:, 0]


def _several_refusal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: torch.Tensor | None,
    window: int | None,
    keep_first: int,
    chunk: int | None,
    dilation: int,
) -> str | None:
    """Return the reason why the kernel cannot take several tokens at once, q [batch, seq, heads, d]; None if it can."""
    if q.shape[1] > MOST_QUERIES:
        return f"more than {MOST_QUERIES} new tokens: a prompt"
    if (window is not None and window < k.shape[2]) or chunk is not None or dilation > 1:
        return "a mask hides keys"
    coded = k.dtype == torch.uint8
    reason = launch.refusal(q, coded) or refusal(q.shape[3], v.shape[3], q.dtype) or gradient_refusal(q, k, v, *others)
    return reason or ("the caches differ from q in dtype" if not coded and not q.dtype == k.dtype == v.dtype else None)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    mask: CacheMask,
    dilation: int,
    chunk: int,
    splits: int | None,
    tickets: torch.Tensor | None,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel for q [batch, seq, heads, d]; return its output [batch, seq, heads, dv]."""
    (batch, queries, heads, d), kv_heads, dv = q.shape, k.shape[1], v.shape[3]
    shape = _shape(d, dv, queries * heads // kv_heads, q.element_size())
    if k_scale is not None:
        k, v = k.view(FLOAT8), v.view(FLOAT8)
    y = split_keys.launch(
        decode_kernel,
        (q.contiguous(), k, v, k_scale, v_scale, positions.contiguous(), sinks, slopes),
        (*k.stride()[:3], *v.stride()[:3], k.shape[2], 1 / math.sqrt(d) if scale is None else scale),
        {
            **{**shape, **mask.constants, "QUERIES": queries},
            **{"CHUNK": chunk, "STEP": dilation, "SOFTCAP": softcap or 0.0},
        },
        out=q.new_empty(batch, queries * heads, dv),
        groups=kv_heads * -(-shape["GROUP"] // shape["TAKEN"]),
        most=-(-mask.reach // shape["KEYS"]),
        splits=splits,
        tickets=tickets,
    )
    return y.view(batch, kv_heads, queries, -1, dv).transpose(1, 2).reshape(batch, queries, heads, dv)


def _shape(d: int, dv: int, group: int, size: int) -> dict[str, int]:
    """Return the constexpr arguments for heads of d and dv elements of `size` bytes, and `group` heads per KV head."""
    d_padded, dv_padded = power_of_2(d, 16), power_of_2(dv, 16)
    heads_per_block = -(-group // -(-group // HEADS))
    keys = STAGE // ((d_padded + dv_padded) * size)
    return {
        **{"D": d, "D_PADDED": d_padded, "DV": dv, "DV_PADDED": dv_padded},
        **{"GROUP": group, "TAKEN": heads_per_block, "ROWS": power_of_2(heads_per_block, 16)},
        "KEYS": min(128, max(16, power_of_2(keys + 1) // 2)),
        **split_keys.merge_constants(power_of_2(heads_per_block), dv_padded),
    }
