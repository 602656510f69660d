"""Attention of many new tokens to a KV cache (prefill), by operators of torch or the kernel for windows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ..shared.cached_keys import CacheMask
from ..shared.float8 import from_bytes
from ..shared.online_softmax import attend
from .window_attention import window_attention


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    keep_first: int = 0,
    softcap: float | None = None,
    chunk: int | None = None,
    dilation: int = 1,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ) v for tokens at positions from `start` on, whose keys and values are already cached.
    q [batch, seq, heads, d], k [batch, kv_heads, capacity, d], v [batch, kv_heads, capacity, dv] → [batch, seq, heads,
    dv]. Keywords: see `decode_attention`; caches do not roll. `kernel` is as in `uses_torch`. Raise ValueError if
    shapes do not fit, or the positions are outside the cache."""
    seq, heads, capacity = *q.shape[1:3], k.shape[2]
    end = start + seq
    if not 0 <= start <= end <= capacity:
        raise ValueError(f"{seq} tokens from position {start} on do not fit a cache of {capacity}")
    queries, k, v = q.transpose(1, 2), k[:, :, :end], v[:, :, :end]
    if k_scale is not None and v_scale is not None:
        k, v = from_bytes(k, k_scale, q.dtype), from_bytes(v, v_scale, q.dtype)
    score: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if chunk is not None or dilation > 1 or slopes is not None:
        rows = torch.arange(start, end, device=q.device)
        there, distance = CacheMask(end, window, keep_first, False, chunk, dilation).visible(rows)
        bias = None if slopes is None else slopes[:, None, None] * distance
        return attend(queries, k, v, there, bias=bias, **score).transpose(1, 2)
    narrow = window is not None and window < end
    if narrow or softcap is not None or sinks is not None:
        reach = window if window is not None else end
        score |= {"start": start, "keep_first": keep_first if narrow else 0, "kernel": kernel}
        return window_attention(queries, k, v, reach, **score).transpose(1, 2)
    mask: torch.Tensor | None = None
    if start > 0:
        if q.is_cuda:
            mask = causal_lower_right(seq, end)  # flash attention takes no other
        else:
            at = torch.arange(end, device=q.device)
            mask = at[start:, None] >= at
    grouped = heads != k.shape[1]
    y = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return y.transpose(1, 2)
