"""Decoding of many answers together: they join and leave a batch between steps, each with its own sampling and limits.

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

    Answers join a `RunningBatch` while others decode, and make room after `quantum` tokens where more wait; answers of
    an encoder-decoder run as a `StaticBatch`, from beginning to end.
    """
    if decoder.start is not None:
        return StaticBatch(decoder, most)
    return RunningBatch(decoder, most, quantum)
