"""Mixtures of experts after DeepSeek-V3 and Mixtral: other routers, shared experts, and layers without experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe, Reshape, Slice

from ....dsl import MLA, GatedMLP, MoE, RMSNorm, RoPE, Router
from ...tables import gguf
from ...tables.family import Config, Fetch, Template, key, mask_layers, read_required
from ...tables.rope_config import build_ropes, read_gguf_rope, read_rope, rope_with
from ...tables.settings import Settings
from ...tables.templates import find_experts, name_gated_mlp
from ..dense.llama import LLAMA, OLMO2, alternating, windows
from ..dense.llama_relatives import (
    ERNIE4_5,
    EVERY_FOURTH_GLOBAL,
    HUNYUAN,
    gguf_temperature,
    layer_ropes,
    llama4_temperature,
    rotary_where_local,
)
from .deepseek import (
    DEEPSEEK_GGUF,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GGUF_LATENT,
    corrected,
    experts_after,
    gguf_mla,
    mla,
    rows_of_heads,
)
from .mixtral import GRANITE_MOE, MIXTRAL, OLMOE, QWEN3_MOE, SPARSE, activation, granite_experts

_CORRECTED = {**SPARSE, "layers.{i}.ffn.router.correction": "layers.{i}.mlp.gate.e_score_correction_bias"}
SHARED = {**_CORRECTED, **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_experts")}


def _dots_types(config: Config) -> list[str]:
    full = config.get("max_window_layers", 62)
    return ["full_attention" if i < full else "sliding_attention" for i in range(config["num_hidden_layers"])]


DOTS1 = LLAMA.derive(
    "dots1",
    ffn_bias=False,
    names=SHARED,
    qk_norm="head",
    window=lambda c: windows(c, c.get("sliding_window", 4096), _dots_types(c)),
    moe=experts_after(corrected(renormalize=False, scale=1.0, groups=1, top_groups=1), first_dense=0),
    gguf=gguf.SPARSE_BASE.derive("dots1", moe=gguf.route_experts("sigmoid")),
)
GLM4_MOE = LLAMA.derive(
    "glm4_moe",
    ffn_bias=False,
    names=SHARED,
    kv_heads=key("num_key_value_heads", default=8),
    eps=key("rms_norm_eps", default=1e-5),
    rope=rope_with(partial_rotary_factor=0.5),
    out_bias=False,
    qk_norm=lambda c: "head" if c.get("use_qk_norm") else "none",
    moe=experts_after(corrected(scale=1.0, groups=1, top_groups=1), first_dense=1),
    gguf=gguf.SPARSE_BASE.derive("glm4moe", names=gguf.NORM_AFTER, moe=gguf.route_experts("sigmoid")),
)
SOLAR_OPEN = GLM4_MOE.derive(
    "solar_open",
    inert=("intermediate_size",),
    ffn=None,
    head_dim=key("head_dim", default=128),
    rope=rope_with(partial_rotary_factor=1.0, rope_theta=1e6),
    qk_norm="none",
    moe=experts_after(corrected(scale=1.0, groups=1, top_groups=1), first_dense=None),
    gguf=GLM4_MOE.gguf,
)
EXAONE_MOE = LLAMA.derive(
    "exaone_moe",
    ffn_bias=False,
    names={**SHARED, "layers.{i}.ffn.router.correction": "layers.{i}.mlp.e_score_correction_bias"},
    aliases={"mlp.e_score_correction": "mlp.gate.e_score_correction"},
    eps=key("rms_norm_eps", default=1e-5),
    qk_norm="head",
    qkv_bias=False,
    out_bias=False,
    window=EVERY_FOURTH_GLOBAL,
    rope=rotary_where_local(read_rope, EVERY_FOURTH_GLOBAL),
    moe=experts_after(corrected(groups=1, top_groups=1), first_dense=1),
    gguf=gguf.SPARSE_BASE.derive(
        "exaone-moe", window=gguf.build_windows(4), rope=gguf.build_local_ropes(4), moe=gguf.route_experts("sigmoid")
    ),
)
HY_V3 = LLAMA.derive(
    "hy_v3",
    names={
        **SPARSE,
        "layers.{i}.ffn.router": "layers.{i}.mlp.router.gate",
        "layers.{i}.ffn.router.correction": "layers.{i}.mlp.expert_bias",
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_mlp"),
    },
    kv_heads=key("num_key_value_heads", default=8),
    head_dim=key("head_dim", default=128),
    eps=key("rms_norm_eps", default=1e-5),
    rope=rope_with(rope_theta=11_158_840.0),
    qk_norm="head",
    moe=experts_after(
        corrected(scale=2.826, groups=1, top_groups=1, factor="router_scaling_factor"),
        first_dense=1,
        biased=True,
        shared=1,
    ),
)
_AFMOE_WINDOWS = alternating(4, window=1024, period="global_attn_every_n_layers")
AFMOE = LLAMA.derive(
    "afmoe",
    names={
        **SHARED,
        "layers.{i}.attn.gate": "layers.{i}.self_attn.gate_proj",
        "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.ffn_norm": "layers.{i}.pre_mlp_layernorm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_mlp_layernorm",
        "layers.{i}.ffn.router": "layers.{i}.mlp.router.gate",
        "layers.{i}.ffn.router.correction": "layers.{i}.mlp.expert_bias",
    },
    head_dim=key("head_dim", default=128),
    eps=key("rms_norm_eps", default=1e-5),
    arrangement="sandwich",
    embed_scale=lambda c: math.sqrt(c["hidden_size"]) if c.get("mup_enabled") else 1.0,
    gate=True,
    ffn_bias=False,
    qk_norm="head",
    window=_AFMOE_WINDOWS,
    rope=rotary_where_local(read_rope, _AFMOE_WINDOWS),
    moe=experts_after(corrected(scale=1.0, groups=1, top_groups=1, factor="route_scale"), first_dense=1, shared=2),
    gguf=gguf.SPARSE_BASE.derive(
        "afmoe",
        names={"layers.{i}.attn.gate": "blk.{i}.attn_gate"},
        arrangement="sandwich",
        embed_scale=lambda c: math.sqrt(c["embedding_length"]),  # files do not state it; llama.cpp always scales
        gate=True,
        window=gguf.build_windows(4),
        rope=gguf.build_local_ropes(4),
        moe=gguf.route_experts("sigmoid"),
    ),
)
FLEX_OLMO = OLMO2.derive(
    "flex_olmo",
    names=SPARSE,
    eps=key("rms_norm_eps", default=1e-6),
    rope=rope_with(rope_theta=5e5),
    moe=OLMOE.settings["moe"],
    transformers="FlexOlmoForCausalLM",
)


def _hunyuan_moe(config: Config) -> MoE:
    experts, hidden, k = read_required(config, "num_experts", "intermediate_size", "moe_topk")
    act = activation(config)
    experts, k = (n[0] if isinstance(n, list) and len(set(n)) == 1 else n for n in (experts, k))
    return MoE(experts, hidden, k, act, shared=GatedMLP(hidden, act))


HUNYUAN_MOE = HUNYUAN.derive(
    "hunyuan_v1_moe",
    names={
        **SPARSE,
        "layers.{i}.ffn.router": "layers.{i}.mlp.gate.wg",
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_mlp"),
    },
    moe=_hunyuan_moe,
    gguf=gguf.SPARSE_BASE.derive("hunyuan-moe", qk_norm_last=True, moe=gguf.route_experts("softmax", renormalize=True)),
)


def _rotary_dim(config: Config) -> RoPE:
    """Return RoPE for heads of which only `rotary_dim` features are rotated."""
    dim, head = config.get("rotary_dim"), key("head_dim", default=128)(config)
    partial = dim / head if dim else 1.0
    return rope_with(partial_rotary_factor=partial, rope_theta=5e6)(config)


def _sigmoid_mixtral(config: Config) -> MoE:
    moe: MoE = MIXTRAL.settings["moe"](config)
    return replace(moe, router=replace(moe.router, scoring="sigmoid", correction=True))


MINIMAX_M2 = MIXTRAL.derive(
    "minimax_m2",
    names={"layers.{i}.ffn.router.correction": "layers.{i}.block_sparse_moe.e_score_correction_bias"},
    head_dim=key("head_dim", default=128),
    eps=key("rms_norm_eps", default=1e-6),
    rope=_rotary_dim,
    qkv_bias=False,
    out_bias=False,
    window=None,
    qk_norm="full",
    moe=_sigmoid_mixtral,
    transformers="MiniMaxM2ForCausalLM",
    gguf=gguf.SPARSE_BASE.derive(
        "minimax-m2", from_keys={"qk_norm": lambda keys: "full"}, moe=gguf.route_experts("sigmoid", renormalize=True)
    ),
)


def flat(name: str) -> Template:
    """Return a template for a vector stored as a matrix with one row."""
    return lambda fetch, part, settings: Reshape(fetch(name), (-1,))


def _ernie_moe(config: Config) -> MoE:
    if config.get("moe_norm_min", 1e-12) > 1e-6:  # larger than the sum of the chosen experts' weights may be
        raise WeftError(f"moe_norm_min={config['moe_norm_min']} is not supported")
    hidden, shared, act = (
        key("moe_intermediate_size")(config),
        config.get("moe_num_shared_experts", 2),
        activation(config),
    )
    experts, k = key("moe_num_experts", "num_experts")(config), key("moe_k", "num_experts_per_tok")(config)
    beside = GatedMLP(hidden * shared, act, config.get("use_bias") or False) if shared else None
    return MoE(experts, hidden, k, act, shared=beside, router=Router(correction=True))


def _ernie_sparse(config: Config) -> list[bool]:
    layers, every = key("num_hidden_layers")(config), config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return [(i + 1) % every == 0 and first <= i <= last for i in range(layers)]


ERNIE4_5_MOE = ERNIE4_5.derive(
    "ernie4_5_moe",
    names={**SHARED, "layers.{i}.ffn.router.correction": flat("layers.{i}.mlp.moe_statics.e_score_correction_bias")},
    kv_heads=key("num_key_value_heads", default=4),
    head_dim=key("head_dim", default=None),
    head_bias=key("use_bias", default=False),
    moe=mask_layers(_ernie_moe, _ernie_sparse),
    gguf=gguf.SPARSE_BASE.derive(
        "ernie4_5-moe",
        names={"layers.{i}.ffn.router.correction": gguf.reshape_tensor("blk.{i}.exp_probs_b.bias", -1)},
        rope=gguf.build_interleaved_rope,
        moe=gguf.route_experts("softmax", renormalize=True, correction=True),
    ),
)


def _granite_shared(config: Config) -> Any:
    if config.get("shared_intermediate_size"):
        return granite_experts(config)
    return GRANITE_MOE.settings["moe"](config)


def _half_of_shared(index: int) -> Template:
    """Return a template for gate (`index` 0) or up (1) of the shared expert, stored in one tensor."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        shared = find_experts(settings).shared
        assert isinstance(shared, GatedMLP)
        rows = shared.hidden
        return Slice(fetch(f"layers.{{i}}.shared_mlp.input_linear.{part}"), 0, index * rows, (index + 1) * rows)

    return template


