"""Caches of decoders with cross-attention: keys and values of the encoder's output, and of the decoder's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """Return the self-attention part of a cache; a cache without cross-attention is returned as it is."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def update_cross_cache(
    cache: EncoderDecoderCache | None, layer_idx: int, make: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return (keys, values) of the source [batch, kv_heads, source, width]: cached, or from `make` and then cached."""
    if cache is None:
        return make()
    if not cache.is_updated.get(layer_idx):
        cache.is_updated[layer_idx] = True
        k, v = cache.cross_attention_cache.update(*make(), layer_idx)
        return k, v
    layer = cache.cross_attention_cache.layers[layer_idx]
    return layer.keys, layer.values


def shift_right(labels: Tensor, start: int | None, pad: int | None) -> Tensor:
    """Return the tokens that a decoder reads to predict `labels` [batch, seq]: `start`, then all but the last label;
    the value -100, which no loss counts, becomes `pad` (None: 0).

    Raises:
        ValueError: if `start` is None.
    """
    if start is None:
        raise ValueError("give decoder_input_ids: the config has no decoder_start_token_id")
    before = torch.full_like(labels[:, :1], start)
    shifted = torch.cat((before, labels[:, :-1]), 1)
    return shifted.masked_fill(shifted == -100, pad or 0)


def total_loss(*outputs: Any) -> Tensor | None:
    """Return the sum of the router losses (mean of each `aux_loss`) of `outputs`; None if none has one."""
    known = [loss.mean() for made in outputs if (loss := getattr(made, "aux_loss", None)) is not None]
    return sum(known[1:], known[0]) if known else None
