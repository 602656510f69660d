"""Names that llama.cpp gives to experts, latent attention and state spaces, as rules for tables.

Which layers have experts or a state space only the tensors say; `load` hands that on under the keys SPARSE and
RECURRENT.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.ir.recipes import Map, Permute, Recipe, Reshape

from ...dsl import MLA, GatedMLP, Mamba, Mamba2, MoE, RMSNorm, RoPE
from ...models.families import Settings, key
from ...models.tables.family import Config, Fetch, Names, Rule, Template, in_layers

SPARSE, RECURRENT = "layers with experts", "layers with a state"
SIGMOID = 2  # expert_gating_func


def per_layer(make: Rule, where: str) -> Rule:
    """Restrict the rule `make` to the layers that the config lists under `where`."""

    return in_layers(make, lambda c: (i in c[where] for i in range(key("block_count")(c))))


def _shaped(name: str, *dims: int) -> Template:
    """Tensor `name` in another shape; the last size may be -1."""
    return lambda fetch, part, settings: Reshape(fetch(name), dims)


# -- experts

KNOWN: dict[str, None] = {"expert_count": None}  # takes the refusal of experts out of a table
EXPERTS: Names = {
    "layers.{i}.ffn.router": "blk.{i}.ffn_gate_inp",
    "layers.{i}.ffn.router.correction": "blk.{i}.exp_probs_b.bias",
    **{f"layers.{{i}}.ffn.experts.{n}": f"blk.{{i}}.ffn_{n}_exps.weight" for n in ("gate", "up", "down")},
    **{f"layers.{{i}}.ffn.experts.{n}_bias": f"blk.{{i}}.ffn_{n}_exps.bias" for n in ("gate", "up", "down")},
    **{f"layers.{{i}}.ffn.shared.{n}": f"blk.{{i}}.ffn_{n}_shexp" for n in ("gate", "up", "down")},
    "layers.{i}.ffn.shared_gate.weight": _shaped("blk.{i}.ffn_gate_inp_shexp.weight", 1, -1),
}


def experts(renormalize: bool, shared_gate: bool = False, **options: Any) -> Rule:
    """The rule for `moe` of an architecture whose files say how many experts there are and how wide."""

    def make(config: Config) -> MoE:
        wide = config.get("expert_shared_feed_forward_length")
        return MoE(
            key("expert_count")(config),
            key("expert_feed_forward_length", "feed_forward_length")(config),
            key("expert_used_count")(config),
            renormalize=renormalize,
            shared=GatedMLP(wide) if wide else None,
            shared_gate=shared_gate,
            **options,
        )

    return per_layer(make, SPARSE)


# -- DeepSeek-V2 and V3


def _deepseek_experts(config: Config) -> MoE:
    sigmoid = config.get("expert_gating_func") == SIGMOID
    hidden, groups = key("expert_feed_forward_length")(config), config.get("expert_group_count", 1)
    return MoE(
        key("expert_count")(config),
        hidden,
        key("expert_used_count")(config),
        scoring="sigmoid" if sigmoid else "softmax",
        correction=sigmoid,
        renormalize=config.get("expert_weights_norm", False),
        scale=config.get("expert_weights_scale", 1.0),
        groups=groups,
        top_groups=config.get("expert_group_used_count", 1),
        group_score="max" if groups > 1 and not sigmoid else "top2",
        shared=GatedMLP(hidden * key("expert_shared_count")(config)),
    )


deepseek_experts = per_layer(_deepseek_experts, SPARSE)


def latent_attention(rope_of: Callable[[Config], RoPE]) -> Rule:
    """The rule for `mixer` of DeepSeek: keys are as long as the latent's where files say key_length, not in MLA."""

    def rule(config: Config) -> MLA:
        rotary, width = key("rope.dimension_count")(config), key("attention.key_length_mla")(config)
        factor = config.get("rope.scaling.factor", 1.0)
        strength = 1 + config.get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)  # of YaRN on the scores
        return MLA(
            key("attention.head_count")(config),
            key("attention.kv_lora_rank")(config),
            width - rotary,
            rotary,
            key("attention.value_length_mla")(config),
            replace(rope_of(config), interleaved=True, amplitude=1.0),
            config.get("attention.q_lora_rank"),
            RMSNorm(key("attention.layer_norm_rms_epsilon")(config)),
            None if strength == 1 else width**-0.5 * strength**2,
        )

    return rule


