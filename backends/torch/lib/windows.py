"""Masked attention, optionally with softcap or sinks: blockwise on a GPU, elsewhere with a mask of all pairs.

`attend` uses flex_attention if gradients are needed; else a kernel that skips keys outside of a causal window; and
where neither can run, torch's operator or plain products with a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from ..kernels.prefill.window_attention import has_window_kernel, window_attention
from ..kernels.shared.launch import refusal
from ..kernels.shared.online_softmax import shared_memory
from ..kernels.shared.operands import requires_grad
from .indexing import wide
from .softmax_attention import attention

ENDLESS = 1 << 30  # a window longer than any sequence
WIDE_HEADS = 160 * 1024  # bytes of shared memory that heads wider than 128 need


class KeyVisibility:
    """The keys that the new tokens attend to, by the predicate `sees` on positions; each mask is computed once for all
    layers. queries [batch or 1, seq] and keys [batch or 1, n] are positions; `first` is the position of query 0 if
    positions are consecutive and equal in all batch rows, and only causality and a window hide keys; else None."""

    def __init__(
        self, queries: Tensor, keys: Tensor, sees: Callable[[Tensor, Tensor], Tensor], first: int | None = None
    ) -> None:
        self.queries, self.keys, self.sees, self.first = queries, keys, sees, first
        self._mask: Tensor | None = None
        self._blocks: Any = None
        self._order: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """Return the mask of all pairs of query and key, bool [batch or 1, 1, seq, n]; True: visible."""
        if self._mask is None:
            self._mask = self.sees(self.queries[:, None, :, None], self.keys[:, None, None, :])
        return self._mask

    @property
    def blocks(self) -> Any:
        """Return the mask as a BlockMask for flex_attention."""
        if self._blocks is None:
            rows, sees = max(len(self.queries), len(self.keys)), self.sees
            queries, keys = (x.expand(rows, -1).contiguous() for x in (self.queries, self.keys))

            def in_row(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return sees(queries[b, i], keys[b, j])

            def in_all(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return sees(queries[0, i], keys[0, j])

            make, lengths = on_device(create_block_mask, queries), (queries.shape[1], keys.shape[1])
            at, batch = (in_row, rows) if rows > 1 else (in_all, None)
            self._blocks = make(at, batch, None, *lengths, device=queries.device)
        return self._blocks

    def in_order(self, x: Tensor) -> Tensor:
        """Return x [batch, heads, n, width] sorted by the keys' positions; empty slots of a rolling cache come last."""
        if self.keys.shape[1] == self._length:  # all keys of the sequence, in order
            return x
        if self._order is None:
            self._order = self.keys[0].argsort()
        return x[:, :, self._order]

    def first_key(self, keep_first: int) -> int | None:
        """Return the position of the oldest key after the first `keep_first`; None if `keys` has all keys so far."""
        missing = self._length - self.keys.shape[1]
        return keep_first + missing if missing > 0 else None

    @property
    def _length(self) -> int:
        """Return the length of the sequence including the new tokens."""
        return (self.first or 0) + self.queries.shape[1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: KeyVisibility,
    scale: float | None = None,
    window: int | None = None,
    keep_first: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ) v for q [batch, heads, seq, width] and k, v [batch, kv_heads, n, width], masked by
    `seen`.

    `scale` is 1/√width by default; scores s become softcap · tanh(s / softcap); `sinks` [heads] are scores of one more
    key with value 0. `window` and `keep_first` describe the mask of `seen` for the kernel: the last `window` keys,
    including the query's own, and the first `keep_first` are visible.
    """
    q, k, v = for_products(q, k, v)
    if in_blocks(q, k, v, sinks):
        return flex(q, k, v, seen.blocks, scale, softcap, sinks)
    if seen.first is not None and skips(q, k, v, sinks):
        k, v, first_key = seen.in_order(k), seen.in_order(v), seen.first_key(keep_first)
        kernel = partial(window_attention, start=seen.first, first_key=first_key, keep_first=keep_first)
        return kernel(q, k, v, window or ENDLESS, scale=scale, softcap=softcap, sinks=sinks)
    if softcap is not None or sinks is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attention(q, k, v, scale, mask=seen.mask, softcap=softcap, sinks=sinks)
    mask = None if window is not None and fits_window(seen, window) else seen.mask
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def in_blocks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Return whether to use flex_attention: with gradients, 128 tokens or more, on a GPU with Triton. It needs heads of
    16 to 256 elements, and is never used in an exported program, which must run on all devices."""
    if not requires_grad(q, k, v, sinks) or not q.is_cuda or q.shape[2] < 128 or torch.compiler.is_exporting():
        return False
    widest = max(q.shape[-1], v.shape[-1])
    if min(q.shape[-1], v.shape[-1]) < 16 or widest > 256 or q.dtype == torch.float64:
        return False
    if torch.compiler.is_compiling():  # the full model: torch.compile itself then checks the device
        return True
    return refusal(q) is None and (widest <= 128 or shared_memory(q) >= WIDE_HEADS)


def skips(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Return whether to use the window kernel: several tokens, on a supported GPU, without gradients."""
    return q.shape[2] > 1 and has_window_kernel(q, k, v, sinks)


def fits_window(seen: KeyVisibility, window: int) -> bool:
    """Return whether the keys are exactly the queries' tokens, all within one window. In an exported program, whose
    lengths are symbolic, return False."""
    queries, keys = seen.queries.shape[1], seen.keys.shape[1]
    return not torch.compiler.is_exporting() and queries == keys and queries <= window


def flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute `attend` with flex_attention (Dong 2024, arXiv 2412.05496), whose kernels skip fully masked blocks."""
    options: dict[str, Any] = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if softcap is not None:
        options["score_mod"] = capping(softcap, q)
    compute: Callable[..., Any] = partial(on_device(flex_attention, q), q, k, v, **options)
    if sinks is None:
        x: Tensor = compute()
        return x
    x, aux = compute(return_aux=AuxRequest(lse=True))
    share = torch.sigmoid(aux.lse - wide(sinks)[:, None])  # of the keys; the rest is the sink's
    return (x * share[..., None]).to(v.dtype)


def capping(softcap: float, q: Tensor) -> Callable[..., Tensor]:
    """Return a score_mod for flex_attention that computes softcap · tanh(score / softcap). The cap is a tensor, because
    torch.compile treats a Python number as dynamic once it changes, which flex_attention rejects."""
    caps = torch.full((q.shape[1],), softcap, dtype=torch.float32, device=q.device)

    def softcap_score(score: Tensor, _b: Tensor, h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return caps[h] * torch.tanh(score / caps[h])

    return softcap_score


def for_products(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return `operands`, cast to the dtype of torch.autocast if it is enabled for their device."""
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind):
        return operands
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in operands)


def on_device(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """Return `function` compiled if x is on a GPU; unchanged on a CPU and while the full model is being compiled."""
    return compile_flex(function) if x.is_cuda and not torch.compiler.is_compiling() else function


@lru_cache
def compile_flex(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled by torch at its first call, without graph breaks, which would cost much memory."""
    return torch.compile(function, fullgraph=True)
