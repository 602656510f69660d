"""Models with embeddings for every layer, and layers that share keys and values."""

from __future__ import annotations

from typing import Any

from .row import Row
from .sizes import COMMON, GQA, MHA, UNTIED, WINDOW

GEMMA4: dict[str, Any] = COMMON | {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 96,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
}

GEMMA3N: dict[str, Any] = COMMON | {
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 80,
    "laurel_rank": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}

ROWS = {
    "gemma3n": Row(
        "Gemma3nForCausalLM",
        GEMMA3N
        | GQA
        | {"activation_sparsity_pattern": [0.8, 0.0], "altup_num_inputs": 2}
        | {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4": Row("Gemma4ForCausalLM", GEMMA4 | GQA | {"num_kv_shared_layers": 2, "final_logit_softcapping": 9.0}),
    "gemma4-experts": Row(
        "Gemma4ForCausalLM",
        GEMMA4
        | MHA
        | UNTIED
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
    ),
}
ALIKE = {
    "gemma3n-active": Row(
        "Gemma3nForCausalLM",
        GEMMA3N
        | MHA
        | {"activation_sparsity_pattern": None, "altup_active_idx": 1, "altup_correct_scale": False}
        | {"attention_bias": True},
    ),
    "gemma4-wide": Row(
        "Gemma4ForCausalLM",
        GEMMA4 | MHA | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_bias": True},
    ),
}
