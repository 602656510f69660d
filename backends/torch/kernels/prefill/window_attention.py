"""Causal sliding-window attention of many tokens, forward (Beltagy 2020, arXiv 2004.05150; Mistral, arXiv 2310.06825).

One program takes a tile of the queries of a head through the tiles of keys that any of them attends to, as
FlashAttention-2 does (arXiv 2307.08691). Tiles outside of the window are skipped, so the time grows with seq · (window
+ tile); only tiles at the two edges of the window are masked. Keys are loaded with the tensor memory accelerator, if
there is one. The first `keep_first` keys of a sequence are visible to all later queries (arXiv 2309.17453).

The kernel is for inference: where gradients are needed, torch computes; models that train on a GPU use flex_attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..shared import launch
from ..shared.launch import DTYPES, custom_operator, jit, options, start_next, tl, uses_torch, wait_for_previous
from ..shared.online_softmax import attend, check_heads, scale_scores, shared_memory, to_base2, update_softmax
from ..shared.operands import gradient_refusal, power_of_2

WIDEST = 256  # numbers of a key or value, of 2 bytes; half as many of 4
MARGIN = 2048  # bytes of shared memory for all but tiles


@jit
def attend_range(
    m, total, acc, query, k, v, head, lo, hi, distance, scale,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Return the running softmax (m, total, acc) of `query` [queries, d] after keys lo to hi − 1 of the KV head `head`.

    k, v are tensor descriptors of [batch, kv_heads, keys, d] with blocks [1, 1, KEYS, d]; elements outside are 0.
    `distance` [queries] is the position of each query − the position of key 0: key j is visible if 0 ≤ distance − j <
    WINDOW (no upper bound if WINDOW is 0). If not MASKED, all queries attend to all keys, and KEYS must divide hi − lo.
    """
    batch = tl.program_id(2)
    n = tl.arange(0, KEYS)
    # No hoisting of loop invariants: they would not fit in registers.
    for start in tl.range(lo, hi, KEYS, disable_licm=True):
        key = k.load([batch, head, start, 0]).reshape(KEYS, query.shape[1])
        value = v.load([batch, head, start, 0]).reshape(KEYS, acc.shape[1])
        if INTERP:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = scale_scores(tl.dot(query, tl.trans(key), input_precision="tf32x3"), scale, SOFTCAP)
        if MASKED:
            newest = distance - start  # numbers of keys of this tile
            seen = (n[None, :] <= newest[:, None]) & (n < hi - start)[None, :]
            if WINDOW > 0:
                seen &= n[None, :] > newest[:, None] - WINDOW
            score = tl.where(seen, score, -float("inf"))
        m, total, acc = update_softmax(m, total, acc, score, value)
    return m, total, acc


