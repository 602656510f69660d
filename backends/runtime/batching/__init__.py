"""Batched decoding: answers join and leave a batch between steps, each with its own sampling options and limits.

`new_batch` picks the kind of batch that a decoder allows. Never here: queues of requests, threads, HTTP.
"""

from __future__ import annotations

from typing import Any

from ..core.decoder import CachedDecoder
from ..core.prefixes import PrefixCache
from .batch import Batch as Batch
from .batch import StaticBatch
from .running import RunningBatch


def new_batch(
    decoder: CachedDecoder[Any],
    most: int,
    quantum: int = 256,
    prefixes: PrefixCache | None = None,
    prompt_lookup: int = 0,
) -> Batch:
    """Return an empty batch that decodes at most `most` answers of `decoder` at a time. For an encoder-decoder it is a
    `StaticBatch`: the answers of a batch begin together. Otherwise it is a `RunningBatch`: answers join while others
    decode, and after `quantum` tokens an answer gives up its row if another answer waits. Prompts begin with the caches
    that `prefixes` (None: none) has for them. A greedy answer that decodes alone has drafts of up to `prompt_lookup`
    tokens, while they save time."""
    if decoder.start is not None:
        return StaticBatch(decoder, most)
    return RunningBatch(decoder, most, quantum, prefixes=prefixes, prompt_lookup=prompt_lookup)
