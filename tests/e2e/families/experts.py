"""Mixtures of experts."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, GRANITE, MHA, ROPES, SLIDING, TIED, TOP2, UNTIED, WINDOW

QWEN_MOE = TOP2 | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
# Of four layers the second and the fourth could be sparse, but the second is not.
ALTERNATING = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "rope_parameters": ROPES["yarn"] | {"mscale": 0.9, "mscale_all_dim": 0.6},
}

ROWS = {
    "mixtral": Row("MixtralForCausalLM", COMMON | GQA | UNTIED | TOP2 | {"num_local_experts": 4}),
    "mixtral-window-tied": Row(
        "MixtralForCausalLM", COMMON | MHA | TIED | TOP2 | {"num_local_experts": 4, "sliding_window": WINDOW}
    ),
    "qwen2-moe": Row("Qwen2MoeForCausalLM", COMMON | GQA | UNTIED | QWEN_MOE),
    "qwen2-moe-mixed": Row(
        "Qwen2MoeForCausalLM",
        COMMON | MHA | TIED | QWEN_MOE | SLIDING | ALTERNATING | {"max_window_layers": 3, "qkv_bias": False},
    ),
    "qwen3-moe": Row("Qwen3MoeForCausalLM", COMMON | GQA | UNTIED | QWEN_MOE | {"head_dim": 32}),
    "qwen3-moe-mixed": Row(
        "Qwen3MoeForCausalLM", COMMON | MHA | TIED | QWEN_MOE | SLIDING | ALTERNATING | {"attention_bias": True}
    ),
    "olmoe": Row("OlmoeForCausalLM", COMMON | GQA | UNTIED | TOP2 | {"num_experts": 4}),
    "granitemoe": Row("GraniteMoeForCausalLM", COMMON | GQA | UNTIED | TOP2 | GRANITE | {"num_local_experts": 4}),
    "gpt-oss": Row(
        "GptOssForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | TOP2
        | {"num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW}
        # a limit that numbers of this size exceed
        | {"swiglu_limit": 0.5, "rope_parameters": ROPES["yarn"] | {"rope_theta": 150_000.0, "truncate": False}},
    ),
    "deepseek-v2-lite": Row("DeepseekV2ForCausalLM", COMMON | MHA | UNTIED | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v2-groups": Row(
        "DeepseekV2ForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | DEEPSEEK
        | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "mlp_bias": True}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek-v3": Row(
        "DeepseekV3ForCausalLM",
        COMMON | MHA | UNTIED | DEEPSEEK | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3-halves": Row(
        "DeepseekV3ForCausalLM",
        COMMON
        | MHA
        | TIED
        | DEEPSEEK
        | {"q_lora_rank": None, "n_group": 2, "topk_group": 1}
        | {"norm_topk_prob": False, "rope_interleave": False, "rope_parameters": None},
    ),
}
