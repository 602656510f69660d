"""Batched decoding: answers join and leave a batch between steps, each with its own sampling options and limits.

`new_batch` picks the kind of batch that a decoder allows. Never here: queues of requests, threads, HTTP.
"""

from __future__ import annotations

from typing import Any

from ..core.decoder import Decoder
from .batch import Batch as Batch
from .running import RunningBatch
from .static import StaticBatch


def new_batch(decoder: Decoder[Any], most: int, quantum: int = 256) -> Batch:
    """Return an empty batch of at most `most` rows of `decoder`.

    Decoders get a `RunningBatch`: answers join while others decode, and give up their row after `quantum` tokens if
    others wait. Encoder-decoders get a `StaticBatch`, which runs from beginning to end.
    """
    if decoder.start is not None:
        return StaticBatch(decoder, most)
    return RunningBatch(decoder, most, quantum)
