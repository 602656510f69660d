"""Mixtures of experts with different local and global layers: Cohere 2 MoE, MiMo-V2-Flash, Flint, Laguna."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....dsl import Gate, GatedMLP, MoE, RoPE, Router
from ...tables import gguf
from ...tables.family import Config, key, mask_layers, read_required
from ...tables.rope_config import build_ropes, read_rope, rope_with
from ...tables.templates import name_gated_mlp, scale_linear
from ..dense.llama import LLAMA, alternate_windows, pick_windows
from ..dense.llama_relatives import COHERE2, rotate_local
from .corrected import SHARED
from .deepseek import find_sparse_layers, make_moe_rule, make_v3_router
from .mixtral import SPARSE, find_stepped_layers, read_activation

# -- Cohere 2 MoE: dense layers come first, and their windows have a separate period


def _read_cohere_windows(config: Config) -> tuple[int | None, ...]:
    dense = config.get("first_k_dense_replace") or 0
    first, period = config.get("prefix_dense_sliding_window_pattern", 1), config.get("sliding_window_pattern", 4)
    counts = [(i, first) for i in range(dense)]
    counts += [(i, period) for i in range(key("num_hidden_layers")(config) - dense)]
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i, every in counts]
    return pick_windows(config, config.get("sliding_window", 4096), types)


def _build_cohere_ropes(config: Config) -> tuple[RoPE | None, ...]:
    """Return the RoPE of each layer, None for global ones, except dense layers that the config forces to be global."""
    rope = rope_with(rope_theta=1e4, interleaved=True)(config)
    forced = config.get("prefix_dense_sliding_window_pattern", 1) == 1
    layers = zip(_read_cohere_windows(config), find_sparse_layers(0)(config), strict=True)
    return tuple(rope if window is not None or (forced and not sparse) else None for window, sparse in layers)


def _read_cohere_factor(config: Config) -> float:
    """Return the factor of routed and shared experts in their sum: 0.5 if they are averaged, else 1."""
    averaged = config.get("shared_expert_combination_strategy", "average") == "average"
    return 0.5 if averaged and config.get("num_shared_experts") else 1.0


def _build_cohere_moe(config: Config) -> MoE:
    hidden, act = key("intermediate_size")(config), read_activation(config)
    shared, scoring = config.get("num_shared_experts") or 0, config.get("expert_selection_fn", "softmax")
    count, k = key("num_experts", "num_local_experts", default=8), key("num_experts_per_tok", default=2)
    renormalize = scoring == "softmax" or config.get("norm_topk_prob", True)
    router = Router(scoring=scoring, renormalize=renormalize, scale=_read_cohere_factor(config))
    beside = GatedMLP(hidden * shared, act) if shared else None
    return MoE(count(config), hidden, k(config), act, shared=beside, router=router)


COHERE2_MOE = COHERE2.derive(
    "cohere2_moe",
    names={
        **SPARSE,
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_experts"),
        "layers.{i}.ffn.shared.down": scale_linear("layers.{i}.mlp.shared_experts.down_proj", "shared"),
    },
    defaults={"head_dim": 128},
    ffn=key("prefix_dense_intermediate_size", "intermediate_size"),
    norm=lambda c: "layer" if c.get("rms_norm_eps") is None else "rms",
    eps=key("rms_norm_eps", "layer_norm_eps", default=1e-5),
    window=_read_cohere_windows,
    rope=_build_cohere_ropes,
    multipliers=lambda c: {"shared": _read_cohere_factor(c)},
    moe=mask_layers(_build_cohere_moe, find_sparse_layers(0)),
)

# -- MiMo-V2-Flash: local layers have twice the KV heads, and sinks


def _read_mimo_windows(config: Config) -> tuple[int | None, ...]:
    layers = range(key("num_hidden_layers")(config))
    types = ["full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in layers]
    keys = config.get("sliding_window_size")
    return pick_windows(config, config.get("sliding_window", 129) if keys is None else keys + 1, types)


def _build_mimo_ropes(config: Config) -> Any:
    bases = (lambda c: 5e6), (lambda c: 1e4)  # fixed in transformers if rope_parameters are absent
    rule = build_ropes(_read_mimo_windows, partial=True, bases=bases, partial_rotary_factor=0.334)
    return rule({**config, "partial_rotary_factor": 0.334})


def _read_mimo_groups(config: Config) -> tuple[int, ...]:
    groups = key("num_key_value_heads", default=4)(config)
    return tuple(groups if window is None else 2 * groups for window in _read_mimo_windows(config))


def _build_mimo_router(config: Config) -> Router:
    """Return DeepSeek-V3's router; a scale of null in published configs means 1."""
    scale = config.get("routed_scaling_factor")
    stated = {**config, "routed_scaling_factor": 1.0 if scale is None else scale}
    return make_v3_router(groups=1, top_groups=1)(stated)


def _read_gguf_groups(config: Config) -> int | tuple[int, ...]:
    stated = key("attention.head_count_kv")(config)
    return tuple(stated[: config["block_count"]]) if isinstance(stated, list) else stated


