"""Caches of decoders that read a source: what an encoder made of it, beside their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache


def own(cache: Cache | None) -> Cache | None:
    """The part of a cache that holds what a decoder keeps of its own text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def crossed(
    cache: EncoderDecoderCache | None, layer_idx: int, make: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Keys and values of a source, [batch, kv_heads, source, width]: made by the first call of a text, and kept."""
    if cache is None:
        return make()
    if not cache.is_updated.get(layer_idx):
        cache.is_updated[layer_idx] = True
        k, v = cache.cross_attention_cache.update(*make(), layer_idx)
        return k, v
    layer = cache.cross_attention_cache.layers[layer_idx]
    return layer.keys, layer.values


def shifted_right(labels: Tensor, start: int | None, pad: int | None) -> Tensor:
    """The tokens that a decoder reads to predict `labels` [batch, seq]: a start token, then all but the last; -100,
    which no loss counts, is read as padding.

    Raises:
        ValueError: if no token is known to start with.
    """
    if start is None:
        raise ValueError("give decoder_input_ids: the config has no decoder_start_token_id")
    before = torch.full_like(labels[:, :1], start)
    shifted = torch.cat((before, labels[:, :-1]), 1)
    return shifted.masked_fill(shifted == -100, pad or 0)


def total_loss(*outputs: Any) -> Tensor | None:
    """The sum of the losses of the routers of an encoder, one for each row, and of a decoder; None if none has any."""
    known = [loss.mean() for made in outputs if (loss := getattr(made, "aux_loss", None)) is not None]
    return sum(known[1:], known[0]) if known else None
