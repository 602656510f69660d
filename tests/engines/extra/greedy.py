"""Tokens that a version of transformers generates greedily: ``python greedy.py < jobs.json > tokens.json``.

A job is a folder and the ids of a prompt, how many tokens to generate, and whether continuous batching takes the model.
Each way of generating keeps what it computed in another cache.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers


def answers(folder: str, prompt: list[int], new: int, batched: bool) -> dict[str, list[int]]:
    """Return the tokens after `prompt`, or those that answer it, by each way of generating."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    both = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    start = 1 if both else len(prompt)
    greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    ways: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "none": {"use_cache": False},
    }
    made = {
        name: model.generate(torch.tensor([prompt]), **greedy, **way)[0, start:].tolist() for name, way in ways.items()
    }
    if batched:
        model.set_attn_implementation("sdpa")
        room = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)
        settings = transformers.GenerationConfig(**{**greedy, "eos_token_id": -1})
        (answer,) = model.generate_batch([prompt], settings, room).values()
        made["pages"] = answer.generated_tokens
    return made


if __name__ == "__main__":
    found = {name: answers(**job) for name, job in json.load(sys.stdin).items()}
    print(json.dumps({"version": transformers.__version__, "tokens": found}))
