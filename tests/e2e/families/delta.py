"""Hybrids of attention with the gated delta rule."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, MHA, TIED, TOP2, UNTIED

# Two heads of values share the keys of each of two groups.
DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
MIXED = {
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [1],
}
KIMI = TOP2 | {
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
ROWS = {
    "qwen3-next": Row("Qwen3NextForCausalLM", COMMON | GQA | UNTIED | TOP2 | DELTA | MIXED | {"head_dim": 16}),
    "qwen3-next-dense": Row(
        "Qwen3NextForCausalLM",
        COMMON | MHA | TIED | DELTA | {"num_experts": 0, "head_dim": 32, "linear_conv_kernel_dim": 3},
    ),
    "qwen3.5": Row("Qwen3_5ForCausalLM", COMMON | GQA | UNTIED | DELTA | {"head_dim": 16}),
    "qwen3.5-interval": Row(
        "Qwen3_5ForCausalLM",
        COMMON
        | MHA
        | TIED
        | {k: v for k, v in DELTA.items() if k != "layer_types"}
        | {"full_attention_interval": 2, "head_dim": 32, "linear_num_key_heads": 4},
    ),
    "qwen3.5-moe": Row(
        "Qwen3_5MoeForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | TOP2
        | DELTA
        | {k: v for k, v in MIXED.items() if k != "mlp_only_layers"}
        | {"head_dim": 16},
    ),
    "olmo-hybrid": Row("OlmoHybridForCausalLM", COMMON | GQA | UNTIED | DELTA | {"rope_parameters": None}),
    "olmo-hybrid-rope": Row(
        "OlmoHybridForCausalLM",
        COMMON
        | MHA
        | TIED
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": True}
        | {"linear_allow_neg_eigval": False, "layer_types": None},
    ),
    "kimi-linear": Row("KimiLinearForCausalLM", COMMON | MHA | UNTIED | KIMI | {"layer_types": DELTA["layer_types"]}),
    "kimi-linear-groups": Row(
        "KimiLinearForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | KIMI
        | {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3], "head_dim": 8, "num_heads": 2}}
        | {"num_expert_group": 2, "topk_group": 1, "moe_renormalize": False, "q_lora_rank": 24},
    ),
}
