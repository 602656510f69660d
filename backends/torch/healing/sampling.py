"""Texts that a model samples: what a student learns from beside real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]


@torch.no_grad()
def continued(
    model: Any, prompts: Tensor, length: int, *, seed: int = 0, progress: Progress = lambda *_: None
) -> Tensor:
    """Continue `prompts` [n, tokens] to texts [n, length] by tokens drawn from the distributions of `model`, a decoder.

    Distributions are taken as they are (temperature 1), so that texts come as often as the model holds them likely.
    """
    generated: Any = model  # a module that weft generates has caches
    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache = generated.new_cache(len(prompts), length)
    text, unread = prompts, prompts
    while text.shape[1] < length:
        progress("sampling", text.shape[1], length)
        logits = generated(unread, cache=cache)[:, -1]
        unread = logits.float().softmax(-1).multinomial(1, generator=generator)
        text = torch.cat([text, unread], 1)
    progress("sampling", length, length)
    return text
