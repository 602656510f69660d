"""rope and the attention that reads it, against complex rotations and torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import ops

B, S, HEADS, KV, D = 2, 11, 4, 2, 6
RNG = np.random.default_rng(3)
Q, K, V = (RNG.standard_normal((B, S, n * D)) for n in (HEADS, KV, KV))
FREQUENCIES = np.array([0.9, 0.05])  # two of the three pairs of a head turn
AT = np.arange(S) + np.array([[0], [5]])


def turned(x: np.ndarray, heads: int, interleaved: bool, amplitude: float) -> torch.Tensor:
    """x as [batch, heads, seq, D], its pairs multiplied by amplitude · e^(i·position·frequency)."""
    by_head = torch.from_numpy(x).unflatten(-1, (heads, D)).transpose(1, 2)
    first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    pairs = torch.complex(by_head[..., first], by_head[..., second])
    angles = torch.from_numpy(AT)[:, None, :, None] * torch.from_numpy(FREQUENCIES)
    pairs = pairs * torch.polar(torch.full_like(angles, amplitude), angles)
    out = by_head.clone()
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def rotary_attention(
    q: Any, k: Any, v: Any, at: Any, *past: Any, interleaved: bool, amplitude: float, **attrs: Any
) -> Any:
    """The op `attention` of rotated q and k; caches are written at the positions that they are rotated by."""
    q, k = (
        ops.rope.reference(x, at, FREQUENCIES, heads=n, interleaved=interleaved, amplitude=amplitude)
        for x, n in ((q, HEADS), (k, KV))
    )
    cache = (None, None, None, *past, at) if past else ()
    return ops.attention.reference(q, k, v, *cache, heads=HEADS, kv_heads=KV, **attrs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_attention_equals_rope_then_attention(causal: bool, interleaved: bool) -> None:
    q, k = (turned(x, n, interleaved, 1.2) for x, n in ((Q, HEADS), (K, KV)))
    v = torch.from_numpy(V).unflatten(-1, (KV, D)).transpose(1, 2)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    found = rotary_attention(Q, K, V, AT, causal=causal, scale=0.3, interleaved=interleaved, amplitude=1.2)
    np.testing.assert_allclose(found, wanted.transpose(1, 2).flatten(2).numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("pieces", [(11,), (1,) * 11, (4, 1, 6)], ids=str)
def test_caches_hold_rotated_keys(pieces: tuple[int, ...]) -> None:
    attrs: dict[str, Any] = {"causal": True, "window": 4, "interleaved": False, "amplitude": 1.0}
    whole = rotary_attention(Q, K, V, np.tile(np.arange(S), (B, 1)), **attrs)
    past = [np.full((B, KV, 13, D), 7.0) for _ in "kv"]
    start, found = 0, []
    for n in pieces:
        at = np.tile(np.arange(start, start + n), (B, 1))
        rows = (x[:, start : start + n] for x in (Q, K, V))
        y, *past = rotary_attention(*rows, at, *past, **attrs)
        found.append(y)
        start += n
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=0, atol=1e-13)
