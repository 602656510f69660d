"""Tiny Llamas with a tokenizer of letters, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [*"abcdefghijklmnopqrstuvwxyz", ".", "?", "<unk>"]


TEXT = "the quick brown fox jumps over a lazy dog . does it see the dog ? it does not ."


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_llama(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    net = transformers.LlamaForCausalLM(config)
    net.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
