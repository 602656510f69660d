"""Further tiny Hugging Face models with the metadata that llama.cpp's converter writes for them."""

from __future__ import annotations

from math import inf
from typing import Any

from .gguf_sparse import DEEPSEEK, EXPERTS, GROUPS, LATENT, MULTIPLIERS, SCALED, TOP2, USED

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
QWEN_NEXT = (
    HEAD16
    | RMS6
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
)
QWEN_MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
NEXT = LONG_HEADS | {
    "rope.dimension_count": 4,
    "attention.recurrent_layers": [True, False, True],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
SECTIONS = {"rope.dimension_sections": [1, 1, 0, 0]}
SHARED = USED | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40}
CONV = {"attention.head_count_kv": [0, GROUPS, 0], "shortconv.l_cache": 3, "rope.freq_base": 1e6}
MAMBA_HYBRID = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": GROUPS,
}
STATES = {
    "attention.head_count_kv": [0, GROUPS, 0],
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 8,
    "ssm.group_count": GROUPS,
}
STREAMS = FOUR | {  # of Gemma 3n and 4
    "num_key_value_heads": GROUPS,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
STREAMED = LOCAL | {
    "block_count": 4,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 8,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
NEMOTRON = {
    "num_key_value_heads": GROUPS,
    "head_dim": 16,
    "layer_norm_epsilon": 1e-6,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": GROUPS,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0}
MHA_HEADS = {"num_key_value_heads": 4}
GLM_LITE = ["dense", "sparse", "sparse"]
KDA = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
SCALED_WIDE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
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
    "qwen3next": [("qwen3_next", QWEN_NEXT | QWEN_MOE, NEXT | SHARED)],
    "qwen35": [("qwen3_5_text", QWEN_NEXT, NEXT | SECTIONS)],
    "qwen35moe": [("qwen3_5_moe_text", QWEN_NEXT | QWEN_MOE, NEXT | SHARED | SECTIONS)],
    "lfm2": [
        (
            "lfm2",
            GQA
            | {"norm_eps": 1e-6, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]},
            CONV,
        )
    ],
    "lfm2moe": [
        (
            "lfm2_moe",
            GQA
            | {"norm_eps": 1e-6, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
            | {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            CONV | SIGMOID | {"leading_dense_block_count": 1},
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
    "granitehybrid": [
        (
            "granitemoehybrid",
            MAMBA_HYBRID
            | TOP2
            | RMS6
            | {"num_local_experts": experts, "shared_intermediate_size": 48, "logits_scaling": 4.0},
            STATES
            | (USED if experts else {})
            | {"attention.scale": 1.0, "residual_scale": 1.0, "logit_scale": 4.0, "rope.scaling.finetuned": False}
            | ({"expert_shared_feed_forward_length": 48} if experts else {}),
        )
        for experts in (EXPERTS, 0)
    ],
    "gemma3n": [
        (
            "gemma3n_text",
            STREAMS | {"laurel_rank": 64, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
            STREAMED
            | {"altup.active_idx": 0, "altup.num_inputs": 4, "attention.key_length": 8}
            | {"activation_sparsity_scale": [1.6448534727096558, 1.6448534727096558, -inf, -inf]}
            | {"final_logit_softcapping": 30.0},
        )
    ],
    "gemma4": [
        (
            "gemma4_text",
            STREAMS | {"global_head_dim": 16, "use_double_wide_mlp": True},
            STREAMED
            | {"attention.key_length": 16, "attention.key_length_swa": 8, "feed_forward_length": [48, 48, 96, 96]}
            | {"rope.dimension_count": 16, "rope.dimension_count_swa": 8},
        ),
        (
            "gemma4_text",
            STREAMS
            | {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0}
            | {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 24},
            STREAMED
            | {"attention.key_length": 16, "attention.key_length_swa": 8, "attention.head_count_kv": [2, 1, 2, 1]}
            | {"rope.dimension_count": 16, "rope.dimension_count_swa": 8, "final_logit_softcapping": 30.0}
            | {"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0}
            | USED
            | {"expert_feed_forward_length": 24},
        ),
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
    "falcon-h1": [
        (
            "falcon_h1",
            GQA
            | RMS6
            | MULTIPLIERS
            | {"head_dim": 8, "mamba_d_ssm": 64, "mamba_rms_norm": normed, "mamba_norm_before_gate": False}
            | {key: value for key, value in MAMBA_HYBRID.items() if key.startswith("mamba")},
            {"attention.key_length": 8, **STATES, "attention.head_count_kv": GROUPS},
        )
        for normed in (False, True)
    ],
    "nemotron_h": [
        (
            "nemotron_h",
            NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"]},
            STATES | {"attention.key_length": 16, "feed_forward_length": [0, 0, 48]},
        )
    ],
    "nemotron_h_moe": [
        (
            "nemotron_h",
            NEMOTRON
            | {
                "layers_block_type": ["mamba", "attention", "moe"],
                "n_routed_experts": EXPERTS,
                "moe_latent_size": latent,
            }
            | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5},
            STATES
            | USED
            | {"attention.key_length": 16, "feed_forward_length": [0, 0, 24], "expert_feed_forward_length": 24}
            | {"expert_shared_feed_forward_length": 40, "expert_shared_count": 1, "expert_weights_norm": True}
            | {"expert_weights_scale": 2.5, "expert_group_count": 1}
            | ({"moe_latent_size": latent} if latent else {}),
        )
        for latent in (None, 16)
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
    "kimi-linear": [
        (
            "kimi_linear",
            RMS6
            | MHA_HEADS
            | {key: value for key, value in DEEPSEEK.items() if key.startswith(("kv_lora", "qk_", "v_head", "first_k"))}
            | {"q_lora_rank": None, "num_experts": EXPERTS, "num_experts_per_token": 2, "moe_intermediate_size": 24}
            | {"num_shared_experts": 1, "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1}
            | {"linear_attn_config": KDA, "model_max_length": 64},
            {key: value for key, value in LATENT.items() if not key.startswith("expert")}
            | DENSE_FIRST
            | {"expert_shared_count": 1, "expert_weights_scale": 2.446}
            | {"attention.head_count_kv": [0, 1, 0], "ssm.conv_kernel": 4, "kda.head_dim": 8},
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
