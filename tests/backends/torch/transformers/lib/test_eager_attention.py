"""Softmax attention as `attn_implementation="eager"` computes it, against SDPA of PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from weft.backends.torch.transformers.lib.eager_attention import (
    SoftmaxAttention,
    eager_attention,
    eager_scored_attention,
    key_distances,
)


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))


MASK = torch.full((5, 5), -torch.inf).triu(1)


@pytest.mark.parametrize("attend", [eager_attention, eager_scored_attention])
def test_grouped_attention_equals_sdpa(attend: object, qkv: tuple[Tensor, ...]) -> None:
    assert callable(attend)
    q, k, v = qkv
    x, weights = attend(nn.Module(), q, k, v, MASK, 0.3)
    want = F.scaled_dot_product_attention(q, k, v, MASK, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(x, want.transpose(1, 2))
    assert not weights.triu(1).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))


def test_soft_cap_bias_and_sinks(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    bias, sinks = torch.randn(1, 4, 5, 5), torch.randn(4)
    x, weights = eager_scored_attention(nn.Module(), q, k, v, None, 0.5, 2.0, sinks, bias)
    scores = 2.0 * (q @ k.repeat_interleave(2, 1).mT * 0.5 / 2.0).tanh() + bias
    total = scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None]
    torch.testing.assert_close(weights, scores.exp() / total)
    torch.testing.assert_close(x, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))


def test_module_attends_to_cached_keys(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    module = SoftmaxAttention(SimpleNamespace(_attn_implementation="eager"), 0, 2, 0.3)
    cache = DynamicCache()
    module(q[:, :, :3], k[:, :, :3], v[:, :, :3], None, cache)
    x = module(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], None, cache)
    want = F.scaled_dot_product_attention(q[:, :, 3:], k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(x, want.transpose(1, 2).flatten(2))


def test_distances_count_cached_keys() -> None:
    x = torch.zeros(1, 2, 4)
    assert key_distances(x).tolist() == [[[0, 1], [-1, 0]]]
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    assert key_distances(x, cache).tolist() == [[[-3, -2, -1, 0, 1], [-4, -3, -2, -1, 0]]]
