"""Sample token sequences from a model; a student trains on them in addition to real text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]


@torch.no_grad()
def sample_continuations(
    model: Any, prompts: Tensor, length: int, *, seed: int = 0, progress: Progress = lambda *_: None
) -> Tensor:
    """Return `prompts` [n, tokens], continued to [n, length] by tokens that the decoder `model` draws at temperature 1.
    `progress` is called with ("sampling", current length, `length`) before each token and at the end."""
    generated: Any = model  # a generated module, which has `new_cache`
    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache = generated.new_cache(len(prompts), length)
    sequences, unread = prompts, prompts
    while sequences.shape[1] < length:
        progress("sampling", sequences.shape[1], length)
        logits = generated(unread, cache=cache)[:, -1]
        unread = logits.float().softmax(-1).multinomial(1, generator=generator)
        sequences = torch.cat([sequences, unread], 1)
    progress("sampling", length, length)
    return sequences
