"""A prompt for the picture of a model: its tokens, attention weights and predictions."""

from __future__ import annotations

from typing import Any

from weft.backends.viz.panels import prompts
from weft.ir.errors import WeftError
from weft.ir.storage import scratch_folder

from ....model import Model


def run_prompt(model: Model, prompt: str, step: prompts.Step = lambda done, count: None) -> dict[str, Any]:
    """Return attention weights and predictions of `model` for `prompt`, as data for a page; `step` reports progress.

    Raises:
        WeftError: if the model has no tokenizer or no weights, or the prompt cannot be drawn.
    """
    from weft.backends.runtime.text.tokenizer import Tokenizer

    if model.random_init:
        raise WeftError(f"{model.description} has no trained weights, so its attention is random; use a checkpoint")
    if model.tokenizer is None:
        raise WeftError(f"{model.description} has no tokenizer to read the prompt with: draw it without --prompt")
    with scratch_folder() as folder:
        model.tokenizer(folder)
        tokenizer = Tokenizer(folder)
    return {"text": prompt, **prompts.run_prompt(model.graph, tokenizer.encode(prompt), tokenizer.decode, step)}
