"""Caches of decoders with cross-attention, and tokens that a decoder reads in training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from weft.backends.torch.transformers.lib.cross_attention_caches import (
    self_attention_cache,
    shift_right,
    total_loss,
    update_cross_cache,
)


def test_keys_of_the_source_are_computed_once() -> None:
    calls = []

    def make() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)

    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for _ in range(3):
        k, v = update_cross_cache(cache, 0, make)
        assert torch.equal(k, torch.ones(1, 2, 3, 4)) and torch.equal(v, torch.zeros(1, 2, 3, 4))
    assert len(calls) == 1 and cache.self_attention_cache.get_seq_length() == 0
    update_cross_cache(None, 0, make)
    assert len(calls) == 2


def test_self_attention_part_of_a_cache() -> None:
    own = DynamicCache()
    assert self_attention_cache(EncoderDecoderCache(own, DynamicCache())) is own
    assert self_attention_cache(own) is own and self_attention_cache(None) is None


def test_labels_are_shifted_behind_the_start_token() -> None:
    labels = torch.tensor([[5, 6, -100, -100]])
    assert shift_right(labels, 2, 1).tolist() == [[2, 5, 6, 1]]
    assert shift_right(labels, 2, None).tolist() == [[2, 5, 6, 0]]
    with pytest.raises(ValueError, match="give decoder_input_ids: the config has no decoder_start_token_id"):
        shift_right(labels, None, 1)


def test_router_losses_are_summed() -> None:
    encoder, decoder = SimpleNamespace(aux_loss=torch.tensor([1.0, 3.0])), SimpleNamespace(aux_loss=torch.tensor(0.5))
    assert total_loss(encoder, decoder) == 2.5
    assert total_loss(SimpleNamespace(), SimpleNamespace(aux_loss=None)) is None