GRANITE_MOE_SHARED = GRANITE_MOE.derive(
    "granitemoeshared",
    names={
        "layers.{i}.ffn.shared.gate": _half_of_shared(0),
        "layers.{i}.ffn.shared.up": _half_of_shared(1),
        "layers.{i}.ffn.shared.down": "layers.{i}.shared_mlp.output_linear",
    },
    moe=_granite_shared,
    gguf=GRANITE_MOE.gguf,
)
GRANITE_MOE_SWA = GRANITE_MOE_SHARED.derive(
    "granitemoe_swa",
    names={"layers.{i}.attn.sinks": "layers.{i}.self_attn.sinks"},
    window=alternating(4, first_global=True, window=128),
    sinks=True,
    rope=layer_ropes,
)


_MELLUM_WINDOWS = alternating(1, window=1024)  # all layers are global without layer_types


def _mellum_sparse(config: Config) -> list[bool]:
    types = config.get("mlp_layer_types") or ["sparse"] * key("num_hidden_layers")(config)
    return [kind == "sparse" for kind in types]


MELLUM = QWEN3_MOE.derive(
    "mellum",
    inert=("num_experts", "num_local_experts"),
    head_dim=key("head_dim", default=128),
    context=key("max_position_embeddings", default=None),
    window=_MELLUM_WINDOWS,
    rope=build_ropes(_MELLUM_WINDOWS, bases=(lambda c: 5e5, lambda c: 1e4)),
    moe=mask_layers(
        lambda c: QWEN3_MOE.settings["moe"](
            {"norm_topk_prob": True, **c, "decoder_sparse_step": 1, "mlp_only_layers": []}
        )[0],
        _mellum_sparse,
    ),
)

