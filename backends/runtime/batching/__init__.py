"""Batched decoding: answers join and leave a batch between steps, each with its own sampling options and limits.

`new_batch` picks the kind of batch that a decoder allows. Never here: queues of requests, threads, HTTP.
"""

from __future__ import annotations

from typing import Any

from ..core.decoder import CachedDecoder
from .batch import Batch as Batch
from .running import RunningBatch
from .static import StaticBatch


def new_batch(decoder: CachedDecoder[Any], most: int, quantum: int = 256) -> Batch:
    """Return an empty batch for `decoder` that decodes at most `most` answers at a time.

    It is a `RunningBatch` for a decoder: answers join while others decode; after `quantum` tokens an answer gives up
    its row if another one waits. It is a `StaticBatch` for an encoder-decoder: its answers begin together.
    """
    if decoder.start is not None:
        return StaticBatch(decoder, most)
    return RunningBatch(decoder, most, quantum)
