"""Configs of published checkpoints with experts and states, in the words they were published in."""

from __future__ import annotations

from typing import Any

# name -> model_type, parameters, config
PUBLISHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mixtral-8x7b": ("mixtral", 46_702_792_704, {
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32000,
    }),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", 14_315_784_192, {
        "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24,
        "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21,
        "vocab_size": 151936, "hidden_act": "silu", "max_position_embeddings": 8192,
    }),
    "qwen3-30b-a3b": ("qwen3_moe", 30_532_122_624, {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "vocab_size": 151936,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "rope_theta": 1e6, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None,
        "max_position_embeddings": 40960,
    }),
    "olmoe-1b-7b": ("olmoe", 6_919_161_856, {
        "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "clip_qkv": None, "rope_theta": 10000.0, "rope_scaling": None, "vocab_size": 50304, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
    }),
    "granite-3.0-1b-a400m": ("granitemoe", 1_334_628_352, {
        "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8, "tie_word_embeddings": True,
        "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
        "logits_scaling": 6.0, "rope_theta": 10000, "rope_scaling": None, "vocab_size": 49155,
        "max_position_embeddings": 4096,
    }),
    "gpt-oss-20b": ("gpt_oss", 20_914_757_184, {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "initial_context_length": 4096, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "swiglu_limit": 7.0,
        "attention_bias": True, "rope_theta": 150000, "vocab_size": 201088, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    }),
    "deepseek-v2-lite": ("deepseek_v2", 15_706_484_224, {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax",
        "routed_scaling_factor": 1.0, "attention_bias": False, "vocab_size": 102400, "max_position_embeddings": 163840,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }),
    "deepseek-v3": ("deepseek_v3", 671_026_404_352, {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8,
        "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }),
    "mamba-130m": ("mamba", 129_135_360, {
        "hidden_size": 768, "state_size": 16, "num_hidden_layers": 24, "intermediate_size": 1536, "conv_kernel": 4,
        "time_step_rank": 48, "use_bias": False, "use_conv_bias": True, "vocab_size": 50280, "expand": 2,
        "layer_norm_epsilon": 1e-05, "d_inner": 1536, "d_model": 768, "n_layer": 24, "hidden_act": "silu",
    }),
    "falcon-mamba-7b": ("falcon_mamba", 7_272_665_088, {
        "hidden_size": 4096, "state_size": 16, "num_hidden_layers": 64, "intermediate_size": 8192, "conv_kernel": 4,
        "time_step_rank": 256, "expand": 16, "vocab_size": 65024, "tie_word_embeddings": False, "hidden_act": "silu",
        "mixer_rms_eps": 1e-06, "layer_norm_epsilon": 1e-05,
    }),
    "mamba-codestral-7b": ("mamba2", 7_285_403_648, {
        "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "n_groups": 8, "expand": 2, "chunk_size": 256, "vocab_size": 32768, "tie_word_embeddings": False,
        "hidden_act": "silu", "time_step_limit": [0.0, float("inf")],
    }),
    "jamba-v0.1": ("jamba", 51_570_323_328, {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "attn_layer_offset": 4,
        "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "vocab_size": 65536, "tie_word_embeddings": False, "sliding_window": None, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 262144,
    }),
    "granite-4.0-h-tiny": ("granitemoehybrid", 6_939_037_248, {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_hidden_layers": 40,
        "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6,
        "layer_types": [*(["mamba"] * 5), "attention", *(["mamba"] * 4)] * 4, "position_embedding_type": "nope",
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "embedding_multiplier": 12, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
        "logits_scaling": 6, "rms_norm_eps": 1e-05, "vocab_size": 100352, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "rope_theta": 10000,
    }),
    "bamba-9b": ("bamba", 9_780_235_392, {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "mamba_n_heads": 128,
        "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "rope_theta": 10000.0,
        "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 262144,
    }),
}  # fmt: skip
