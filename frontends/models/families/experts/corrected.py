"""Mixtures of experts after DeepSeek-V3 and Mixtral: other routers, shared experts, and layers without experts."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.ir.errors import WeftError

from ....dsl import MLA, GatedMLP, MoE, RMSNorm, RoPE, Router
from ...tables import gguf
from ...tables.family import BIASES, Config, key, mask_layers, read_required, set_all
from ...tables.rope_config import build_ropes, read_gguf_rope, read_rope, rope_with
from ...tables.templates import name_gated_mlp, reshape_tensor, slice_rows
from ..dense.llama import LLAMA, OLMO2, alternate_windows, pick_windows
from ..dense.llama_relatives import (
    ERNIE4_5,
    EVERY_FOURTH_GLOBAL,
    HUNYUAN,
    build_gguf_temperature,
    build_layer_ropes,
    build_llama4_temperature,
    rotate_local,
)
from .deepseek import (
    DEEPSEEK_GGUF,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GGUF_LATENT,
    build_gguf_mla,
    build_mla,
    find_sparse_layers,
    make_moe_rule,
    make_v3_router,
    slice_head_rows,
)
from .mixtral import GRANITE_MOE, MIXTRAL, OLMOE, QWEN3_MOE, SPARSE, build_granite_experts, read_activation

_CORRECTED = {**SPARSE, "layers.{i}.ffn.router.correction": "layers.{i}.mlp.gate.e_score_correction_bias"}
SHARED = {**_CORRECTED, **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_experts")}


def _read_dots_types(config: Config) -> list[str]:
    full = config.get("max_window_layers", 62)
    return ["full_attention" if i < full else "sliding_attention" for i in range(config["num_hidden_layers"])]


DOTS1 = LLAMA.derive(
    "dots1",
    ffn_bias=False,
    names=SHARED,
    qk_norm="head",
    window=lambda c: pick_windows(c, c.get("sliding_window", 4096), _read_dots_types(c)),
    moe=make_moe_rule(make_v3_router(renormalize=False, scale=1.0, groups=1, top_groups=1), first_dense=0),
    gguf=gguf.SPARSE_BASE.derive("dots1", moe=gguf.route_experts("sigmoid")),
)
GLM4_MOE = LLAMA.derive(
    "glm4_moe",
    ffn_bias=False,
    names=SHARED,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    rope=rope_with(partial_rotary_factor=0.5),
    out_bias=False,
    qk_norm=lambda c: "head" if c.get("use_qk_norm") else "none",
    moe=make_moe_rule(make_v3_router(scale=1.0, groups=1, top_groups=1), first_dense=1),
    gguf=gguf.SPARSE_BASE.derive("glm4moe", names=gguf.NORM_AFTER, moe=gguf.route_experts("sigmoid")),
)
SOLAR_OPEN = GLM4_MOE.derive(
    "solar_open",
    inert=("intermediate_size",),
    ffn=None,
    defaults={"head_dim": 128},
    rope=rope_with(partial_rotary_factor=1.0, rope_theta=1e6),
    qk_norm="none",
    moe=make_moe_rule(make_v3_router(scale=1.0, groups=1, top_groups=1), first_dense=None),
    gguf=GLM4_MOE.gguf,
)
EXAONE_MOE = LLAMA.derive(
    "exaone_moe",
    **set_all(False, *BIASES),
    names={**SHARED, "layers.{i}.ffn.router.correction": "layers.{i}.mlp.e_score_correction_bias"},
    aliases={"mlp.e_score_correction": "mlp.gate.e_score_correction"},
    defaults={"rms_norm_eps": 1e-5},
    qk_norm="head",
    window=EVERY_FOURTH_GLOBAL,
    rope=rotate_local(read_rope, EVERY_FOURTH_GLOBAL),
    moe=make_moe_rule(make_v3_router(groups=1, top_groups=1), first_dense=1),
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
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    rope=rope_with(rope_theta=11_158_840.0),
    qk_norm="head",
    moe=make_moe_rule(
        make_v3_router(scale=2.826, groups=1, top_groups=1, factor="router_scaling_factor"),
        first_dense=1,
        biased=True,
        shared=1,
    ),
)
_AFMOE_WINDOWS = alternate_windows(4, window=1024, period="global_attn_every_n_layers")
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
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    arrangement="sandwich",
    embed_scale=lambda c: math.sqrt(c["hidden_size"]) if c.get("mup_enabled") else 1.0,
    gate=True,
    ffn_bias=False,
    qk_norm="head",
    window=_AFMOE_WINDOWS,
    rope=rotate_local(read_rope, _AFMOE_WINDOWS),
    moe=make_moe_rule(make_v3_router(scale=1.0, groups=1, top_groups=1, factor="route_scale"), first_dense=1, shared=2),
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
    defaults={"rms_norm_eps": 1e-6},
    rope=rope_with(rope_theta=5e5),
    moe=OLMOE.settings["moe"],
    transformers="FlexOlmoForCausalLM",
)


def _build_hunyuan_moe(config: Config) -> MoE:
    experts, hidden, k = read_required(config, "num_experts", "intermediate_size", "moe_topk")
    act = read_activation(config)
    experts, k = (n[0] if isinstance(n, list) and len(set(n)) == 1 else n for n in (experts, k))
    return MoE(experts, hidden, k, act, shared=GatedMLP(hidden, act))


HUNYUAN_MOE = HUNYUAN.derive(
    "hunyuan_v1_moe",
    names={
        **SPARSE,
        "layers.{i}.ffn.router": "layers.{i}.mlp.gate.wg",
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_mlp"),
    },
    moe=_build_hunyuan_moe,
    gguf=gguf.SPARSE_BASE.derive("hunyuan-moe", qk_norm_last=True, moe=gguf.route_experts("softmax", renormalize=True)),
)


def _build_partial_rope(config: Config) -> RoPE:
    """Return the RoPE, which rotates the first `rotary_dim` features of each head; all if the config lacks it."""
    dim, head = config.get("rotary_dim"), key("head_dim", default=128)(config)
    partial = dim / head if dim else 1.0
    return rope_with(partial_rotary_factor=partial, rope_theta=5e6)(config)


def _build_sigmoid_moe(config: Config) -> MoE:
    moe: MoE = MIXTRAL.settings["moe"](config)
    return replace(moe, router=replace(moe.router, scoring="sigmoid", correction=True))


MINIMAX_M2 = MIXTRAL.derive(
    "minimax_m2",
    names={"layers.{i}.ffn.router.correction": "layers.{i}.block_sparse_moe.e_score_correction_bias"},
    defaults={"head_dim": 128, "rms_norm_eps": 1e-6},
    rope=_build_partial_rope,
    window=None,
    qk_norm="full",
    moe=_build_sigmoid_moe,
    transformers="MiniMaxM2ForCausalLM",
    gguf=gguf.SPARSE_BASE.derive(
        "minimax-m2", from_keys={"qk_norm": lambda keys: "full"}, moe=gguf.route_experts("sigmoid", renormalize=True)
    ),
)


def _build_ernie_moe(config: Config) -> MoE:
    if config.get("moe_norm_min", 1e-12) > 1e-6:  # larger than the sum of the chosen experts' weights may be
        raise WeftError(f"moe_norm_min={config['moe_norm_min']} must be at most 1e-6")
    hidden, act = key("moe_intermediate_size")(config), read_activation(config)
    shared = config.get("moe_num_shared_experts", 2)
    experts, k = key("moe_num_experts", "num_experts")(config), key("moe_k", "num_experts_per_tok")(config)
    beside = GatedMLP(hidden * shared, act, config.get("use_bias") or False) if shared else None
    return MoE(experts, hidden, k, act, shared=beside, router=Router(correction=True))


def _find_ernie_sparse_layers(config: Config) -> list[bool]:
    layers, every = key("num_hidden_layers")(config), config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return [(i + 1) % every == 0 and first <= i <= last for i in range(layers)]


ERNIE4_5_MOE = ERNIE4_5.derive(
    "ernie4_5_moe",
    names={
        **SHARED,
        "layers.{i}.ffn.router.correction": reshape_tensor("layers.{i}.mlp.moe_statics.e_score_correction_bias", -1),
    },
    defaults={"num_key_value_heads": 4},
    head_dim=key("head_dim", default=None),
    head_bias=key("use_bias", default=False),
    moe=mask_layers(_build_ernie_moe, _find_ernie_sparse_layers),
    gguf=gguf.SPARSE_BASE.derive(
        "ernie4_5-moe",
        names={"layers.{i}.ffn.router.correction": reshape_tensor("blk.{i}.exp_probs_b.bias", -1)},
        rope=gguf.build_interleaved_rope,
        moe=gguf.route_experts("softmax", renormalize=True, correction=True),
    ),
)
GRANITE_MOE_SHARED = GRANITE_MOE.derive(
    "granitemoeshared",
    names={
        **{
            f"layers.{{i}}.ffn.shared.{x}": slice_rows(
                "layers.{i}.shared_mlp.input_linear", index, lambda s: s.find_first("moe").shared.hidden
            )
            for index, x in enumerate(("gate", "up"))
        },
        "layers.{i}.ffn.shared.down": "layers.{i}.shared_mlp.output_linear",
    },
    moe=lambda c: (build_granite_experts if c.get("shared_intermediate_size") else GRANITE_MOE.settings["moe"])(c),
    gguf=GRANITE_MOE.gguf,
)
GRANITE_MOE_SWA = GRANITE_MOE_SHARED.derive(
    "granitemoe_swa",
    names={"layers.{i}.attn.sinks": "layers.{i}.self_attn.sinks"},
    window=alternate_windows(4, first_global=True, window=128),
    sinks=True,
    rope=build_layer_ropes,
)
_MELLUM_WINDOWS = alternate_windows(1, window=1024)  # all layers are global without layer_types
MELLUM = QWEN3_MOE.derive(
    "mellum",
    inert=("num_experts", "num_local_experts"),
    defaults={"head_dim": 128},
    context=key("max_position_embeddings", default=None),
    window=_MELLUM_WINDOWS,
    rope=build_ropes(_MELLUM_WINDOWS, bases=(lambda c: 5e5, lambda c: 1e4)),
    moe=mask_layers(
        lambda c: QWEN3_MOE.settings["moe"](
            {"norm_topk_prob": True, **c, "decoder_sparse_step": 1, "mlp_only_layers": []}
        )[0],
        find_sparse_layers(None),
    ),
)

# -- multi-head latent attention

YOUTU = DEEPSEEK_V3.derive("youtu", moe=None, defaults={"tie_word_embeddings": True})
GLM4_MOE_LITE = DEEPSEEK_V3.derive(
    "glm4_moe_lite",
    defaults={"rms_norm_eps": 1e-5},
    moe=make_moe_rule(make_v3_router(scale=1.8, groups=1, top_groups=1), first_dense=1),
    gguf=DEEPSEEK_GGUF,
)


def _build_softmax_router(config: Config) -> Router:
    return replace(make_v3_router(scale=1.0, groups=1, top_groups=1)(config), scoring="softmax", correction=False)


MISTRAL4 = DEEPSEEK_V2.derive(
    "mistral4",
    ffn_bias=False,
    refuse={"norm_topk_prob": None, "topk_method": None, "scoring_func": None},
    mixer=lambda c: replace(build_mla(c), temperature=build_llama4_temperature(c)),
    moe=make_moe_rule(_build_softmax_router, first_dense=0),
    gguf=DEEPSEEK_GGUF.derive(
        "mistral4",
        mixer=lambda c: replace(build_gguf_mla(c), temperature=build_gguf_temperature(c)),
        moe=gguf.route_experts("softmax", group_score="top2"),
    ),
)


def _build_minicpm3_mla(config: Config) -> MLA:
    width, heads = read_required(config, "hidden_size", "num_attention_heads")
    value = config.get("v_head_dim") or width // heads
    return build_mla({"rope_interleave": False, **config, "v_head_dim": value})


def _build_gguf_minicpm3_mla(config: Config) -> MLA:
    names = (f"attention.{n}" for n in ("head_count", "kv_lora_rank", "key_length", "layer_norm_rms_epsilon"))
    heads, rank, width, eps = read_required(config, *names)
    rope, rotary = read_gguf_rope(config), key("rope.dimension_count")(config)
    value = config.get("attention.value_length") or key("embedding_length")(config) // heads
    return MLA(heads, rank, width - rotary, rotary, value, rope, config.get("attention.q_lora_rank"), RMSNorm(eps))


MINICPM3 = DEEPSEEK_V2.derive(
    "minicpm3",
    inert=("num_key_value_heads", "head_dim"),
    refuse={"norm_topk_prob": None, "topk_method": None, "scoring_func": None},
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    mixer=_build_minicpm3_mla,
    moe=None,
    embed_scale=key("scale_emb", default=12),
    residual_scale=lambda c: (
        (c.get("scale_depth", 1.4) or math.sqrt(c["num_hidden_layers"])) / math.sqrt(c["num_hidden_layers"])
    ),
    logit_scale=lambda c: (c.get("dim_model_base") or c["hidden_size"]) / c["hidden_size"],
    gguf=gguf.BASE.derive(  # files do not state the scales
        "minicpm3",
        inert=(*gguf.BASE.inert, "attention.head_count_kv"),
        names={
            **GGUF_LATENT,
            "layers.{i}.attn.k_up.weight": slice_head_rows("blk.{i}.attn_kv_b.weight", "k"),
            "layers.{i}.attn.v_up.weight": slice_head_rows("blk.{i}.attn_kv_b.weight", "v"),
        },
        **set_all(None, "kv_heads", "head_dim", "rope"),
        mixer=_build_gguf_minicpm3_mla,
        embed_scale=12.0,
        residual_scale=lambda c: 1.4 / math.sqrt(c["block_count"]),
        logit_scale=lambda c: 256 / c["embedding_length"],
    ),
)
