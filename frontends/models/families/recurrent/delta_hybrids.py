"""Hybrids of attention with the gated delta rule: OLMo Hybrid, Kimi Linear, and the parts they share with Qwen's."""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Concat, Recipe, Reshape

from ....dsl import MLA, GatedDeltaNet, RMSNorm
from ...tables import gguf
from ...tables.family import BIASES, Config, Fetch, Names, key, read_required, set_all, template
from ...tables.rope_config import read_rope
from ...tables.settings import Settings
from ...tables.templates import name_gated_mlp, reshape_tensor
from ..dense.llama import LLAMA
from ..experts.deepseek import DEEPSEEK_GGUF, make_moe_rule, make_v3_router, name_latent_attention
from ..experts.mixtral import map_expert_names
from .mamba import convert_rates, reshape_conv

RECURRENT = "linear_attention"


def find_delta_rule(settings: Settings) -> GatedDeltaNet:
    """Return the delta rule of the first layer that has one; its sizes are equal in all layers."""
    return next(mixer for mixer in settings.mixer if isinstance(mixer, GatedDeltaNet))


def _count_channels(settings: Settings) -> int:
    keys, values = find_delta_rule(settings).widths
    return 2 * keys + values


def build_delta_rule(config: Config, groups: int = 16, heads: int = 32, **options: Any) -> GatedDeltaNet:
    """Return the delta rule of a config; `groups`, `heads` are defaults, `options` arguments of `GatedDeltaNet`."""
    return GatedDeltaNet(
        config.get("linear_num_value_heads") or heads,
        config.get("linear_key_head_dim") or 128,
        config.get("linear_value_head_dim") or 128,
        config.get("linear_num_key_heads") or groups,
        config.get("linear_conv_kernel_dim", 4),
        **options,
    )


def read_layer_kinds(config: Config, every: int = 4) -> list[str]:
    """Return each layer's type: layer_types, by default each `every`-th full_attention, all others linear_attention."""
    layers = range(key("num_hidden_layers")(config))
    plain = [RECURRENT if (i + 1) % every else "full_attention" for i in layers]
    types: list[str] = config.get("layer_types") or plain
    return types


GDN: Names = {
    "layers.{i}.attn.conv.weight": reshape_conv("layers.{i}.linear_attn.conv1d.weight", _count_channels),
    "layers.{i}.attn.dt.bias": "layers.{i}.linear_attn.dt_bias",
    "layers.{i}.attn.a_log": "layers.{i}.linear_attn.A_log",
    "layers.{i}.attn.norm": "layers.{i}.linear_attn.norm",
    "layers.{i}.attn.out": "layers.{i}.linear_attn.out_proj",
}


# -- separate projections of q, k and v