# -- multi-head latent attention

YOUTU = DEEPSEEK_V3.derive("youtu", moe=None, tie=key("tie_word_embeddings", default=True))
GLM4_MOE_LITE = DEEPSEEK_V3.derive(
    "glm4_moe_lite",
    eps=key("rms_norm_eps", default=1e-5),
    moe=experts_after(corrected(scale=1.8, groups=1, top_groups=1), first_dense=1),
    gguf=DEEPSEEK_GGUF,
)


def _softmax_groups(config: Config) -> Router:
    router: Router = corrected(scale=1.0, groups=1, top_groups=1)(config)
    return replace(router, scoring="softmax", correction=False)


def _mistral4_mla(config: Config) -> MLA:
    return replace(mla(config), temperature=llama4_temperature(config))


MISTRAL4 = DEEPSEEK_V2.derive(
    "mistral4",
    ffn_bias=False,
    refuse={"norm_topk_prob": None, "topk_method": None, "scoring_func": None},
    mixer=_mistral4_mla,
    moe=experts_after(_softmax_groups, first_dense=0),
    gguf=DEEPSEEK_GGUF.derive(
        "mistral4",
        mixer=lambda c: replace(gguf_mla(c), temperature=gguf_temperature(c)),
        moe=gguf.route_experts("softmax", group_score="top2"),
    ),
)


