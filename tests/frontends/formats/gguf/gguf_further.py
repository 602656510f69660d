"""Further tiny Hugging Face models, dense ones and mixtures, with the metadata of llama.cpp's converter."""

from __future__ import annotations

from typing import Any

from .gguf_sparse import DEEPSEEK, EXPERTS, GROUPS, LATENT, SCALED, TOP2, USED

LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
MHA = {"attention.head_count_kv": 4}
GQA = {"num_key_value_heads": GROUPS}
HEAD16 = GQA | {"head_dim": 16}
LONG_HEADS = {"attention.key_length": 16, "rope.dimension_count": 16}
RMS6 = {"rms_norm_eps": 1e-6}
LOCAL = {"attention.sliding_window": 8}
FOUR = {"num_hidden_layers": 4}  # of which the last is global
SIGMOID = USED | {"expert_feed_forward_length": 24, "expert_gating_func": 2}
DENSE_FIRST = SIGMOID | {"leading_dense_block_count": 1, "expert_group_count": 1, "expert_group_used_count": 1}
ROUTED = HEAD16 | RMS6 | {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0}
MHA_HEADS = {"num_key_value_heads": 4}
GLM_LITE = ["dense", "sparse", "sparse"]
SCALED_WIDE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
T5 = {
    **{"num_decoder_layers": 2, "d_kv": 16, "d_ff": 48, "relative_attention_num_buckets": 8, "n_positions": 64},
    **{"decoder_start_token_id": 0, "eos_token_id": 5},
}
BUCKETS = {
    **{"attention.key_length": 16, "attention.value_length": 16, "attention.relative_buckets_count": 8},
    **{"decoder_block_count": 2, "decoder_start_token_id": 0},
}
# architecture -> model_type, config, metadata
FURTHER: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "arcee": [("arcee", GQA | RMS6, {"rope.dimension_count": 8})],
    "apertus": [("apertus", GQA | RMS6 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {})],
    "seed_oss": [("seed_oss", HEAD16 | RMS6, LONG_HEADS)],
    "glm4": [
        (
            "glm4",
            HEAD16 | RMS6 | {"attention_bias": True},
            LONG_HEADS | {"rope.dimension_count": 8},
        )
    ],
    "exaone4": [
        (
            "exaone4",
            GQA | RMS6 | FOUR | {"sliding_window": 8},
            LOCAL | {"block_count": 4, "attention.sliding_window_pattern": [True, True, True, False]},
        ),
        ("exaone4", GQA | RMS6 | {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {}),
    ],
    "hunyuan-dense": [("hunyuan_v1_dense", HEAD16 | RMS6, LONG_HEADS)],
    "ernie4_5": [
        ("ernie4_5", HEAD16 | RMS6 | {"use_bias": bias}, LONG_HEADS | {"rope.freq_base": 5e5}) for bias in (False, True)
    ],
    "nemotron": [("nemotron", GQA, LAYER_NORM | {"rope.dimension_count": 4})],
    "cohere2": [
        (
            "cohere2",
            GQA | FOUR | {"sliding_window": 8, "logit_scale": 0.25},
            LAYER_NORM | LOCAL | {"block_count": 4, "logit_scale": 0.25, "rope.dimension_count": 8},
        )
    ],
    "dots1": [
        (
            "dots1",
            ROUTED | {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
            LONG_HEADS
            | DENSE_FIRST
            | {"expert_shared_count": 2, "expert_weights_scale": 2.5, "expert_weights_norm": False},
        )
    ],
    "glm4moe": [
        (
            "glm4_moe",
            ROUTED | {"use_qk_norm": normed, "attention_bias": True, "first_k_dense_replace": 1},
            LONG_HEADS
            | DENSE_FIRST
            | {"rope.dimension_count": 8, "expert_shared_count": 1}
            | {"expert_weights_scale": 1.0, "expert_weights_norm": True},
        )
        for normed in (True, False)
    ]
    + [
        (
            "solar_open",
            ROUTED | {"n_shared_experts": 1},
            LONG_HEADS
            | SIGMOID
            | {"expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True}
            | {"leading_dense_block_count": 0, "rope.freq_base": 1e6},
        )
    ],
    "exaone-moe": [
        (
            "exaone_moe",
            HEAD16
            | RMS6
            | FOUR
            | {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 8}
            | {"num_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
            LONG_HEADS
            | DENSE_FIRST
            | LOCAL
            | {"block_count": 4, "attention.sliding_window_pattern": [True, True, True, False]}
            | {"expert_shared_count": 2, "expert_shared_feed_forward_length": 48}
            | {"expert_weights_scale": 2.5, "expert_weights_norm": True, "rope.scaling.type": "none"},
        )
    ],
    "afmoe": [
        (
            "afmoe",
            HEAD16
            | RMS6
            | FOUR
            | {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 8}
            | {"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.0, "mup_enabled": True},
            LONG_HEADS
            | DENSE_FIRST
            | LOCAL
            | {"block_count": 4, "expert_shared_count": 1, "expert_weights_scale": 2.0, "expert_weights_norm": True},
        )
    ],
    "hunyuan-moe": [
        (
            "hunyuan_v1_moe",
            HEAD16 | RMS6 | {"num_experts": EXPERTS, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3},
            LONG_HEADS
            | USED
            | {"expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 48, "expert_shared_count": 1},
        )
    ],
    "minimax-m2": [
        (
            "minimax_m2",
            HEAD16 | RMS6 | TOP2 | {"num_local_experts": EXPERTS, "rotary_dim": 8},
            LONG_HEADS | SIGMOID | {"expert_feed_forward_length": 48, "rope.dimension_count": 8, "rope.freq_base": 5e6},
        )
    ],
    "ernie4_5-moe": [
        (
            "ernie4_5_moe",
            GQA
            | RMS6
            | {"intermediate_size": 96, "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 24}
            | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1},
            USED
            | {"feed_forward_length": 96, "expert_feed_forward_length": 24, "expert_shared_count": 2}
            | {"expert_shared_feed_forward_length": 48, "interleave_moe_layer_step": 1, "leading_dense_block_count": 1}
            | {"rope.freq_base": 5e5},
        )
    ],
    "granitemoe": [
        (
            "granitemoeshared",
            TOP2 | RMS6 | {"num_local_experts": EXPERTS, "logits_scaling": 4.0, "shared_intermediate_size": 40},
            USED
            | {"attention.scale": 1.0, "residual_scale": 1.0, "logit_scale": 4.0}
            | {"expert_shared_feed_forward_length": 40},
        )
    ],
    "qwen2vl": [("qwen2", GQA | RMS6, {"rope.dimension_sections": [2, 1, 1, 0]})],
    "qwen3vl": [("qwen3", HEAD16 | RMS6, LONG_HEADS | {"rope.dimension_sections": [4, 2, 2, 0]})],
    "qwen3vlmoe": [
        (
            "qwen3_moe",
            HEAD16 | TOP2 | RMS6 | {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
            LONG_HEADS | USED | {"expert_feed_forward_length": 24, "rope.dimension_sections": [4, 2, 2, 0]},
        )
    ],
    "llama4": [
        (
            "llama4_text",
            HEAD16
            | RMS6
            | FOUR
            | {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
            | {"intermediate_size": 24, "intermediate_size_mlp": 48, "attention_chunk_size": 8192},
            LONG_HEADS
            | {"block_count": 4, "expert_count": EXPERTS, "expert_used_count": 1, "expert_feed_forward_length": 24}
            | {"interleave_moe_layer_step": 2, "rope.freq_base": 5e5},
        )
    ],
    "dbrx": [
        (
            "dbrx",
            {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "clip_qkv": 1.5}
            | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 1e4}}
            | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": EXPERTS, "moe_top_k": 2}},
            LAYER_NORM | USED | {"attention.clamp_kqv": 1.5},
        )
    ],
    "phimoe": [
        (
            "phimoe",
            TOP2 | {"num_local_experts": EXPERTS, "attention_bias": True, "lm_head_bias": True, "sliding_window": 8},
            USED | {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6} | LOCAL,
        )
    ],
    "mistral3": [
        (
            "ministral3",
            HEAD16
            | RMS6
            | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
            LONG_HEADS
            | SCALED
            | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5}
            | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        )
    ],
    "modern-bert": [
        (
            "modernbert",
            FOUR | {"local_attention": 8},
            MHA
            | LAYER_NORM
            | {"block_count": 4, "attention.sliding_window": 8, "attention.causal": False, "rope.scaling.type": "none"}
            | {"rope.freq_base": 160_000.0, "rope.freq_base_swa": 1e4},
        )
    ],
    "eurobert": [("eurobert", RMS6, MHA | {"attention.causal": False})],
    "nomic-bert": [
        (
            "nomic_bert",
            {},
            MHA | {"attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "rope.freq_base": 1000.0},
        )
    ],
    "deepseek2": [
        (
            "glm4_moe_lite",
            MHA_HEADS
            | DEEPSEEK
            | RMS6
            | {"q_lora_rank": 24, "n_group": 1, "topk_group": 1, "mlp_layer_types": GLM_LITE},
            LATENT
            | {"expert_weights_scale": 1.8, "expert_weights_norm": True, "expert_gating_func": 2}
            | {"expert_group_count": 1, "expert_group_used_count": 1, "attention.q_lora_rank": 24},
        )
    ],
    "glm-dsa": [
        (
            "glm_moe_dsa",
            MHA_HEADS
            | DEEPSEEK
            | RMS6
            | {"q_lora_rank": 24, "mlp_layer_types": GLM_LITE, "indexer_types": ["full", "shared", "full"]}
            | {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 6},
            {**LATENT, **chosen}
            | {"expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2}
            | {"expert_group_count": 1, "expert_group_used_count": 1, "attention.q_lora_rank": 24}
            | {"attention.indexer.head_count": 8, "attention.indexer.key_length": 16, "attention.indexer.top_k": 6},
        )
        for chosen in ({}, {"attention.indexer.types": [True, False, True]})
    ],
    "mistral4": [
        (
            "mistral4",
            MHA_HEADS
            | RMS6
            | {**DEEPSEEK, "first_k_dense_replace": 0, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}
            | {"routed_scaling_factor": 1.5, "norm_topk_prob": True}
            | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
            {**LATENT, "leading_dense_block_count": 0, "attention.q_lora_rank": 24}
            | SCALED
            | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 1}
            | {"expert_group_count": 4, "expert_group_used_count": 2}
            | {"rope.scaling.yarn_log_multiplier": 0.1, "attention.temperature_scale": 0.5}
            | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        )
    ],
    "bitnet": [
        ("bitnet", GQA | RMS6 | {"tie_word_embeddings": True}, {"hidden_act": "relu2", "rope.freq_base": 5e5}),
        ("bitnet", GQA | RMS6 | {"tie_word_embeddings": True, "hidden_act": "silu"}, {"rope.freq_base": 5e5}),
    ],
    "t5": [
        ("t5", T5, BUCKETS),
        ("t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, BUCKETS),
        ("mt5", T5, BUCKETS),
        ("umt5", T5, BUCKETS),
    ],
    "minicpm3": [
        (
            "minicpm3",
            MHA_HEADS
            | RMS6
            | {key: DEEPSEEK[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
            | {"q_lora_rank": 24, "v_head_dim": 8, "dim_model_base": 256, "scale_emb": 12, "scale_depth": 1.4},
            MHA
            | {"attention.kv_lora_rank": 16, "attention.q_lora_rank": 24, "attention.key_length": 24}
            | {"rope.dimension_count": 8},
        )
    ],
    "olmo2": [
        (
            "olmo3",
            GQA
            | FOUR
            | RMS6
            | {"sliding_window": 8}
            | {"rope_parameters": {"full_attention": SCALED_WIDE, "sliding_attention": {"rope_theta": 500.0}}},
            LOCAL
            | SCALED
            | {
                "rope.freq_base_swa": 500.0,
                "block_count": 4,
                "attention.sliding_window_pattern": [True, True, True, False],
            },
        )
    ],
    "mimo2": [
        (
            "mimo_v2_flash",
            ROUTED
            | FOUR
            | {
                "head_dim": 24,
                "v_head_dim": 8,
                "sliding_window": 8,
                "attention_value_scale": 0.5,
                "num_key_value_heads": 1,
            }
            | {"layer_types": ["full_attention", *["sliding_attention"] * 3], "routed_scaling_factor": None}
            | {"first_k_dense_replace": 1},
            LOCAL
            | SIGMOID
            | {"block_count": 4, "attention.sliding_window_pattern": [0, 1, 1, 1], "attention.value_length": 8}
            | {
                "attention.head_count_kv": [1, 2, 2, 2],
                "attention.value_scale": 0.5,
                "attention.key_length": 24,
                "rope.dimension_count": 8,
            }
            | {"rope.freq_base": 5e6, "rope.freq_base_swa": 1e4},
        )
    ],
    "chatglm": [("glm", HEAD16 | RMS6 | {"attention_bias": True}, LONG_HEADS | {"rope.dimension_count": 8})],
}