@template
def _concat_qkv(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return the concatenated tensors of q, k and v, whose names are `name` with {x} replaced by the letter."""
    return Concat(tuple(fetch(f"{name.replace('{x}', x)}.{part}") for x in "qkv"))


@template
def _concat_taps(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return the kernels [channels, width] of q, k and v, stored [channels, 1, width] in one tensor or in three."""
    each = _concat_qkv(name)
    fused_name = name.replace("{x}_", "")
    stored = fetch(f"{fused_name}.{part}") if fetch.has(f"{fused_name}.{part}") else each(fetch, part, settings)
    return Reshape(stored, (_count_channels(settings), -1))


def _build_olmo_mixers(config: Config) -> tuple[GatedDeltaNet | None, ...]:
    heads = key("num_attention_heads")(config)
    groups = config.get("linear_num_key_heads") or heads
    keys = config.get("linear_key_head_dim") or int(0.75 * key("hidden_size")(config) / groups)
    sizes = {"linear_key_head_dim": keys, "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * keys}
    options = {"norm": RMSNorm(1e-5), "negative": config.get("linear_allow_neg_eigval", True)}
    delta = build_delta_rule({**config, **sizes}, groups, heads, **options)
    return tuple(delta if kind == RECURRENT else None for kind in _read_olmo_kinds(config))


def _read_olmo_kinds(config: Config) -> list[str]:
    kinds = read_layer_kinds(config)
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


OLMO_HYBRID = LLAMA.derive(
    "olmo_hybrid",
    names={
        "layers.{i}.attn_norm": "layers.{i}.attention_layer_norm",
        "layers.{i}.ffn_norm": "layers.{i}.feedforward_layer_norm",
        "layers.{i}.attn_post_norm": "layers.{i}.feedforward_layer_norm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
        **GDN,
        "layers.{i}.attn.qkv": _concat_qkv("layers.{i}.linear_attn.{x}_proj"),
        "layers.{i}.attn.conv": _concat_taps("layers.{i}.linear_attn.{x}_conv1d"),
        "layers.{i}.attn.conv.weight": None,
        "layers.{i}.attn.beta": "layers.{i}.linear_attn.b_proj",
        "layers.{i}.attn.dt.weight": "layers.{i}.linear_attn.a_proj.weight",
        "layers.{i}.attn.gate": "layers.{i}.linear_attn.g_proj",
        "layers.{i}.attn.norm": "layers.{i}.linear_attn.o_norm",
        "layers.{i}.attn.out": "layers.{i}.linear_attn.o_proj",
    },
    aliases={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
    refuse={"hidden_act": ("silu", "swish", None)},
    arrangement=lambda c: tuple("pre" if kind == RECURRENT else "post_sublayer" for kind in _read_olmo_kinds(c)),
    qk_norm="full",
    ffn_bias=False,
    rope=lambda c: None if (c.get("rope_parameters") or {}).get("rope_theta", 0.0) is None else read_rope(c),
    mixer=_build_olmo_mixers,
)


def _find_kimi_delta_layers(config: Config) -> list[bool]:
    """Return for each layer whether it has the delta rule: by layer_types, else by kda_layers, which counts from 1. By
    default all have it except layers 4, 8, …, counted from 0."""
    layers, linear_config = range(key("num_hidden_layers")(config)), config.get("linear_attn_config") or {}
    if config.get("layer_types"):
        return [kind == RECURRENT for kind in config["layer_types"]]
    if "full_attn_layers" in linear_config and "kda_layers" in linear_config:
        return [i + 1 in linear_config["kda_layers"] for i in layers]
    return [i == 0 or i % 4 != 0 for i in layers]


def _build_kimi_mixers(config: Config) -> tuple[GatedDeltaNet | MLA, ...]:
    linear_config, eps = config.get("linear_attn_config") or {}, config.get("rms_norm_eps", 1e-5)
    size = linear_config.get("head_dim") or config.get("linear_head_dim", 128)
    delta = GatedDeltaNet(
        linear_config.get("num_heads") or config.get("linear_num_heads", 32),
        size,
        conv=linear_config.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4),
        gate="sigmoid",
        norm=RMSNorm(eps),
        per_key=True,
        rank=size,
    )
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, plain, shared, value = read_required(config, *names)
    latent = MLA(heads, rank, plain, shared, value, None, config.get("q_lora_rank"), RMSNorm(1e-6))
    return tuple(delta if recurrent else latent for recurrent in _find_kimi_delta_layers(config))


def _rename_kimi_keys(config: Config) -> Config:
    """Return the config with copies of its keys under the names that DeepSeek-V3 uses."""
    our_names = {
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
    return {
        "n_shared_experts": 1,
        **{name: config[theirs] for name, theirs in our_names.items() if theirs in config},
        **config,
    }


def _build_gguf_kimi_mixers(config: Config) -> tuple[GatedDeltaNet | MLA, ...]:
    names = ("ssm.conv_kernel", "kda.head_dim", "attention.layer_norm_rms_epsilon", "attention.head_count_kv")
    conv, size, eps, kv_heads = read_required(config, *names)
    heads, rotary = read_required(config, "attention.head_count", "rope.dimension_count")
    widths = (f"attention.{n}" for n in ("kv_lora_rank", "key_length_mla", "value_length_mla"))
    rank, width, value = read_required(config, *widths)
    norm, queries = RMSNorm(1e-6), config.get("attention.q_lora_rank")
    delta = GatedDeltaNet(heads, size, conv=conv, gate="sigmoid", norm=RMSNorm(eps), per_key=True, rank=size)
    latent = MLA(heads, rank, width - rotary, rotary, value, None, queries, norm)
    return tuple(latent if groups else delta for groups in kv_heads)


_KIMI = "layers.{i}.block_sparse_moe"
_KIMI_MOE = make_moe_rule(make_v3_router(scale=2.446, groups=1, top_groups=1), first_dense=1)
KIMI_LINEAR = LLAMA.derive(
    "kimi_linear",
    inert=(
        *("num_key_value_heads", "head_dim", "layer_types", "mlp_layer_types", "num_local_experts", "n_group"),
        *("num_experts_per_tok", "n_shared_experts", "norm_topk_prob", "linear_attn_config.full_attn_layers"),
        *("linear_head_dim", "linear_num_heads", "max_position_embeddings"),
    ),
    names={
        "layers.{i}.attn.qkv": _concat_qkv("layers.{i}.self_attn.{x}_proj"),
        "layers.{i}.attn.conv": _concat_taps("layers.{i}.self_attn.{x}_conv1d"),
        "layers.{i}.attn.beta": "layers.{i}.self_attn.b_proj",
        "layers.{i}.attn.dt_down": "layers.{i}.self_attn.f_a_proj",
        "layers.{i}.attn.dt.weight": "layers.{i}.self_attn.f_b_proj.weight",
        "layers.{i}.attn.dt.bias": "layers.{i}.self_attn.dt_bias",
        "layers.{i}.attn.a_log": reshape_tensor("layers.{i}.self_attn.A_log", -1),
        "layers.{i}.attn.gate_down": "layers.{i}.self_attn.g_a_proj",
        "layers.{i}.attn.gate": "layers.{i}.self_attn.g_b_proj",
        "layers.{i}.attn.norm": "layers.{i}.self_attn.o_norm",
        "layers.{i}.attn.out": "layers.{i}.self_attn.o_proj",
        **name_latent_attention("layers.{i}.attn", "layers.{i}.self_attn"),
        **name_gated_mlp("layers.{i}.ffn", _KIMI),
        "layers.{i}.ffn.router": f"{_KIMI}.gate",
        "layers.{i}.ffn.router.correction": f"{_KIMI}.gate.e_score_correction_bias",
        **map_expert_names(f"{_KIMI}.experts", "w1", "w3", "w2"),
        **name_gated_mlp("layers.{i}.ffn.shared", f"{_KIMI}.shared_experts"),
    },
    aliases={"block_sparse_moe": "mlp"},
    refuse={"attention_bias": (False, None), "hidden_act": ("silu", "swish", None)},  # also of the convolutions
    **set_all(False, *BIASES),
    **set_all(None, "kv_heads", "head_dim", "rope"),
    defaults={"rms_norm_eps": 1e-5},
    tie=False,  # whatever the config states
    context=key("model_max_length", "max_position_embeddings", default=None),
    mixer=_build_kimi_mixers,
    moe=lambda c: _KIMI_MOE(_rename_kimi_keys(c)),
    gguf=DEEPSEEK_GGUF.derive(
        "kimi-linear",
        inert=(*DEEPSEEK_GGUF.inert, "attention.key_length"),  # latent attention has a separate key for it
        names={
            "layers.{i}.attn.qkv": _concat_qkv("blk.{i}.attn_{x}"),
            "layers.{i}.attn.conv": _concat_taps("blk.{i}.ssm_conv1d_{x}"),
            "layers.{i}.attn.beta": "blk.{i}.ssm_beta",
            "layers.{i}.attn.dt_down": "blk.{i}.ssm_f_a",
            "layers.{i}.attn.dt.weight": "blk.{i}.ssm_f_b.weight",
            "layers.{i}.attn.dt.bias": "blk.{i}.ssm_dt.bias",
            "layers.{i}.attn.a_log": convert_rates(-1),
            "layers.{i}.attn.gate_down": "blk.{i}.ssm_g_a",
            "layers.{i}.attn.gate": "blk.{i}.ssm_g_b",
            "layers.{i}.attn.norm": "blk.{i}.ssm_norm",
            "layers.{i}.attn.out": "blk.{i}.attn_output",
        },
        **set_all(None, "kv_heads", "head_dim", "rope"),
        mixer=_build_gguf_kimi_mixers,
        moe=gguf.route_experts("sigmoid", renormalize=True),
    ),
)