MIMO_V2_FLASH = LLAMA.derive(
    "mimo_v2_flash",
    inert=("sliding_window",),
    names={
        **SHARED,
        "layers.{i}.attn.v": scale_linear("layers.{i}.self_attn.v_proj", "values"),
        "layers.{i}.attn.sinks": "layers.{i}.self_attn.attention_sink_bias",
    },
    aliases={"attention_sink_bias": "sinks"},
    unused=(*LLAMA.unused, "model.mtp.*"),
    kv_heads=_read_mimo_groups,
    defaults={"head_dim": 192, "rms_norm_eps": 1e-5},
    v_head_dim=key("v_head_dim", default=128),
    out_bias=False,
    ffn_bias=False,
    window=_read_mimo_windows,
    sinks=lambda c: tuple(window is not None for window in _read_mimo_windows(c)),
    rope=_build_mimo_ropes,
    context=key("max_position_embeddings", default=None),
    multipliers=lambda c: {"values": 1.0 if (v := c.get("attention_value_scale", 0.707)) is None else v},
    moe=make_moe_rule(_build_mimo_router, first_dense=1, shared=0),
    gguf=gguf.SPARSE_BASE.derive(
        "mimo2",
        names={
            "layers.{i}.attn.v": scale_linear("blk.{i}.attn_v", "values"),
            "layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight",
        },
        kv_heads=_read_gguf_groups,
        v_head_dim=key("attention.value_length", default=None),
        window=gguf.build_windows(1),
        sinks=lambda c: tuple(gguf.find_local_layers(c, 1)),
        # Files may state the local layers without their window.
        rope=gguf.build_two_ropes(lambda c: [x or None for x in gguf.find_local_layers(c, 1)], True, near_theta=1e4),
        multipliers=lambda c: {"values": c.get("attention.value_scale", 1.0)},  # older files lack it
        moe=gguf.route_experts("sigmoid", renormalize=True),
    ),
)

# -- Flint: sinks, sigmoids for scores, and a shared expert


def _read_flint_windows(config: Config) -> tuple[int | None, ...]:
    last = key("num_hidden_layers")(config) - 1
    wide = (i < 2 or i % 4 == 1 or i == last for i in range(last + 1))
    return pick_windows(
        config, config.get("sliding_window", 513), ["full_attention" if w else "sliding_attention" for w in wide]
    )


def _build_flint_moe(config: Config) -> MoE:
    moe: MoE = _build_laguna_moe({"shared_expert_intermediate_size": 1024, **config, "moe_routed_scaling_factor": 1.0})
    router = replace(moe.router, correction=False, renormalize=config.get("norm_topk_prob", True))
    return replace(moe, router=router)


FLINT = LLAMA.derive(
    "flint",
    names={
        **SPARSE,
        "layers.{i}.attn.sinks": "layers.{i}.self_attn.softmax_offset",
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_expert"),
    },
    aliases={"softmax_offset": "sinks"},
    defaults={"num_key_value_heads": 4, "head_dim": 128},
    ffn_bias=False,
    qk_norm="head",
    sinks=True,
    window=_read_flint_windows,
    rope=rotate_local(read_rope, _read_flint_windows),
    moe=mask_layers(_build_flint_moe, find_stepped_layers(0, 1)),
)

# -- Laguna: heads by layer, softplus gates of attention

_LAGUNA_ROPES = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_LAGUNA_WINDOWS = alternate_windows(1, window=512)  # all global without layer_types


def _build_laguna_moe(config: Config) -> MoE:
    (count, k), act = read_required(config, "num_experts", "num_experts_per_tok"), read_activation(config)
    shared = GatedMLP(key("shared_expert_intermediate_size", default=512)(config), act)
    router = Router(scoring="sigmoid", correction=True, scale=float(config.get("moe_routed_scaling_factor", 1.0)))
    return MoE(count, key("moe_intermediate_size", default=512)(config), k, act, shared=shared, router=router)


LAGUNA = LLAMA.derive(
    "laguna",
    inert=("num_attention_heads",),
    names={
        **SHARED,
        "layers.{i}.attn.gate": "layers.{i}.self_attn.g_proj",
        "layers.{i}.ffn.router.correction": "layers.{i}.mlp.experts.e_score_correction_bias",
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_expert"),
    },
    aliases={"experts.e_score": "gate.e_score", "mlp.shared_expert.": "mlp.shared_experts."},
    refuse={"moe_router_logit_softcapping": (0, None), "moe_apply_router_weight_on_input": (False, None)},
    heads=lambda c: tuple(c.get("num_attention_heads_per_layer") or ()) or c["num_attention_heads"],
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    ffn_bias=False,
    qk_norm="head",
    gate=lambda c: Gate("softplus", by_head=c.get("gating", True) in (True, "per-head")),
    window=_LAGUNA_WINDOWS,
    rope=lambda c: build_ropes(_LAGUNA_WINDOWS, True)(
        {**c, "rope_parameters": c.get("rope_parameters") or _LAGUNA_ROPES}
    ),
    context=key("max_position_embeddings", default=None),
    moe=mask_layers(_build_laguna_moe, find_sparse_layers(1)),
)
