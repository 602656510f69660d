"""Tiny models with a head for a task, and their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .families import randomized

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "far",
    "away",
    "who",
    "what",
    "where",
    "good",
    "bad",
    "very",
    "not",
    "is",
    "was",
    "it",
    "yes",
    "no",
    ",",
    ".",
    "?",
    "!",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT |= {"max_position_embeddings": 32, "pad_token_id": 0}


def tokenizer(**more: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with the special tokens and token types of BERT."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    known = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=fast, model_input_names=known, model_max_length=32, **names, **more)


def save(folder: Path, kind: str, config: dict[str, Any] | None = None, **more: Any) -> torch.nn.Module:
    """A model of class `kind`, its parameters drawn anew, saved with the tokenizer in `folder`."""
    made = getattr(transformers, kind)
    model = randomized(made(made.config_class(**{**(BERT if config is None else config), **more})))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model
