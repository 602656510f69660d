"""The running softmax of kernels, and softmax attention in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.online_softmax import (
    HOPPER,
    attend,
    check_heads,
    scale_scores,
    shared_memory,
    update_softmax,
)


@jit
def scores_kernel(x, y, scale, SOFTCAP: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(y + at, scale_scores(tl.load(x + at), scale, SOFTCAP))


@jit
def softmax_kernel(scores, values, out, blocks):
    row, key, column = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, 16)
    m = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, 16], tl.float32)
    for block in range(0, blocks):
        score = tl.load(scores + row[:, None] * 32 + block * 16 + key[None, :])
        value = tl.load(values + (block * 16 + key)[:, None] * 16 + column[None, :])
        m, total, acc = update_softmax(m, total, acc, score, value)
    tl.store(out + row[:, None] * 16 + column[None, :], acc / tl.where(total == 0.0, 1.0, total)[:, None])


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_scores_are_scaled_capped_and_in_base_2(device: torch.device, softcap: float) -> None:
    x = torch.linspace(-20, 20, 8, device=device)
    y = torch.empty_like(x)
    scores_kernel[(1,)](x, y, 0.5, SOFTCAP=softcap)
    wanted = x.double() * 0.5
    wanted = softcap * torch.tanh(wanted / softcap) if softcap else wanted
    torch.testing.assert_close(y.double(), wanted / math.log(2), rtol=1e-5, atol=1e-5)


def test_blocks_of_keys_add_up_to_one_softmax(device: torch.device) -> None:
    """Row 0 sees nothing in the first block, row 1 nothing at all."""
    generator = torch.Generator().manual_seed(0)
    scores, values = 9 * torch.randn(16, 32, generator=generator), torch.randn(32, 16, generator=generator)
    scores[0, :16] = scores[1] = -torch.inf
    out = torch.empty(16, 16, device=device)
    softmax_kernel[(1,)](scores.to(device), values.to(device), out, 2)
    wanted = torch.softmax(scores * math.log(2), 1).nan_to_num(0) @ values
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=1e-5)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seq", [1, 3])
def test_attention_agrees_with_torch(seq: int) -> None:
    q, k, v = drawn(2, 4, seq, 8), drawn(2, 2, 5, 8, seed=1), drawn(2, 2, 5, 6, seed=2)
    seen = drawn(2, 1, seq, 5, seed=3) > -0.5
    seen[..., 0] = True
    bias = drawn(4, seq, 5, seed=4)
    for options, mask in (({}, seen), ({"bias": bias}, bias.masked_fill(~seen, -torch.inf))):
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(attend(q, k, v, seen, None, **options), wanted)


@pytest.mark.parametrize("options", [{}, {"sinks": torch.zeros(2)}, {"softcap": 2.0}])
def test_queries_without_visible_keys_yield_zero(options: dict[str, Any]) -> None:
    q, k, v = (drawn(1, 2, 3, 4, seed=i) for i in range(3))
    seen = torch.tensor([[True], [False], [True]]).expand(1, 1, 3, 3)
    y = attend(q, k, v, seen, None, **options)
    assert not y[:, :, 1].any() and y[:, :, 0].all()


def test_a_sink_takes_weight_and_a_cap_limits_scores() -> None:
    q, k = torch.tensor([[[[100.0]]]]), torch.tensor([[[[1.0], [1.0], [1.0]]]])
    assert attend(0 * q, k, 8 * k, None, 1.0, sinks=torch.zeros(1)).item() == pytest.approx(6.0)
    unlike = torch.tensor([[[[1.0], [0.0]]]])
    weight = attend(q, unlike, unlike, None, 1.0, softcap=1.0).item()  # scores 1 and 0
    assert weight == pytest.approx(math.e / (math.e + 1))


def test_heads_that_do_not_fit_are_refused() -> None:
    q, k = torch.zeros(1, 4, 8), torch.zeros(1, 2, 5, 8)
    check_heads(q, k, k, 3, "[batch, heads, d]")
    for given, message in (
        ((q, k[0], k), r"are no \[batch, heads, d\]"),
        ((q, k[..., :4], k), r"are no \[batch, heads, d\]"),
        ((q[:, :3], k, k), "3 query heads are no"),
        ((q.half(), k, k), "differ in dtype"),
    ):
        with pytest.raises(ValueError, match=message.replace("are no", "(are no|are not)")):
            check_heads(*given, 3, "[batch, heads, d]")
    check_heads(q, k.byte(), k.byte(), 3, "", coded=True)


def test_a_cpu_plays_a_gpu_with_the_shared_memory_of_an_h200() -> None:
    assert shared_memory(torch.zeros(1)) == HOPPER == 227 * 1024
