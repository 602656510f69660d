"""Llama and its relatives."""

from __future__ import annotations

from .row import Row
from .sizes import BORDER, COMMON, GQA, GRANITE, MHA, ROPES, SLIDING, TIED, UNTIED, WINDOW

ROWS = {
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
    "olmo": Row("OlmoForCausalLM", COMMON | GQA | UNTIED),
    "olmo-clipped": Row("OlmoForCausalLM", COMMON | MHA | TIED | {"clip_qkv": 1.0, "attention_bias": True}),
    "granite": Row("GraniteForCausalLM", COMMON | GQA | TIED | GRANITE),
    "granite-biases": Row("GraniteForCausalLM", COMMON | MHA | UNTIED | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": Row("SmolLM3ForCausalLM", COMMON | GQA | TIED | {"no_rope_layer_interval": 2}),
    "smollm3-window": Row(
        "SmolLM3ForCausalLM",
        COMMON | MHA | UNTIED | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "phi3": Row("Phi3ForCausalLM", COMMON | GQA | UNTIED | {"sliding_window": WINDOW}),
    "phi3-longrope": Row(
        "Phi3ForCausalLM",
        COMMON | MHA | TIED | BORDER | {"rope_parameters": ROPES["longrope"]},
    ),
    "starcoder2": Row("Starcoder2ForCausalLM", COMMON | GQA | TIED | {"sliding_window": WINDOW}),
    "starcoder2-plain": Row("Starcoder2ForCausalLM", COMMON | MHA | UNTIED | {"use_bias": False}),
    "stablelm": Row("StableLmForCausalLM", COMMON | GQA | UNTIED | {"use_qkv_bias": True}),
    "stablelm-parallel": Row(
        "StableLmForCausalLM", COMMON | GQA | TIED | {"use_parallel_residual": True, "qk_layernorm": True}
    ),
    "cohere": Row("CohereForCausalLM", COMMON | GQA | TIED),
    "cohere-norms": Row("CohereForCausalLM", COMMON | GQA | UNTIED | {"use_qk_norm": True, "attention_bias": True}),
    **{
        f"llama-{name}": Row(
            "LlamaForCausalLM",
            COMMON
            | GQA
            | UNTIED
            | {"rope_parameters": rope, "max_position_embeddings": 16 if name == "dynamic" else 64},
        )
        for name, rope in ROPES.items()
    },
}
