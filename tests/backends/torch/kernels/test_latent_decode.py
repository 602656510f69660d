"""Latent decode attention against attention in float64, position by position, and against the op it implements."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.latent_decode import latent_decode, refusal
from weft.backends.torch.kernels.shared import split_keys
from weft.ir import ops

from .cached_text import Text, bound

reference = partial(latent_decode, kernel=False)

B16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope", "capacity", "positions", "options"),
    [
        pytest.param(F32, 16, 32, 16, 90, [0, 70, -1, 89], {}, id="lengths"),
        pytest.param(B16, 5, 24, 12, 200, [199, 40], {"splits": 3}, id="bf16-odd-widths"),
        pytest.param(B16, 16, 512, 64, 80, [79], {"splits": 2}, id="published-widths"),
        pytest.param(F32, 20, 32, 8, 150, [140], {"splits": 2, "softcap": 3.0}, id="two-blocks-of-heads"),
        pytest.param(B16, 70, 24, 12, 150, [149], {"splits": 2, "sinks": True}, id="bf16-two-blocks-of-64-heads"),
        pytest.param(B16, 32, 24, 12, 130, [129, 3], {"sinks": True}, id="32-heads-sinks"),
        pytest.param(F32, 4, 32, 16, 40, [300, 7, 40], {"window": 30, "keep_first": 4, "rolling": True}, id="rolling"),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["one-launch", "two-launches"])
def test_attention_agrees_with_float64_position_by_position(
    dtype: torch.dtype,
    heads: int,
    rank: int,
    rope: int,
    capacity: int,
    positions: list[int],
    options: dict[str, Any],
    inside: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(split_keys, "INSIDE", 1 << 30 if inside else 0)
    text = Text.random(len(positions), 1, max(positions) + 1, rank + rope, 1, dtype)
    text.values = text.keys[..., :rank]
    q, sinks = torch.randn(len(positions), heads, rank + rope).to(dtype), torch.randn(heads).to(dtype)
    given = {"scale": (rank / 2) ** -0.5, **options}
    splits, rolling, has_sinks = (given.pop(name, None) for name in ("splits", "rolling", "sinks"))
    wanted = text.attended(q.double().numpy(), positions, **given, sinks=sinks.double().numpy() if has_sinks else None)
    keys, _ = text.caches(positions, capacity, given.get("keep_first", 0), bool(rolling))
    cache, at = torch.from_numpy(keys).to(device, dtype), torch.tensor(positions, device=device)
    given |= {"rolling": bool(rolling), "sinks": sinks.to(device) if has_sinks else None}
    allowed = bound(dtype, text.values, rank + rope + max(positions) + 1)
    plain = reference(q.to(device), cache.nan_to_num(), at, rank, **given)
    for y in (latent_decode(q.to(device), cache, at, rank, splits=splits, **given), plain):
        assert y.dtype == dtype
        assert np.abs(y.double().cpu().numpy() - wanted).max() < allowed


def test_latent_decode_agrees_with_the_op(device: torch.device) -> None:
    torch.manual_seed(4)
    heads, rank, rope, capacity = 4, 20, 8, 50
    width = rank + rope
    newest = np.array([[5], [49]])
    q, k = (torch.randn(2, 1, count * width).double().numpy() for count in (heads, 1))
    past = torch.randn(2, 1, capacity, width).double().numpy()
    shape = {"heads": heads, "kv_heads": 1, "causal": True, "value_dim": rank, "scale": 0.3}
    y, present = ops.attention.reference(q, k, None, None, None, None, past, None, newest, **shape)
    query, cache = (torch.from_numpy(a).to(device, F32) for a in (q.reshape(2, heads, width), present))
    mine = latent_decode(query, cache, torch.from_numpy(newest).to(device), rank, scale=0.3)
    allowed = bound(F32, present, width + capacity)
    assert np.abs(mine.double().cpu().numpy() - y.reshape(2, heads, rank)).max() < allowed


def test_gradients_are_computed_by_torch(device: torch.device) -> None:
    torch.manual_seed(7)
    q = torch.randn(1, 2, 8, device=device, dtype=torch.float64, requires_grad=True)
    cache = torch.randn(1, 1, 6, 8, device=device, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([3], device=device)
    assert torch.autograd.gradcheck(lambda q, cache: latent_decode(q, cache, at, 5, softcap=3.0), (q, cache))


def test_refusals_give_a_reason() -> None:
    assert refusal(512, 64, B16) is None
    assert refusal(512, 64, torch.float64) == "no kernel for torch.float64"
    assert "exceed the kernel's 512 and 128" in str(refusal(640, 64, B16))
    assert "exceed the kernel's 128 and 128" in str(refusal(512, 64, F32))
    q, cache, at = torch.zeros(1, 4, 8), torch.zeros(1, 1, 10, 8), torch.zeros(1, dtype=torch.int64)
    for wrong, options, why in (
        ((q, cache[0], at, 5), {}, r"must be \[batch, heads, 5 \+ rope\] and its cache"),
        ((q, cache, at, 9), {}, r"must be \[batch, heads, 9 \+ rope\] and its cache"),
        ((q, torch.zeros(1, 1, 10, 16)[..., ::2], at, 5), {}, "must be contiguous"),
        ((q.half(), cache, at, 5), {}, "differ in dtype"),
        ((q, cache, at.repeat(2), 5), {}, "must be one per row"),
        ((q, cache, at, 5), {"rolling": True}, "does not hold window=None"),
    ):
        with pytest.raises(ValueError, match=why):
            latent_decode(*wrong, **options)
