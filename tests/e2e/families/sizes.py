"""Sizes that the configs of several families share."""

from __future__ import annotations

from typing import Any

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
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
# Scalings from a context of 16 to the length of the texts and beyond.
BORDER = {"original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **BORDER},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BORDER},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "factor": 4.0,
        **BORDER,
    },
}
LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"]
TOP2 = {"num_experts_per_tok": 2}
STATES = {
    **{k: COMMON[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **{k: COMMON[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    "state_size": 8,
}
# Bamba and Mamba-2: 8 heads of 16 channels, chunks shorter than the texts.
HEADED = {"num_heads": 8, "head_dim": 16, "chunk_size": 8}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
