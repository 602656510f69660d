"""Sliding-window attention against attention in float64, query by query, and against the op it implements."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.prefill.window_attention import (
    AttentionTile,
    _tile,
    refusal,
    window_attention,
)
from weft.ir import ops

from ..cached_text import bound

reference = partial(window_attention, kernel=False)

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int,
    *,
    scale: float,
    start: int = 0,
    first_key: int | None = None,
    keep_first: int = 0,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """f64 [batch, heads, seq, dv], one query at a time."""
    at = list(range(keep_first)) + list(range(keep_first if first_key is None else first_key, 10**4))
    at = at[: k.shape[2]]
    y = np.zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[2]):
        p = start + i
        seen = [j for j, key in enumerate(at) if key <= p and (p - key < window or key < keep_first)]
        if not seen:
            continue
        scores = np.einsum("bhd,bhtd->bht", q[:, :, i], k[:, :, seen].repeat(group, 1)) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        rest = 0.0 if sinks is None else np.exp(sinks)[:, None]
        weights = np.exp(scores) / (np.exp(scores).sum(-1, keepdims=True) + rest)
        y[:, :, i] = np.einsum("bht,bhtd->bhd", weights, v[:, :, seen].repeat(group, 1))
    return y


@pytest.mark.parametrize(
    ("dtype", "shape", "window", "options"),
    [
        # shape: batch, heads, kv_heads, seq, keys, d, dv
        pytest.param(B16, (2, 2, 1, 130, 130, 16, 24), 50, {}, id="bf16-narrow"),
        pytest.param(F16, (1, 1, 1, 300, 300, 16, 16), 250, {}, id="f16-inner-tiles"),
        pytest.param(F32, (1, 1, 1, 300, 300, 8, 8), 159, {}, id="f32-inner-tiles-to-the-last-key"),
        pytest.param(F32, (1, 1, 1, 300, 300, 8, 8), 160, {}, id="f32-inner-tiles-but-one-key"),
        pytest.param(F32, (1, 2, 2, 70, 70, 80, 16), 33, {"softcap": 3.0}, id="f32-softcap-odd-width"),
        pytest.param(F32, (1, 1, 1, 5, 5, 4, 4), 1, {}, id="itself"),
        pytest.param(B16, (1, 1, 1, 40, 1140, 16, 16), 1030, {"start": 1100}, id="long-window-large-tiles"),
        pytest.param(B16, (1, 3, 1, 140, 290, 16, 16), 60, {"start": 100, "sinks": True}, id="keys-behind-the-queries"),
        pytest.param(B16, (1, 2, 1, 140, 200, 16, 16), 60, {"start": 500, "first_key": 441}, id="chunk"),
        pytest.param(
            B16, (1, 2, 1, 140, 203, 16, 16), 60, {"start": 500, "first_key": 441, "keep_first": 4}, id="chunk-keep"
        ),
        pytest.param(F32, (1, 1, 1, 150, 150, 8, 8), 20, {"keep_first": 70, "scale": 0.7}, id="keep-two-tiles"),
        pytest.param(F32, (1, 2, 1, 30, 30, 8, 8), 9, {"first_key": 10, "sinks": True}, id="queries-before-all-keys"),
        pytest.param(F32, (1, 1, 1, 70, 50, 8, 8), 30, {"start": 40}, id="queries-behind-all-keys"),
        pytest.param(F32, (1, 1, 1, 30, 30, 8, 8), 9, {"first_key": 60}, id="no-key-seen"),
    ],
)
def test_window_attention_agrees_with_float64(
    dtype: torch.dtype, shape: tuple[int, ...], window: int, options: dict[str, Any], device: torch.device
) -> None:
    torch.manual_seed(3)
    batch, heads, kv_heads, seq, keys, d, dv = shape
    q, k, v = (
        torch.randn(batch, *rest).to(dtype) for rest in ((heads, seq, d), (kv_heads, keys, d), (kv_heads, keys, dv))
    )
    sinks = torch.randn(heads).to(dtype)
    given = {"scale": d**-0.5, **options}
    has_sinks = given.pop("sinks", False)
    doubles = [t.double().numpy() for t in (q, k, v)]
    wanted = _attended(*doubles, window, **given, sinks=sinks.double().numpy() if has_sinks else None)
    given |= {"sinks": sinks.to(device) if has_sinks else None}
    allowed = bound(dtype, doubles[2], d + window)
    q, k, v = q.to(device), k.to(device), v.to(device)
    for y in (window_attention(q, k, v, window, **given), reference(q, k, v, window, **given)):
        assert y.dtype == dtype
        assert y.shape == (batch, heads, seq, dv)
        assert np.abs(y.double().cpu().numpy() - wanted).max() < allowed


@pytest.mark.parametrize("keep", [0, 3])
def test_kernel_agrees_with_the_op(keep: int, device: torch.device) -> None:
    torch.manual_seed(4)
    heads, kv_heads, seq, d, window = 4, 2, 40, 8, 11
    q, k, v = (torch.randn(2, seq, count * d).double().numpy() for count in (heads, kv_heads, kv_heads))
    masks = {"window": window, "keep_first": keep, "softcap": 4.0}
    y = ops.attention.reference(q, k, v, heads=heads, kv_heads=kv_heads, causal=True, **masks)
    split = (torch.from_numpy(t).to(device, F32).unflatten(2, (-1, d)).transpose(1, 2) for t in (q, k, v))  # strided
    mine = window_attention(*split, **masks).transpose(1, 2)
    assert mine.is_contiguous()
    assert np.abs(mine.flatten(2).double().cpu().numpy() - y).max() < bound(F32, v, d + window)


def test_tiles_outside_of_the_window_are_not_read(device: torch.device) -> None:
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 1, n, 16, device=device).to(B16) for n in (40, 600, 600))
    wanted = window_attention(q, k, v, 100, start=500)
    k[:, :, :401], v[:, :, :401] = torch.nan, torch.nan  # query 500 sees 401 to 500
    k[:, :, 540:], v[:, :, 540:] = torch.nan, torch.nan  # never written
    assert torch.equal(window_attention(q, k, v, 100, start=500), wanted)


def test_gradients_are_computed_by_torch(device: torch.device) -> None:
    torch.manual_seed(7)
    q = torch.randn(1, 2, 6, 4, device=device, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 6, 4, device=device, dtype=torch.float64, requires_grad=True) for _ in "kv")
    sinks = torch.randn(2, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: window_attention(q, k, v, 3, keep_first=1, softcap=3.0, sinks=sinks), (q, k, v, sinks)
    )


def test_tiles_fit_into_shared_memory() -> None:
    assert _tile(128, 4096, 2, 227 * 1024) == AttentionTile(128, 128, 8, 3)
    assert _tile(128, 128, 2, 227 * 1024) == AttentionTile(128, 64, 8, 3)
    assert _tile(256, 4096, 2, 227 * 1024) == AttentionTile(128, 64, 8, 2)
    assert _tile(128, 4096, 2, 163 * 1024) == AttentionTile(128, 64, 8, 3)
    assert _tile(256, 4096, 2, 99 * 1024) == AttentionTile(64, 32, 4, 2)


def test_refusals_give_a_reason() -> None:
    assert refusal(256, 256, B16) is None
    assert refusal(64, 64, torch.float64) == "no kernel for torch.float64"
    assert "more than registers hold" in str(refusal(256, 128, F32))
    assert "not multiples of 16 bytes" in str(refusal(64, 33, B16))
    q, k = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    for wrong, options, why in (
        ((q[0], k, k, 3), {}, r"are not \[batch, heads, seq, d\]"),
        ((q[:, :3], k, k, 3), {}, "3 query heads are not a multiple of 2 KV heads"),
        ((q.half(), k, k, 3), {}, "differ in dtype"),
        ((q, k, k, 0), {}, "window=0 must be positive"),
        ((q, k, k, 3), {"first_key": 2, "keep_first": 3}, "first_key=2 must be at least keep_first=3"),
    ):
        with pytest.raises(ValueError, match=why):
            window_attention(*wrong, **options)
