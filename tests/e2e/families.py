"""The tiny models of the table test: a row says the transformers class, its config, and how its reference runs.

Every family has rows for each arrangement its configs can ask for. All parameters are drawn anew: vectors (norms,
biases, sinks) around their initial values, matrices (routers too) with a deviation of 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

LENGTH, WINDOW, VOCAB = 24, 8, 96

# What most configs call their sizes.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The names of GPT-2's time.
CLASSIC = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA, MHA = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}


@dataclass(frozen=True)
class Row:
    """A tiny model: `model` is a class of transformers, `config` the arguments of its config.

    `stepwise` runs the reference in the same chunks as ours, where its numbers depend on them (rotary frequencies that
    follow the length of the text).
    """

    model: str
    config: dict[str, Any]
    stepwise: bool = False

    @property
    def family(self) -> str:
        """The model_type."""
        return str(getattr(transformers, self.model).config_class.model_type)

    @property
    def is_decoder(self) -> bool:
        """Whether it predicts the next token."""
        return self.model.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def is_encoder(self) -> bool:
        """Whether it gives every token a vector."""
        return self.model.endswith("Model") and not self.is_decoder

    def save(self, folder: Path, **options: Any) -> torch.nn.Module:
        """The model, its parameters drawn anew, also written to `folder` as a checkpoint in several files."""
        kind = getattr(transformers, self.model)
        config = kind.config_class(**self.config)
        config._attn_implementation = "eager"
        model = randomized(kind(config, **options))
        model.save_pretrained(folder, max_shard_size="100KB")
        return model


ROWS: dict[str, Row] = {
    "llama-gqa-tied": Row("LlamaForCausalLM", COMMON | GQA | TIED),
    "llama-mha-biases": Row("LlamaForCausalLM", COMMON | MHA | UNTIED | {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-head": Row("LlamaForCausalLM", COMMON | GQA | UNTIED | {"head_dim": 12}),
    "mistral-gqa": Row("MistralForCausalLM", COMMON | GQA | UNTIED | {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-tied": Row("MistralForCausalLM", COMMON | MHA | TIED | {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2-gqa-tied": Row("Qwen2ForCausalLM", COMMON | GQA | TIED),
    "qwen2-window-mha": Row("Qwen2ForCausalLM", COMMON | MHA | UNTIED | SLIDING),
    "qwen3-gqa": Row("Qwen3ForCausalLM", COMMON | GQA | UNTIED | {"head_dim": 32}),
    "qwen3-window": Row("Qwen3ForCausalLM", COMMON | MHA | TIED | SLIDING | {"head_dim": 16, "attention_bias": True}),
    "olmo2-gqa": Row("Olmo2ForCausalLM", COMMON | GQA | UNTIED),
    "gpt2-tied": Row("GPT2LMHeadModel", CLASSIC),
    "gpt2-untied": Row("GPT2LMHeadModel", CLASSIC | UNTIED),
    "bert": Row("BertModel", COMMON | {"type_vocab_size": 2, "hidden_act": "gelu"}),
}


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """`model`, its parameters and learned buffers drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.state_dict().values():
        if p.is_floating_point():
            noise = 0.2 * torch.randn(p.shape, generator=generator)
            p.copy_(p + noise if p.ndim == 1 else noise)
    return model.eval()


def reference(model: torch.nn.Module, ids: np.ndarray, chunk: int | None = None) -> np.ndarray:
    """Logits [batch, seq, vocab] of token ids [batch, seq] in transformers, in one pass or in chunks."""
    cache, found = None, []
    with torch.inference_mode():
        for start in range(0, ids.shape[1], chunk or ids.shape[1]):
            part = torch.from_numpy(ids[:, start : start + (chunk or ids.shape[1])])
            made = model(part, past_key_values=cache, use_cache=chunk is not None)
            cache = made.past_key_values if chunk else None
            found.append(made.logits.numpy())
    return np.concatenate(found, 1)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest value (at least 1)."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