def _heads_of(name: str, turned: bool = False) -> Template:
    """The rows of all heads, stored as a matrix each, `turned` if [rank, rows]."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        mla: MLA = settings.mixer
        found, rows = fetch(f"{name}.{part}"), mla.head_dim if turned else mla.v_head_dim
        return Reshape(Permute(found, (0, 2, 1)) if turned else found, (mla.heads * rows, -1))

    return template


LATENT: Names = {
    "layers.{i}.attn.q_down": "blk.{i}.attn_q_a",
    "layers.{i}.attn.q_norm": "blk.{i}.attn_q_a_norm",
    "layers.{i}.attn.q_up": "blk.{i}.attn_q_b",
    "layers.{i}.attn.kv_down": "blk.{i}.attn_kv_a_mqa",
    "layers.{i}.attn.kv_norm": "blk.{i}.attn_kv_a_norm",
    "layers.{i}.attn.k_up": _heads_of("blk.{i}.attn_k_b", turned=True),
    "layers.{i}.attn.v_up": _heads_of("blk.{i}.attn_v_b"),
}

# -- state spaces


def _log_rates(*dims: int) -> Template:
    """A_log, of shape `dims` if given, of the A = −e^A_log that is stored."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        stored = fetch("blk.{i}.ssm_a")
        return Map(Map(Reshape(stored, dims) if dims else stored, "neg"), "log")

    return template


STATES: Names = {
    **{f"layers.{{i}}.attn.{n}": f"blk.{{i}}.ssm_{n}" for n in ("in", "x", "dt", "out", "d")},
    **{f"layers.{{i}}.attn.{n}_norm": f"blk.{{i}}.ssm_{n}_norm" for n in ("dt", "b", "c")},
    "layers.{i}.attn.a_log": _log_rates(),
    "layers.{i}.attn.conv": "blk.{i}.ssm_conv1d",
}
HEADED_STATES: Names = {
    **STATES,
    "layers.{i}.attn.dt.bias": "blk.{i}.ssm_dt.bias",
    "layers.{i}.attn.a_log": _log_rates(-1),
    "layers.{i}.attn.d": _shaped("blk.{i}.ssm_d", -1),
    "layers.{i}.attn.norm.weight": _shaped("blk.{i}.ssm_norm.weight", -1),
}


def mamba(normed: bool = False) -> Rule:
    """The rule for `mixer` of Mamba, its step, B and C `normed` or as the file says (Falcon Mamba)."""

    def make(config: Config) -> Mamba:
        norm = RMSNorm(key("attention.layer_norm_rms_epsilon")(config), weight=normed)
        return Mamba(
            key("ssm.inner_size")(config),
            key("ssm.state_size")(config),
            key("ssm.conv_kernel")(config),
            key("ssm.time_step_rank")(config),
            norms=norm if normed or config.get("ssm.dt_b_c_rms") else None,
        )

    return per_layer(make, RECURRENT)


def _mamba2(config: Config) -> Mamba2:
    groups = key("ssm.group_count")(config)
    return Mamba2(
        key("ssm.inner_size")(config),
        key("ssm.time_step_rank")(config),
        key("ssm.state_size")(config),
        groups,
        key("ssm.conv_kernel")(config),
        norm=RMSNorm(key("attention.layer_norm_rms_epsilon")(config)),
        norm_groups=groups,
    )


mamba2 = per_layer(_mamba2, RECURRENT)
