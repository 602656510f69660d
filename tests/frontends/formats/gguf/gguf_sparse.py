"""Tiny Hugging Face models with experts, latent attention and state spaces, as llama.cpp's converter stores them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

HEADS, GROUPS, EXPERTS = 4, 2, 4
NOPE, ROPE, VALUES = 16, 8, 12  # of DeepSeek's heads

Tensors = dict[str, np.ndarray]


def rearranged(arch: str, tensors: Tensors) -> Tensors:
    """A checkpoint's tensors under names that the gguf package maps, in the shapes of the GGUF file."""
    found: Tensors = {}
    for name, x in sorted(tensors.items()):
        found |= _rearranged(arch, name, x)
    return _stacked(found)


def _rearranged(arch: str, name: str, x: np.ndarray) -> Tensors:
    if "experts.gate_up_proj" in name:  # gpt-oss: interleaved, weights turned
        x, kind = (x, "bias") if name.endswith("_bias") else (x.swapaxes(1, 2), "weight")
        stem = name.removesuffix("_bias")
        return {f"{stem.replace('gate_up', part)}.{kind}": x[:, i::2] for i, part in enumerate(("gate", "up"))}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": x.swapaxes(1, 2)}
    if name.endswith("down_proj_bias"):
        return {name.replace("_bias", ".bias"): x}
    if arch.startswith("granite") and "shared_mlp" in name:  # beside experts
        stem = f"blk.{re.findall(r'[0-9]+', name)[0]}.ffn"
        parts = ("down",) if "output_linear" in name else ("gate", "up")
        return {f"{stem}_{p}_shexp.weight": h for p, h in zip(parts, np.split(x, len(parts)), strict=True)}
    if "input_linear" in name:  # Granite: gate above up
        parts = ("experts.w1", "experts.w3")
        return {name.replace("input_linear", part): h for part, h in zip(parts, np.split(x, 2, 1), strict=True)}
    if "kv_b_proj" in name:
        k, v = np.split(x.reshape(HEADS, NOPE + VALUES, -1), [NOPE], 1)
        return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}
    if name.endswith("A_log"):
        return {name: -np.exp(x)[..., None] if arch == "mamba2" else -np.exp(x)}
    if arch == "mamba2" and name.endswith((".D", "mixer.norm.weight")):
        return {name: x[:, None] if x.size == 8 else x.reshape(GROUPS, -1)}
    renamed = {
        "output_linear": "experts.w2",
        "router.layer": "gate",
        "self_attn.sinks": "self_attn.sinks.weight",
        "e_score_correction_bias": "e_score_correction.bias",
        "expert_bias": "expert_bias.bias",
        "dt_bias": "dt_proj.bias",
    }
    for old, new in renamed.items():
        name = name.replace(old, new)
    return {name: x.squeeze(1) if "conv1d.weight" in name else x}


def _stacked(tensors: Tensors) -> Tensors:
    """The experts' tensors as one."""
    one = re.compile(r"\.experts\.\d+\.")
    named: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda n: [int(i) for i in re.findall(r"\d+(?=\.)", n)]):
        if one.search(name):
            merged = one.sub(".experts.", name).replace("feed_forward.experts", "mlp.experts")
            named.setdefault(merged, []).append(tensors[name])
    return {n: x for n, x in tensors.items() if not one.search(n)} | {n: np.stack(x) for n, x in named.items()}


TOP2 = {"num_key_value_heads": GROUPS, "num_experts_per_tok": 2}
USED = {"expert_count": EXPERTS, "expert_used_count": 2}
RMS5 = {"attention.layer_norm_rms_epsilon": 1e-5}
QWEN = TOP2 | {"num_experts": EXPERTS, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUES,
    "first_k_dense_replace": 1,
}
LATENT = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 16 + ROPE,
    "attention.value_length": 16,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUES,
    "rope.dimension_count": ROPE,
}
STATES, INNER = {"state_size": 8}, {"intermediate_size": 64}
SSM = {
    "attention.head_count": 0,
    "attention.head_count_kv": 0,
    "feed_forward_length": 0,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 2,
    "context_length": 2**20,
}
# architecture -> model_type, config, metadata
SPARSE: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "llama": [("mixtral", TOP2 | {"num_local_experts": EXPERTS, "rms_norm_eps": 1e-6}, USED | {"rope.freq_base": 1e6})],
    "granitemoe": [
        (
            "granitemoe",
            TOP2 | {"num_local_experts": EXPERTS, "logits_scaling": 4.0, "residual_multiplier": 0.5},
            USED | {"attention.scale": 1.0, "residual_scale": 0.5, "logit_scale": 4.0},
        )
    ],
    "qwen2moe": [
        (
            "qwen2_moe",
            QWEN | {"shared_expert_intermediate_size": 40},
            USED | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
        )
    ],
    "qwen3moe": [
        (
            "qwen3_moe",
            QWEN | {"norm_topk_prob": True, "head_dim": 16},
            USED | {"expert_feed_forward_length": 24, "attention.key_length": 16},
        )
    ],
    "olmoe": [("olmoe", TOP2 | {"num_experts": EXPERTS, "rms_norm_eps": 1e-6}, USED)],
    "gpt-oss": [
        (
            "gpt_oss",
            TOP2
            | {"num_local_experts": EXPERTS, "head_dim": 16, "sliding_window": 8}
            | {"rope_parameters": YARN | {"rope_theta": 150_000.0, "truncate": False}},
            USED
            | RMS5
            | SCALED
            | {"attention.key_length": 16, "attention.sliding_window": 8, "rope.freq_base": 150_000.0}
            | {"expert_feed_forward_length": 48},
        )
    ],
    "deepseek2": [
        (
            "deepseek_v2",
            DEEPSEEK | {"q_lora_rank": None, "routed_scaling_factor": 1.5},
            LATENT | {"expert_weights_scale": 1.5, "expert_weights_norm": False, "expert_gating_func": 1},
        ),
        (
            "deepseek_v3",
            DEEPSEEK
            | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}
            | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            LATENT
            | SCALED
            | {"expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2}
            | {"expert_group_count": 4, "expert_group_used_count": 2, "attention.q_lora_rank": 24}
            | {"rope.scaling.yarn_log_multiplier": 0.1},
        ),
    ],
    "mamba": [
        ("mamba", STATES | INNER, SSM | RMS5),
        (
            "falcon_mamba",
            STATES | INNER | {"mixer_rms_eps": 1e-5, "tie_word_embeddings": False},
            SSM | RMS5 | {"ssm.dt_b_c_rms": True},
        ),
    ],
    "mamba2": [
        (
            "mamba2",
            STATES | {"num_heads": 8, "head_dim": 8, "n_groups": GROUPS, "chunk_size": 8},
            SSM | RMS5 | {"ssm.time_step_rank": 8, "ssm.group_count": GROUPS},
        )
    ],
    "jamba": [
        (
            "jamba",
            TOP2
            | {"num_experts": EXPERTS, "mamba_d_state": 8, "attn_layer_period": 3, "attn_layer_offset": 1}
            | {"expert_layer_period": 2, "expert_layer_offset": 0},
            USED
            | {key: value for key, value in SSM.items() if key.startswith("ssm.")}
            | {"attention.head_count_kv": [0, GROUPS, 0]},
        )
    ],
}
