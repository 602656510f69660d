"""Tiny Hugging Face models with experts, latent attention and state spaces, as llama.cpp's converter stores them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

HEADS, GROUPS, EXPERTS = 4, 2, 4
NOPE, ROPE, VALUES = 16, 8, 12  # of DeepSeek's heads
MULTIPLIERS: dict[str, Any] = {  # of Falcon-H1
    "key_multiplier": 0.25,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 4.0,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 2.0],
    "mlp_multipliers": [2.0, 0.25],
}
DELTA = {"groups": 2, "heads": 4, "size": 8}  # of Qwen's delta rule
HEADED = ("mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1")

Tensors = dict[str, np.ndarray]


def rearranged(arch: str, tensors: Tensors) -> Tensors:
    """A checkpoint's tensors under names that the gguf package maps, in the shapes of the GGUF file."""
    found: Tensors = {}
    if arch.startswith("nemotron_h"):
        tensors = {n.replace("model.", "backbone."): x for n, x in tensors.items()}
    for name, x in sorted(tensors.items()):
        found |= _rearranged(arch, name, multiplied(name, x) if arch == "falcon-h1" else x)
    found = _stacked(found)
    if arch == "lfm2moe":
        return {
            n.removeprefix("model.").replace("mlp.exp", "feed_forward.exp") if ".experts." in n else n: x
            for n, x in found.items()
        }
    if arch == "granitehybrid" and not any("gate_exps" in n or "experts" in n for n in found):
        return {n.replace("_shexp", ""): x for n, x in found.items()}
    return found


def _rearranged(arch: str, name: str, x: np.ndarray) -> Tensors:
    if arch in ("llama4", "qwen35moe") and "experts." in name:  # gate above up
        x = x.swapaxes(1, 2) if arch == "llama4" else x
        if "gate_up" in name:
            halves = zip(("gate", "up"), np.split(x, 2, 1), strict=True)
            return {f"{name.replace('gate_up', part)}.weight": half for part, half in halves}
        return {name if name.endswith(".weight") else f"{name}.weight": x}
    if arch in ("gemma3n", "gemma4"):
        block = f"blk.{name.split('.')[2]}"
        if name.endswith(("router.scale", "per_expert_scale")):
            return {f"{block}.{'ffn_down_exps' if 'expert' in name else 'ffn_gate_inp'}.scale": x}
        bare = name.endswith(("layer_scalar", "correct_output_scale")) or ".experts." in name
        return {f"{name}.weight" if bare and not name.endswith(".weight") else name: x}
    if arch == "dbrx" and "experts" in name:
        rows = x.reshape(EXPERTS, 48, -1)
        return {f"{name}.weight": rows.swapaxes(1, 2) if name.endswith("w2") else rows}
    if "in_proj_qkvz" in name:
        block = name.split(".")[2]
        apart = x.reshape(DELTA["groups"], -1, x.shape[-1])
        sizes = [8, 16, 16 + 16]
        q, k, v, z = (part.reshape(-1, x.shape[-1]) for part in np.split(apart, sizes, 1))
        return {f"blk.{block}.attn_qkv.weight": np.concatenate((q, k, v)), f"blk.{block}.attn_gate.weight": z}
    if arch.startswith("qwen35") and "linear_attn" in name:
        x = _tiled(name, x)
    if arch == "mistral4" and ".experts." in name:
        return {f"{name}.weight": x}
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
    if arch == "kimi-linear" and re.search(r"block_sparse_moe\.\w+_proj", name):
        return {name.replace("block_sparse_moe", "mlp"): x}  # as published checkpoints call it
    if arch == "kimi-linear" and (name.endswith("A_log") or "_conv1d" in name):
        return {name: -np.exp(x).reshape(1, 1, -1, 1) if name.endswith("A_log") else x.reshape(1, x.shape[0], 1, -1)}
    if "kv_b_proj" in name and arch != "minicpm3":
        k, v = np.split(x.reshape(HEADS, NOPE + VALUES, -1), [NOPE], 1)
        return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}
    if name.endswith("A_log"):
        return {name: -np.exp(x)[..., None] if arch in HEADED else -np.exp(x)}
    if arch in HEADED and name.endswith((".D", "mixer.norm.weight", "mamba.norm.weight")):
        return {name: x[:, None] if x.size == 8 else x.reshape(GROUPS, -1)}
    renamed = {
        "attn_sub_norm": "inner_attn_ln",
        "ffn_sub_norm": "ffn_layernorm",
        "output_linear": "experts.w2",
        "router.layer": "gate",
        "self_attn.sinks": "self_attn.sinks.weight",
        "attention_sink_bias": "attention_sink_bias.weight",
        "e_score_correction_bias": "e_score_correction.bias",
        "expert_bias": "expert_bias.bias",
        "dt_bias": "dt_proj.bias",
    }
    for old, new in renamed.items() if arch != "dbrx" else ():
        name = name.replace(old, new)
    return {name: x.squeeze(1) if "conv1d.weight" in name or "conv.conv" in name else x}


def multiplied(name: str, x: np.ndarray) -> np.ndarray:
    """Weights of Falcon-H1 times the multipliers of its config."""
    m, inner, state = MULTIPLIERS, 64, 8 * GROUPS
    if "mamba.in_proj" in name:
        parts = zip(m["ssm_multipliers"], np.split(x, np.cumsum([inner, inner, state, state])), strict=True)
        return np.concatenate([np.float32(m["ssm_in_multiplier"] * by) * part for by, part in parts])
    factors = {
        "mamba.out_proj": m["ssm_out_multiplier"],
        "q_proj": m["attention_in_multiplier"],
        "k_proj": m["attention_in_multiplier"] * m["key_multiplier"],
        "v_proj": m["attention_in_multiplier"],
        "o_proj": m["attention_out_multiplier"],
        "gate_proj": m["mlp_multipliers"][0],
        "down_proj": m["mlp_multipliers"][1],
    }
    return x * np.float32(next((by for part, by in factors.items() if f".{part}." in name), 1.0))


def _tiled(name: str, x: np.ndarray) -> np.ndarray:
    """Order what heads of values have as llama.cpp's converter stores Qwen 3.5: not group by group, but the first heads
    of all groups, then the second ones."""
    groups, heads, size = DELTA["groups"], DELTA["heads"], DELTA["size"]

    def moved(x: np.ndarray, axis: int) -> np.ndarray:
        x = np.moveaxis(x, axis, 0)
        apart = x.reshape(groups, heads // groups, -1, *x.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(apart.reshape(x.shape), 0, axis)

    if "out_proj" in name:
        return moved(x, 1)
    if "norm" in name:
        return x
    if "in_proj_qkv." in name or "conv1d" in name:
        keys = 2 * groups * size
        return np.concatenate((x[:keys], moved(x[keys:], 0)))
    return moved(x, 0)


def _stacked(tensors: Tensors) -> Tensors:
    """The experts' tensors as one."""
    for old, new in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        if found := [n for n in sorted(tensors) if f".{old}." in n]:  # of Gemma 3n's streams
            tensors = tensors | {f"{new}.weight": np.stack([tensors[n] for n in found])}
            tensors = {n: x for n, x in tensors.items() if n not in found}
    one = re.compile(r"\.experts\.\d+\.")
    named: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda n: [int(i) for i in re.findall(r"\d+(?=\.)", n)]):
        if one.search(name):
            merged = one.sub(".experts.", name).replace("feed_forward.experts", "mlp.experts")
            if "mixer" in merged:  # of Nemotron-H
                merged = merged.replace("backbone", "model").replace("mixer", "mlp")
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
