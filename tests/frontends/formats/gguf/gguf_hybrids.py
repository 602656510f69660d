"""Tiny Hugging Face models with states, short convolutions or several streams, as llama.cpp's converter writes them."""

from __future__ import annotations

from math import inf
from typing import Any

from .gguf_further import DENSE_FIRST, FOUR, GQA, HEAD16, LOCAL, LONG_HEADS, MHA_HEADS, RMS6, SIGMOID
from .gguf_sparse import DEEPSEEK, EXPERTS, GROUPS, LATENT, MULTIPLIERS, TOP2, USED

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
KDA = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
# architecture -> model_type, config, metadata
HYBRIDS: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
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
}
