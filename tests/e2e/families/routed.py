"""Mixtures whose routing or blocks are their own, and projections packed in their own ways."""

from __future__ import annotations

from .row import Row
from .sizes import CLASSIC, COMMON, GQA, MHA, ROPES, TIED, UNTIED

LLAMA4 = {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 72, "attention_chunk_size": 8}
PHIMOE = {"num_local_experts": 4, "router_jitter_noise": 0.2}
JETMOE = {"num_hidden_layers": 3, "kv_channels": 16, "num_key_value_heads": 2, "num_local_experts": 4}
DBRX = {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "vocab_size": 96, "bos_token_id": 1}
DBRX_EXPERTS = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
LONGCAT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 80,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 6,
    "zero_expert_num": 2,
    "moe_topk": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 64,
    "qk_head_dim": 24,
}

ROWS = {
    "llama4": Row("Llama4ForCausalLM", COMMON | GQA | UNTIED | LLAMA4 | {"num_hidden_layers": 4, "floor_scale": 5}),
    "dbrx": Row(
        "DbrxForCausalLM",
        DBRX | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4}, "ffn_config": DBRX_EXPERTS},
    ),
    "phimoe": Row("PhimoeForCausalLM", COMMON | GQA | UNTIED | PHIMOE),
    "jetmoe": Row("JetMoeForCausalLM", COMMON | JETMOE | TIED),
    "longcat": Row("LongcatFlashForCausalLM", LONGCAT),
    "diffllama": Row("DiffLlamaForCausalLM", COMMON | GQA | UNTIED),
}
ALIKE = {
    "llama4-mixed": Row(
        "Llama4ForCausalLM",
        COMMON
        | MHA
        | TIED
        | LLAMA4
        | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1], "use_qk_norm": False, "attention_bias": True},
    ),
    "dbrx-plain": Row(
        "DbrxForCausalLM",
        DBRX
        | {
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 9.0, "rope_theta": 1e4},
            "ffn_config": DBRX_EXPERTS | {"moe_normalize_expert_weights": None},
        },
    ),
    "phimoe-scaled": Row(
        "PhimoeForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | PHIMOE
        | {"attention_bias": True, "lm_head_bias": True}
        | {
            "rope_parameters": ROPES["longrope"]
            | {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 32}
        },
    ),
    "persimmon": Row("PersimmonForCausalLM", COMMON | UNTIED),
    "persimmon-plain": Row("PersimmonForCausalLM", COMMON | TIED | {"qk_layernorm": False, "hidden_act": "gelu"}),
    "codegen": Row("CodeGenForCausalLM", CLASSIC | {"rotary_dim": 8}),
    "diffllama-biases": Row("DiffLlamaForCausalLM", COMMON | MHA | TIED | {"attention_bias": True, "head_dim": 12}),
}
