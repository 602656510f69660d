"""Norms of query and key heads, and their storage in tensors and caches."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.shared.float8 import to_float8
from weft.backends.torch.kernels.shared.heads import norm_pairs, store_head
from weft.backends.torch.kernels.shared.launch import jit, tl

HEADS, KV_HEADS, WIDTH, CAPACITY = 2, 2, 8, 4
SCALES = (0.5, 0.25), (2.0, 1.0)  # of keys and of values, by head


@jit
def store_kernel(
    x, cos, sin, q, k_cache, v_cache, k_scale, v_scale, positions, M, seq, heads, kv_heads, capacity, keep,
    stride_b, stride_h, stride_t, ROLLING: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    m, pair = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    there = m < M
    at = (m * (heads + 2 * kv_heads) + head) * 8 + 2 * pair
    a, b = tl.load(x + at, mask=there, other=0.0), tl.load(x + at + 1, mask=there, other=0.0)
    c = tl.load(cos + m * 4 + pair, mask=there, other=1.0)
    s = tl.load(sin + m * 4 + pair, mask=there, other=0.0)
    store_head(
        a, b, c, s, q, k_cache, v_cache, k_scale, v_scale, positions, m, pair, head, M, seq, heads, kv_heads,
        capacity, keep, stride_b, stride_h, stride_t, 8, 8, True, ROLLING,
    )  # fmt: skip


@jit
def norm_kernel(x, y, q_gain, k_gain, eps):
    head = tl.program_id(0)
    pair = tl.arange(0, 4)[None, :]
    first, second = 2 * pair, 2 * pair + 1
    a, b = tl.load(x + first), tl.load(x + second)
    a, b = norm_pairs(a, b, first, second, pair, q_gain, k_gain, head, 1, eps, 8)
    tl.store(y + head * 8 + first, a)
    tl.store(y + head * 8 + second, b)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the adjacent pairs of x [tokens, heads, 8]."""
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("coded", [False, True])
def test_heads_are_rotated_and_stored_at_their_positions(device: torch.device, rolling: bool, coded: bool) -> None:
    """Three tokens of one sequence; the last has no slot in a cache of 4 that does not roll."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, HEADS + 2 * KV_HEADS, WIDTH, generator=generator)
    angle = torch.rand(3, 4, generator=generator)
    positions = torch.tensor([1, 3, 5])
    q = torch.zeros(3, HEADS, WIDTH, device=device)
    kind = torch.float8_e4m3fn if coded else torch.float32
    caches = [torch.zeros(1, KV_HEADS, CAPACITY, WIDTH, device=device).to(kind) for _ in "kv"]
    scales = [torch.tensor(pair, device=device) for pair in SCALES] if coded else [None, None]
    strides = caches[0].stride()[:3]
    store_kernel[(HEADS + 2 * KV_HEADS,)](
        *(t.to(device) for t in (x, angle.cos(), angle.sin())), q, *caches, *scales, positions.to(device),
        3, 3, HEADS, KV_HEADS, CAPACITY, 1, *strides, ROLLING=rolling,
    )  # fmt: skip
    wanted = rotated(x, angle.cos(), angle.sin())
    torch.testing.assert_close(q.cpu(), wanted[:, :HEADS])
    slots = {1: 0, 3: 1, 2: 2} if rolling else {1: 0, 3: 1}  # slot → token; position 5 rolls to slot 1 + 4 % 3
    for part, cache in enumerate(caches):
        for head in range(KV_HEADS):
            rows = wanted[:, HEADS + part * KV_HEADS + head]
            for slot, held in enumerate(cache.float().cpu()[0, head]):
                token = rows[slots[slot]] if slot in slots else torch.zeros(WIDTH)
                if coded:
                    token = to_float8(token / SCALES[part][head]).float()
                torch.testing.assert_close(held, token, rtol=0.13 if coded else 1e-5, atol=1e-2 if coded else 1e-6)


@pytest.mark.parametrize("gains", [False, True])
def test_queries_and_keys_have_gains_of_their_own(device: torch.device, gains: bool) -> None:
    x, q_gain, k_gain = (torch.randn(8, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3))
    y = torch.empty(2, 8, device=device)
    norm_kernel[(2,)](x, y, *((q_gain, k_gain) if gains else (None, None)), 0.1)
    normed = x / (x.square().mean() + 0.1).sqrt()
    torch.testing.assert_close(y, torch.stack((normed * q_gain, normed * k_gain)) if gains else normed.expand(2, 8))