@jit
def window_kernel(
    q, k, v, sinks, out, q_batch, q_head, q_token, queries, keys, start, shift, scale,
    D: tl.constexpr, D_PADDED: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Attend QUERIES queries of a head to the keys in their windows, and to the first KEEP keys. Grid [tiles of
    queries, heads, batch]. Query i is at position start + i; key j is at position j if j < KEEP, else at j + shift."""
    start_next(PDL)
    wait_for_previous(PDL)
    begin, head, batch = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, d, dv = tl.arange(0, QUERIES), tl.arange(0, D_PADDED), tl.arange(0, DV_PADDED)
    real = (begin + r < queries)[:, None]
    q += batch * q_batch + head.to(tl.int64) * q_head + begin.to(tl.int64) * q_token
    query = tl.load(q + r[:, None] * q_token + d[None, :], real & (d < D)[None, :], other=0.0)
    if INTERP:
        query = query.to(tl.float32)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DV_PADDED], tl.float32)
    if sinks is not None:  # a key with value 0
        m = tl.zeros([QUERIES], tl.float32) + to_base2(tl.load(sinks + head))
        total += 1.0

    kv = head // GROUP
    first = start + begin  # positions of the first and the last query
    last = start + tl.minimum(begin + QUERIES, queries) - 1
    at = first + r
    if KEEP > 0:
        hi = tl.minimum(tl.minimum(KEEP, keys), last + 1)
        m, total, acc = attend_range(m, total, acc, query, k, v, kv, 0, hi, at, scale, KEYS, 0, SOFTCAP, True, INTERP)
    lo = tl.maximum(first - WINDOW + 1 - shift, KEEP)
    hi = tl.minimum(last + 1 - shift, keys)
    # Tiles of keys: in [lo, inner) some are before the window of later queries, in [inner, edge) all queries attend to
    # all keys, and in [edge, hi) some are after earlier queries.
    inner = lo + tl.cdiv(tl.maximum(last - WINDOW + 1 - shift - lo, 0), KEYS) * KEYS
    edge = inner + tl.maximum(tl.minimum(first + 1 - shift, hi) - inner, 0) // KEYS * KEYS
    at -= shift
    stop = tl.minimum(inner, hi)
    m, total, acc = attend_range(
        m, total, acc, query, k, v, kv, lo, stop, at, scale, KEYS, WINDOW, SOFTCAP, True, INTERP
    )
    m, total, acc = attend_range(
        m, total, acc, query, k, v, kv, inner, edge, at, scale, KEYS, WINDOW, SOFTCAP, False, INTERP
    )
    m, total, acc = attend_range(
        m, total, acc, query, k, v, kv, edge, hi, at, scale, KEYS, WINDOW, SOFTCAP, True, INTERP
    )
    y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    row = (batch * queries + begin + r) * tl.num_programs(1) + head
    tl.store(out + row[:, None] * DV + dv[None, :], y.to(out.dtype.element_ty), real & (dv < DV)[None, :])


def refusal(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel does not support these head sizes and `dtype`; None if it does."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    if max(head_dim, value_dim) * dtype.itemsize > WIDEST * 2:
        return f"keys of {head_dim} and values of {value_dim} elements of {dtype} are more than registers hold"
    if head_dim * dtype.itemsize % 16 or value_dim * dtype.itemsize % 16:
        return f"keys of {head_dim} and values of {value_dim} elements of {dtype} are not multiples of 16 bytes"
    return None


def has_window_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> bool:
    """Return whether the kernel of `window_attention` supports the head sizes, dtype and device of these operands, and
    none of them requires a gradient."""
    return _refusal(q, k, v, sinks) is None


def _refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> str | None:
    device = launch.refusal(q)
    return device or refusal(q.shape[3], v.shape[3], q.dtype) or gradient_refusal(q, k, v, sinks)


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    *,
    start: int = 0,
    first_key: int | None = None,
    keep_first: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ) v for consecutive tokens, each over its last `window` keys, including its own.

    q [batch, heads, seq, d], k [batch, kv_heads, keys, d], v [batch, kv_heads, keys, dv] → [batch, heads, seq, dv],
    from the kernel in memory [batch, seq, heads, dv]. Query i is at position start + i. The first `keep_first` keys are
    at positions 0 to keep_first − 1 and visible to all later queries; the keys after them are at consecutive positions
    from `first_key` on (by default `keep_first`: no gap). `scale` is 1/√d by default; scores s become softcap · tanh(s
    / softcap); `sinks` [heads] are scores of one more key with value 0. The result of a query without visible keys is
    0. Gradients come from torch, which computes all [seq, keys] scores. `kernel` is as in `uses_torch`. Raise
    ValueError if shapes do not fit, or `window`, `start`, `keep_first` or `first_key` is out of range.
    """
    check_heads(q, k, v, 4, "[batch, heads, seq, d]")
    if window < 1 or start < 0 or keep_first < 0:
        raise ValueError(f"window={window} must be positive, start={start} and keep_first={keep_first} not negative")
    if first_key is not None and first_key < keep_first:
        raise ValueError(f"first_key={first_key} must be at least keep_first={keep_first}")
    queries, d, keys = *q.shape[2:], k.shape[2]
    shift = 0 if first_key is None else first_key - keep_first
    last = min(keys, start + queries - shift)  # keys after the last query may never have been written
    if last < 1 or uses_torch(kernel, _refusal, q, k, v, sinks):
        key = torch.arange(keys, device=k.device)
        if first_key is not None:
            key = torch.where(key < keep_first, key, key + shift)
        distance = torch.arange(start, start + queries, device=q.device)[:, None] - key
        seen = (distance >= 0) & ((distance < window) | (key < keep_first))
        return attend(q, k, v, seen, scale, softcap=softcap, sinks=sinks)
    scalars = (start, shift, keep_first, 1 / math.sqrt(d) if scale is None else scale, softcap or 0.0)
    return launch_window_attention(q, k[:, :, :last], v[:, :, :last], sinks, window, *scalars).transpose(1, 2)


def _empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@custom_operator(_empty)
def launch_window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    start: int,
    shift: int,
    keep_first: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Compute `window_attention` with the kernel, as [batch, seq, heads, dv]; key j is at position j if j < keep_first,
    else at j + shift."""
    (batch, heads, queries, d), (kv_heads, keys, dv) = q.shape, (*k.shape[1:3], v.shape[3])
    size, wide = q.element_size(), power_of_2(max(d, dv), 16)
    tile = _tile(wide, window, size, shared_memory(q))
    q = q if q.stride(3) == 1 else q.contiguous()
    out = q.new_empty(batch, queries, heads, dv)
    window_kernel[-(-queries // tile.queries), heads, batch](
        q, _descriptor(k, tile.keys), _descriptor(v, tile.keys), sinks, out,
        *q.stride()[:3], queries, keys, start, shift, scale,
        **_constants(d, dv, heads // kv_heads, tile), WINDOW=window, KEEP=keep_first, SOFTCAP=softcap,
        INTERP=not q.is_cuda, **options(q, tile.warps, tile.stages),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class AttentionTile:
    """The tile of a program: `queries` per program, `keys` per step, warps, and pipeline stages of its loads."""

    queries: int
    keys: int
    warps: int
    stages: int


def _tile(wide: int, window: int, size: int, room: int) -> AttentionTile:
    """Return the largest of a few tiles that fits into `room` bytes of shared memory, or the smallest if none fits, for
    heads padded to `wide` elements of `size` bytes. The largest is only for windows of 1024 keys or more, because tiles
    at the edges of a window are computed in full."""
    if size == 4:
        tiles = [AttentionTile(64, 32, 4, 3)] if wide <= 64 else [AttentionTile(16, 32, 4, 3)]
    else:
        large = [AttentionTile(128, 128, 8, 3)] if wide <= 128 and window >= 1024 else []
        tiles = [
            *large,
            *(AttentionTile(128, keys, 8, stages) for keys in (64, 32) for stages in (3, 2)),
            AttentionTile(64, 32, 4, 2),
        ]
    sizes = ((t.queries + 2 * t.stages * t.keys) * wide * size + MARGIN for t in tiles)
    return next((t for t, needed in zip(tiles, sizes, strict=True) if needed <= room), tiles[-1])


def _descriptor(x: torch.Tensor, rows: int) -> Any:
    """Return a tensor descriptor of x [batch, heads, keys, d] that loads `rows` keys at a time, with d padded to a
    power of 2 (at least 16). Copy x if it is not aligned to 16 bytes, or the stride of its last axis is not 1."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3])
    return TensorDescriptor.from_tensor(
        x if aligned and x.stride(3) == 1 else x.contiguous(), [1, 1, rows, power_of_2(x.shape[3], 16)]
    )


def _constants(d: int, dv: int, group: int, tile: AttentionTile) -> dict[str, Any]:
    return {
        **{"D": d, "D_PADDED": power_of_2(d, 16), "DV": dv, "DV_PADDED": power_of_2(dv, 16), "GROUP": group},
        **{"QUERIES": tile.queries, "KEYS": tile.keys},
    }
