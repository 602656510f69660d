"""Tiny random models of transformers, and what its `generate` finds with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill all parameters of `model` with random values whose logits are well apart."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan = parameter.shape[-1] if parameter.ndim > 1 else 9
            parameter.normal_(float("norm" in name or "ln_" in name) * 1.0, 1.5 / fan**0.5)
    return model.eval()


def searched(theirs: Any, prompt: Sequence[int], stop: Sequence[int], limit: int, **how: Any) -> list[Any]:
    """Run beam search of transformers: the tokens and score of each text, best first."""
    how = {"num_beams": how.pop("beams", 4), "num_return_sequences": how.pop("returned", 2), **how}
    with torch.inference_mode():
        found = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=list(stop) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **how,
        )
    begin = 1 if theirs.config.is_encoder_decoder else len(prompt)
    scores = found.sequences_scores.tolist() if how["num_beams"] > 1 else [None]
    texts = []
    for row, score in zip(found.sequences.tolist(), scores, strict=True):
        tokens = row[begin:]
        end = next((at + 1 for at, token in enumerate(tokens) if token in stop), len(tokens))
        texts.append((tokens[:end], score))
    return texts
