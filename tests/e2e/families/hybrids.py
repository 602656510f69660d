"""Hybrids of attention with short convolutions, state spaces and the delta rule."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, MHA, TIED, TOP2, UNTIED

PARALLEL = {
    "mamba_n_heads": 8,
    "mamba_d_ssm": 64,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
    "mlp_multipliers": [0.8, 1.6],
}
LFM2_MOE = TOP2 | {
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}
NEMOTRON = TOP2 | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
# Shallow and narrow: with random weights each layer multiplies the error of f32 by ten.
ZAMBA1 = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 1, "num_hidden_layers": 4} | {
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
}
ZAMBA = {
    "n_mamba_heads": 8,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "chunk_size": 8,
    "num_hidden_layers": 4,
    "adapter_rank": 6,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}

ROWS = {
    "lfm2": Row(
        "Lfm2ForCausalLM", COMMON | GQA | TIED | {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}
    ),
    "lfm2-plain": Row(
        "Lfm2ForCausalLM",
        COMMON | MHA | UNTIED | {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    "lfm2-moe": Row("Lfm2MoeForCausalLM", COMMON | GQA | UNTIED | LFM2_MOE),
    "lfm2-moe-uncorrected": Row(
        "Lfm2MoeForCausalLM",
        COMMON
        | GQA
        | TIED
        | LFM2_MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "falcon-h1": Row("FalconH1ForCausalLM", COMMON | GQA | UNTIED | PARALLEL | MULTIPLIERS | {"mamba_n_groups": 2}),
    "falcon-h1-norms": Row(
        "FalconH1ForCausalLM",
        COMMON
        | MHA
        | TIED
        | PARALLEL
        | MULTIPLIERS
        | {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
        | {"projectors_bias": True, "mamba_n_groups": 2},
    ),
    "falcon-h1-gated-norms": Row(
        "FalconH1ForCausalLM",
        COMMON | GQA | UNTIED | PARALLEL | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": Row("NemotronHForCausalLM", COMMON | GQA | UNTIED | NEMOTRON),
    "nemotron-h-latent": Row(
        "NemotronHForCausalLM",
        COMMON
        | MHA
        | TIED
        | NEMOTRON
        | {"moe_latent_size": 24, "use_bias": True, "norm_topk_prob": False}
        | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    ),
    "zamba": Row("ZambaForCausalLM", COMMON | GQA | TIED | ZAMBA1),
    "zamba-one-head": Row(
        "ZambaForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | ZAMBA1
        | {"n_mamba_heads": 1, "attention_head_dim": 24, "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"mamba_dt_rank": 6, "num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]},
    ),
    "zamba2": Row("Zamba2ForCausalLM", COMMON | GQA | UNTIED | ZAMBA),
    "zamba2-adapters": Row(
        "Zamba2ForCausalLM",
        COMMON
        | MHA
        | TIED
        | ZAMBA
        | {"num_mem_blocks": 1, "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 6}
        | {"mamba_expand": 2, "mamba_ngroups": 2, "add_bias_linear": True, "num_hidden_layers": 2}
        | {"layers_block_type": ["hybrid", "hybrid"]},
    ),
}
