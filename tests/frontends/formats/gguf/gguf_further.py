"""Further tiny Hugging Face models with the metadata that llama.cpp's converter writes for them."""

from __future__ import annotations

from typing import Any

from .gguf_sparse import EXPERTS, GROUPS, TOP2, USED

LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
GQA = {"num_key_value_heads": GROUPS}
HEAD16 = GQA | {"head_dim": 16}
LONG_HEADS = {"attention.key_length": 16, "rope.dimension_count": 16}
RMS6 = {"rms_norm_eps": 1e-6}
LOCAL = {"attention.sliding_window": 8}
FOUR = {"num_hidden_layers": 4}  # of which the last is global
SIGMOID = USED | {"expert_feed_forward_length": 24, "expert_gating_func": 2}
DENSE_FIRST = SIGMOID | {"leading_dense_block_count": 1, "expert_group_count": 1, "expert_group_used_count": 1}
ROUTED = HEAD16 | RMS6 | {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
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
}
