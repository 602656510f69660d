"""Mixtures of experts after DeepSeek-V3 and Mixtral."""

from __future__ import annotations

from .row import Row
from .sizes import BORDER, COMMON, GQA, GRANITE, LOCAL_GLOBAL, MHA, ROPES, TIED, TOP2, UNTIED, WINDOW

FOUR = {"num_hidden_layers": 4}
H16 = {"head_dim": 16}
SLIDING = {"sliding_window": WINDOW}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2}
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
COUNTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_shared_experts": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# An index of few keys, by so many heads that none of a row is often 0 for all.
INDEXED = GROUPED | {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 16, "first_k_dense_replace": 1}
LOCALS = {"num_local_experts": 4}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
COHERE = TOP2 | SLIDING | FOUR | {"num_experts": 4, "head_dim": 16}
MIMO = SLIDING | {
    "head_dim": 24,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
LAGUNA = (
    SLIDING
    | H16
    | {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }
)
BY_TYPE = {
    "full_attention": ROPES["yarn"] | {"rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

ROWS = {
    "afmoe": Row("AfmoeForCausalLM", COMMON | GQA | UNTIED | FOUR | COUNTED | SLIDING | H16 | {"mup_enabled": True}),
    "ernie4_5_moe": Row("Ernie4_5_MoeForCausalLM", COMMON | GQA | TIED | ERNIE),
    "mistral4": Row(
        "Mistral4ForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | LATENT
        | ROUTED
        | GROUPED
        | {"rope_parameters": ROPES["yarn"] | BORDER | {"llama_4_scaling_beta": 0.3, "rope_theta": 1e4}},
    ),
    "mimo_v2_flash": Row(
        "MiMoV2FlashForCausalLM",
        COMMON
        | {"num_key_value_heads": 1}
        | UNTIED
        | MIMO
        | {"layer_types": LOCAL_GLOBAL, "routed_scaling_factor": 1.7},
    ),
    "laguna": Row(
        "LagunaForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | LAGUNA
        | {"layer_types": LOCAL_GLOBAL, "num_attention_heads_per_layer": [4, 6, 2], "moe_routed_scaling_factor": 1.7},
    ),
    "minicpm3": Row("MiniCPM3ForCausalLM", COMMON | MHA | TIED | LATENT | {"scale_emb": 3, "dim_model_base": 32}),
}
ALIKE = {
    "dots1": Row("Dots1ForCausalLM", COMMON | GQA | UNTIED | ROUTED | GROUPED | {"first_k_dense_replace": 1}),
    "dots1-windows": Row(
        "Dots1ForCausalLM",
        COMMON
        | MHA
        | TIED
        | ROUTED
        | SLIDING
        | {"max_window_layers": 1, "norm_topk_prob": True, "attention_bias": True},
    ),
    "cohere2_moe": Row("Cohere2MoeForCausalLM", COMMON | GQA | TIED | COHERE),
    "cohere2_moe-shared": Row(
        "Cohere2MoeForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | COHERE
        | {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "mlp_layer_types": ["dense", *["sparse"] * 3]}
        | {"prefix_dense_intermediate_size": 72, "rms_norm_eps": 1e-5, "attention_bias": True},
    ),
    "cohere2_moe-dense-first": Row(
        "Cohere2MoeForCausalLM",
        COMMON
        | GQA
        | TIED
        | COHERE
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "norm_topk_prob": False}
        | {"expert_selection_fn": "sigmoid", "first_k_dense_replace": 2, "sliding_window_pattern": 2},
    ),
    "mimo_v2_flash-groups": Row(
        "MiMoV2FlashForCausalLM",
        COMMON
        | {"num_key_value_heads": 2}
        | TIED
        | MIMO
        | GROUPED
        | {"attention_bias": True, "attention_value_scale": None, "norm_topk_prob": False, "sliding_window_size": 7}
        | {"layer_types": LOCAL_GLOBAL, "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"rope_parameters": {k: v | {"partial_rotary_factor": 0.5} for k, v in BY_TYPE.items()}},
    ),
    "flint": Row(
        "FlintForCausalLM",
        COMMON | GQA | UNTIED | LAGUNA | {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "flint-types": Row(
        "FlintForCausalLM",
        COMMON | MHA | TIED | LAGUNA | {"layer_types": LOCAL_GLOBAL, "norm_topk_prob": False, "attention_bias": True},
    ),
    "laguna-channels": Row(
        "LagunaForCausalLM",
        COMMON
        | MHA
        | TIED
        | LAGUNA
        | {"gating": "per-element", "attention_bias": True, "rope_parameters": BY_TYPE, "layer_types": LOCAL_GLOBAL},
    ),
    "glm4_moe": Row("Glm4MoeForCausalLM", COMMON | GQA | UNTIED | ROUTED | GROUPED),
    "glm4_moe-norms": Row(
        "Glm4MoeForCausalLM", COMMON | MHA | TIED | ROUTED | H16 | {"use_qk_norm": True, "attention_bias": True}
    ),
    "solar_open": Row("SolarOpenForCausalLM", COMMON | GQA | UNTIED | ROUTED | GROUPED | H16),
    "exaone_moe": Row("ExaoneMoeForCausalLM", COMMON | GQA | UNTIED | FOUR | COUNTED | SLIDING | GROUPED),
    "hy_v3": Row("HYV3ForCausalLM", COMMON | GQA | UNTIED | COUNTED | H16 | {"router_scaling_factor": 1.3}),
    "afmoe-scaled": Row(
        "AfmoeForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | COUNTED
        | SLIDING
        | H16
        | {"layer_types": LOCAL_GLOBAL, "route_scale": 2.3, "num_dense_layers": 2, "attention_bias": True},
    ),
    "flex_olmo": Row("FlexOlmoForCausalLM", COMMON | GQA | UNTIED | TOP2 | {"num_experts": 4}),
    "hunyuan_moe": Row("HunYuanMoEV1ForCausalLM", COMMON | GQA | UNTIED | H16 | {"num_experts": 4, "moe_topk": 2}),
    "minimax_m2": Row("MiniMaxM2ForCausalLM", COMMON | GQA | UNTIED | TOP2 | LOCALS | H16),
    "minimax_m2-partial": Row("MiniMaxM2ForCausalLM", COMMON | MHA | TIED | TOP2 | LOCALS | H16 | {"rotary_dim": 8}),
    "ernie4_5_moe-biases": Row(
        "Ernie4_5_MoeForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | FOUR
        | ERNIE
        | {"use_bias": True, "moe_layer_interval": 2, "moe_num_shared_experts": 0, "moe_layer_end_index": 2},
    ),
    "granitemoeshared": Row(
        "GraniteMoeSharedForCausalLM",
        COMMON | GQA | UNTIED | TOP2 | GRANITE | LOCALS | {"shared_intermediate_size": 48},
    ),
    "granitemoe_swa": Row(
        "GraniteMoeSWAForCausalLM",
        COMMON | GQA | TIED | TOP2 | GRANITE | LOCALS | SLIDING | {"layer_rope_theta": [100.0, 0, 5000.0]},
    ),
    "mellum": Row(
        "MellumForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | TOP2
        | SLIDING
        | H16
        | {"num_experts": 4, "moe_intermediate_size": 32, "layer_types": LOCAL_GLOBAL, "rope_parameters": BY_TYPE}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    # transformers zeroes the row of a padding token in tied embeddings that it loads.
    "youtu": Row("YoutuForCausalLM", COMMON | MHA | TIED | LATENT | {"pad_token_id": None}),
    "glm4_moe_lite": Row("Glm4MoeLiteForCausalLM", COMMON | MHA | UNTIED | LATENT | ROUTED),
    "deepseek_v32": Row("DeepseekV32ForCausalLM", COMMON | MHA | UNTIED | LATENT | ROUTED | INDEXED),
    "deepseek_v32-yarn": Row(
        "DeepseekV32ForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | LATENT
        | ROUTED
        | INDEXED
        | {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": ROPES["yarn"] | {"mscale_all_dim": 0.6},
        },
    ),
    "glm_moe_dsa": Row(
        "GlmMoeDsaForCausalLM",
        COMMON | MHA | UNTIED | LATENT | ROUTED | INDEXED | {"indexer_types": ["full", "shared", "full"]},
    ),
    "glm_moe_dsa-pattern": Row(
        "GlmMoeDsaForCausalLM",
        COMMON | MHA | UNTIED | LATENT | ROUTED | INDEXED | {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ),
    "minicpm3-plain": Row(
        "MiniCPM3ForCausalLM",
        COMMON | MHA | UNTIED | LATENT | {"q_lora_rank": None, "scale_depth": None, "dim_model_base": None},
    ),
}