def _minicpm3_mla(config: Config) -> MLA:
    width, heads = read_required(config, "hidden_size", "num_attention_heads")
    value = config.get("v_head_dim") or width // heads
    return mla({"rope_interleave": False, **config, "v_head_dim": value})


def _gguf_minicpm3_mla(config: Config) -> MLA:
    names = (f"attention.{n}" for n in ("head_count", "kv_lora_rank", "key_length", "layer_norm_rms_epsilon"))
    heads, rank, width, eps = read_required(config, *names)
    rope, rotary = read_gguf_rope(config), key("rope.dimension_count")(config)
    value = config.get("attention.value_length") or key("embedding_length")(config) // heads
    return MLA(heads, rank, width - rotary, rotary, value, rope, config.get("attention.q_lora_rank"), RMSNorm(eps))


MINICPM3 = DEEPSEEK_V2.derive(
    "minicpm3",
    inert=("num_key_value_heads", "head_dim"),
    refuse={"norm_topk_prob": None, "topk_method": None, "scoring_func": None},
    eps=key("rms_norm_eps", default=1e-5),
    mixer=_minicpm3_mla,
    moe=None,
    embed_scale=key("scale_emb", default=12),
    residual_scale=lambda c: (
        (c.get("scale_depth", 1.4) or math.sqrt(c["num_hidden_layers"])) / math.sqrt(c["num_hidden_layers"])
    ),
    logit_scale=lambda c: (c.get("dim_model_base") or c["hidden_size"]) / c["hidden_size"],
    tie=key("tie_word_embeddings", default=True),
    gguf=gguf.BASE.derive(  # files do not state the scales
        "minicpm3",
        inert=(*gguf.BASE.inert, "attention.head_count_kv"),
        names={
            **GGUF_LATENT,
            "layers.{i}.attn.k_up.weight": rows_of_heads("blk.{i}.attn_kv_b.weight", "k"),
            "layers.{i}.attn.v_up.weight": rows_of_heads("blk.{i}.attn_kv_b.weight", "v"),
        },
        kv_heads=None,
        head_dim=None,
        rope=None,
        mixer=_gguf_minicpm3_mla,
        embed_scale=12.0,
        residual_scale=lambda c: 1.4 / math.sqrt(c["block_count"]),
        logit_scale=lambda c: 256 / c["embedding_length"],
    ),
)
