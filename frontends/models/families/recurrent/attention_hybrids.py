"""Hybrids of attention with short convolutions or state spaces: LFM2, Falcon-H1, Nemotron-H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Concat, Full, Recipe, Scale

from ....dsl import MLP, Attention, Mamba2, MoE, ParallelHybrid, RMSNorm, Router, ShortConv
from ...tables import gguf
from ...tables.family import BIASES, Config, Fetch, Names, key, mask_layers, read_required, set_all, template
from ...tables.rope_config import read_gguf_rope, read_rope, rope_with
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import scale_linear
from ..dense.llama import LLAMA
from ..experts.deepseek import make_v3_router
from ..experts.mixtral import map_expert_names, stack_experts
from .mamba import HEADED_STATES, NO_LIMIT, build_gguf_mamba2, map_mamba2_names, reshape_conv

# -- LFM2


def _find_lfm2_convs(config: Config) -> Iterator[bool]:
    layers = range(key("num_hidden_layers")(config))
    attention = config.get("full_attn_idxs")
    plain = ["conv" if attention is not None and i not in attention else "full_attention" for i in layers]
    return (kind == "conv" for kind in config.get("layer_types") or plain)


def _read_lfm2_width(config: Config) -> int:
    """Return the width of feed-forwards: with block_auto_adjust_ff_dim 2/3 of the stated one, scaled and rounded up."""
    width = int(key("block_ff_dim", "intermediate_size")(config))
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width, multiple = int(2 * width / 3), config.get("block_multiple_of", 256)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _build_lfm2_experts(config: Config) -> MoE:
    """Return the experts, with a sigmoid router; unlike transformers, 1e-6 is not added to the sum of scores."""
    experts, hidden, k = read_required(config, "num_experts", "moe_intermediate_size", "num_experts_per_tok")
    router = Router(
        scoring="sigmoid",
        correction=config.get("use_expert_bias", True),
        renormalize=config.get("norm_topk_prob", True),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    return MoE(experts, hidden, k, router=router)


def _find_gguf_short_convs(config: Config) -> Iterator[bool]:
    heads = config["attention.head_count_kv"]
    return (n == 0 for n in (heads if isinstance(heads, list) else [heads] * config["block_count"]))


_LFM2_GGUF = gguf.SPARSE_BASE.derive(
    "lfm2",
    names={
        **{f"layers.{{i}}.attn.{x}": f"blk.{{i}}.shortconv.{x}_proj" for x in ("in", "out")},
        "layers.{i}.attn.conv": "blk.{i}.shortconv.conv",
        "final_norm": "token_embd_norm",
    },
    aliases={"token_embd_norm": "output_norm"},  # another name in some files
    from_keys={"qk_norm": lambda keys: "head"},
    kv_heads=gguf.find_max_kv_heads,
    window=lambda c: c.get("attention.sliding_window") or None,
    mixer=mask_layers(lambda c: ShortConv(key("shortconv.l_cache")(c), False), _find_gguf_short_convs),
)
LFM2 = LLAMA.derive(
    "lfm2",
    names={
        "layers.{i}.attn_norm": "layers.{i}.operator_norm",
        "layers.{i}.attn.o": "layers.{i}.self_attn.out_proj",
        **{f"layers.{{i}}.attn.{x}_norm": f"layers.{{i}}.self_attn.{x}_layernorm" for x in "qk"},
        **{f"layers.{{i}}.attn.{x}": f"layers.{{i}}.conv.{x}_proj" for x in ("in", "out")},
        "layers.{i}.attn.conv.weight": reshape_conv("layers.{i}.conv.conv.weight", lambda settings: settings.dim),
        "layers.{i}.attn.conv.bias": "layers.{i}.conv.conv.bias",
        "layers.{i}.ffn_norm": "layers.{i}.ffn_norm",
        "layers.{i}.ffn.gate": "layers.{i}.feed_forward.w1",
        "layers.{i}.ffn.up": "layers.{i}.feed_forward.w3",
        "layers.{i}.ffn.down": "layers.{i}.feed_forward.w2",
        "final_norm": "embedding_norm",
    },
    defaults={"num_key_value_heads": 8},
    ffn=_read_lfm2_width,
    activation="silu",
    eps=key("norm_eps", default=1e-5),
    **set_all(False, *BIASES),
    qk_norm="head",
    tie=key("tie_embedding", "tie_word_embeddings", default=True),
    rope=rope_with(rope_theta=1e6),
    mixer=mask_layers(lambda c: ShortConv(c.get("conv_L_cache", 3), c.get("conv_bias", False)), _find_lfm2_convs),
    gguf=_LFM2_GGUF,
)
LFM2_MOE = LFM2.derive(
    "lfm2_moe",
    names={
        "layers.{i}.ffn.router": "layers.{i}.feed_forward.gate",
        "layers.{i}.ffn.router.correction": "layers.{i}.feed_forward.expert_bias",
        **map_expert_names("layers.{i}.feed_forward.experts", "w1", "w3", "w2"),
    },
    ffn=key("intermediate_size"),
    moe=mask_layers(
        _build_lfm2_experts, lambda c: (i >= c.get("num_dense_layers", 2) for i in range(c["num_hidden_layers"]))
    ),
    gguf=_LFM2_GGUF.derive("lfm2moe", moe=gguf.route_experts("sigmoid", renormalize=True)),
)


# -- Falcon-H1


def _scale_state_input(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the input projection, whose rows for gate, x, B, C and step are multiplied by the config's multipliers."""
    mamba, weight = settings.mixer.ssm, fetch(f"layers.{{i}}.mamba.in_proj.{part}")
    wide = mamba.groups * mamba.state
    sizes = mamba.inner, mamba.inner, wide, wide, mamba.heads
    parts = settings.multipliers["ssm"]
    common = settings.multipliers["ssm_in"] if part == "weight" else 1.0
    if all(m * common == 1 for m in parts):
        return weight
    rows = (Full(m * common, (size,)) for m, size in zip(parts, sizes, strict=True))
    return Scale(weight, Concat(tuple(rows)))


def _read_multipliers(config: Config) -> dict[str, Any]:
    names = {
        "key": "key_multiplier",
        "attention_in": "attention_in_multiplier",
        "attention_out": "attention_out_multiplier",
        "ssm_in": "ssm_in_multiplier",
        "ssm_out": "ssm_out_multiplier",
    }
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    alone = {name: float(key(long, default=1.0)(config)) for name, long in names.items()}
    return {**alone, "gate": float(gate), "down": float(down), "ssm": config.get("ssm_multipliers") or [1.0] * 5}


def _build_falcon_mixer(config: Config) -> ParallelHybrid:
    heads, dim = read_required(config, "num_attention_heads", "hidden_size")
    bias = config.get("attention_bias", False)
    kv_heads, rope = config.get("num_key_value_heads", 8), read_rope(config)
    attention = Attention(heads, kv_heads, config.get("head_dim"), rope, qkv_bias=bias, out_bias=bias)
    groups = config.get("mamba_n_groups", 1)
    normed = config.get("mamba_rms_norm", False)
    mamba = Mamba2(
        int(config.get("mamba_d_ssm", 1024) or config.get("mamba_expand", 2) * dim),
        config.get("mamba_n_heads", 128),
        config.get("mamba_d_state", 256),
        groups,
        config.get("mamba_d_conv", 4),
        config.get("mamba_conv_bias", True),
        config.get("mamba_proj_bias", False),
        RMSNorm(config.get("rms_norm_eps", 1e-5)) if normed else None,
        groups,
        config.get("mamba_norm_before_gate", True),
        out_bias=config.get("projectors_bias", False),
    )
    return ParallelHybrid(attention, mamba)


def _nest_ssm_names(names: Names) -> Names:
    """Return the `names` of a state space's parameters, with attn replaced by attn.ssm, as in a `ParallelHybrid`."""
    return {name.replace(".attn.", ".attn.ssm."): template for name, template in names.items()}


def _build_gguf_falcon(config: Config) -> ParallelHybrid:
    """Return attention in parallel to a state space, whose norm, if stored, follows the gate as in llama.cpp."""
    heads, kv_heads = read_required(config, "attention.head_count", "attention.head_count_kv")
    attention = Attention(heads, kv_heads, config.get("attention.key_length"), read_gguf_rope(config))
    mamba = replace(build_gguf_mamba2(config), norm_first=False)
    return ParallelHybrid(attention, mamba if config[gguf.NORMED] else replace(mamba, norm=None))


FALCON_H1 = LLAMA.derive(
    "falcon_h1",
    inert=("mamba_d_head", "mamba_expand"),
    names={
        **_nest_ssm_names(map_mamba2_names("layers.{i}.mamba")),
        "layers.{i}.attn.ssm.in": _scale_state_input,
        "layers.{i}.attn.ssm.out": scale_linear("layers.{i}.mamba.out_proj", "ssm_out"),
        "layers.{i}.attn.attention.q": scale_linear("layers.{i}.self_attn.q_proj", "attention_in", bias=()),
        "layers.{i}.attn.attention.k": scale_linear(
            "layers.{i}.self_attn.k_proj", "attention_in", "key", bias=("key",)
        ),
        "layers.{i}.attn.attention.v": scale_linear("layers.{i}.self_attn.v_proj", "attention_in", bias=()),
        "layers.{i}.attn.attention.o": scale_linear("layers.{i}.self_attn.o_proj", "attention_out"),
        "layers.{i}.ffn_norm": "layers.{i}.pre_ff_layernorm",
        "layers.{i}.ffn.gate": scale_linear("layers.{i}.feed_forward.gate_proj", "gate"),
        "layers.{i}.ffn.up": "layers.{i}.feed_forward.up_proj",
        "layers.{i}.ffn.down": scale_linear("layers.{i}.feed_forward.down_proj", "down"),
        "final_norm": "final_layernorm",
    },
    refuse={"time_step_limit": NO_LIMIT, "hidden_act": ("silu", "swish", None)},
    **set_all(None, "heads", "kv_heads", "head_dim", "rope"),
    defaults={"rms_norm_eps": 1e-5},
    embed_scale=key("embedding_multiplier", default=1.0),
    logit_scale=key("lm_head_multiplier", default=1.0),
    multipliers=_read_multipliers,
    mixer=_build_falcon_mixer,
    gguf=gguf.BASE.derive(  # the converter multiplies the weights by all multipliers
        "falcon-h1",
        names={
            **_nest_ssm_names(HEADED_STATES),
            **{f"layers.{{i}}.attn.attention.{x}": f"blk.{{i}}.attn_{x}" for x in "qkv"},
            "layers.{i}.attn.attention.o": "blk.{i}.attn_output",
        },
        aliases={"ffn_norm.weight": "ffn_norm"},  # the name in the converter and the loader
        **set_all(None, "heads", "kv_heads", "head_dim", "rope"),
        mixer=_build_gguf_falcon,
    ),
)


# -- Nemotron-H

_NEMOTRON_ACTIVATION = key("mlp_hidden_act", default="relu2")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _read_kinds(config: Config) -> list[str]:
    """Return the kind of each layer: mamba, attention, mlp or moe; raise WeftError for any other kind."""
    pattern = config.get("hybrid_override_pattern")
    stated = key("layers_block_type", "layer_types", default=("mamba", "moe", "attention", "mlp"))(config)
    types = [_LETTERS.get(c, c) for c in pattern] if pattern else stated
    kinds = [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in types]
    for kind in kinds:
        if kind not in _LETTERS.values():
            raise WeftError(f"layer type {kind!r} is unknown; known are {', '.join(_LETTERS.values())}")
    return kinds


def _build_nemotron_mixers(config: Config) -> tuple[Any, ...]:
    groups = key("n_groups", "mamba_n_groups", default=8)(config)
    heads, head = config.get("mamba_num_heads", 128), config.get("mamba_head_dim", 64)
    mamba = Mamba2(
        heads * head,
        heads,
        config.get("ssm_state_size", 128),
        groups,
        key("conv_kernel", "mamba_d_conv", default=4)(config),
        key("use_conv_bias", "mamba_conv_bias", default=True)(config),
        config.get("use_bias", False),
        RMSNorm(config.get("layer_norm_epsilon", 1e-5)),
        groups,
        least_step=key("time_step_min", "mamba_dt_min", default=0.001)(config),
    )
    queries = key("num_attention_heads", default=32)(config)
    attention = Attention(queries, config.get("num_key_value_heads") or queries, config.get("head_dim", 128))
    return tuple({"mamba": mamba, "attention": attention}.get(kind) for kind in _read_kinds(config))


def _build_nemotron_experts(config: Config) -> MoE:
    act, bias = ACTIVATIONS[_NEMOTRON_ACTIVATION(config)], config.get("mlp_bias", False)
    latent = "moe_latent_size"
    if config.get(latent) and bias:
        raise WeftError(f"mlp_bias={bias} is not supported with {latent}={config[latent]}")
    count, k = key("n_routed_experts", default=8)(config), key("num_experts_per_tok", default=2)(config)
    shared = MLP(key("moe_shared_expert_intermediate_size", default=7688)(config), act, bias)
    router, hidden = make_v3_router(scale=1.0, groups=1, top_groups=1), key("moe_intermediate_size", default=7688)
    return MoE(count, hidden(config), k, act, router(config), gated=False, shared=shared, latent=config.get(latent))


_EXPERTS = "layers.{i}.mixer.experts"


@template
def _fetch_nemotron_experts(fetch: Fetch, name: str, settings: Settings, part: str) -> Recipe:
    """Return the weights `part` (up or down) of all experts, stored in one tensor or per expert."""
    separate = stack_experts(f"{_EXPERTS}.{{e}}.{part}_proj")
    stacked_name = f"{_EXPERTS}.{part}_proj"
    return fetch(stacked_name) if fetch.has(stacked_name) else separate(fetch, name, settings)


def _read_gguf_widths(config: Config) -> tuple[int | None, ...]:
    """Return the inner width of each layer that is a plain feed-forward; None for all other layers."""
    widths_stated, layers = key("feed_forward_length")(config), range(config["block_count"])
    widths = widths_stated if isinstance(widths_stated, list) else [widths_stated for _ in layers]
    return tuple(None if i in config[gguf.SPARSE] else widths[i] or None for i in layers)


def _build_gguf_nemotron(config: Config) -> tuple[Any, ...]:
    """Return the mixer of each layer of a file, None for feed-forwards; the minimum step is fixed, as files lack it."""
    kv_heads = key("attention.head_count_kv")(config)
    heads, mamba = key("attention.head_count")(config), replace(build_gguf_mamba2(config), least_step=0.001)

    def layer(i: int) -> Mamba2 | Attention | None:
        if i in config[gguf.RECURRENT]:
            return mamba
        groups = kv_heads[i] if isinstance(kv_heads, list) else kv_heads
        return Attention(heads, groups, config.get("attention.key_length")) if groups else None

    return tuple(layer(i) for i in range(config["block_count"]))


def _build_gguf_nemotron_experts(config: Config) -> MoE:
    count, k, hidden = read_required(config, "expert_count", "expert_used_count", "expert_feed_forward_length")
    wide = key("expert_shared_feed_forward_length")(config)
    latent, router = config.get("moe_latent_size"), gguf.read_routing(config, "sigmoid")
    return MoE(count, hidden, k, "relu2", router, gated=False, shared=MLP(wide, "relu2"), latent=latent)


NEMOTRON_H = LLAMA.derive(
    "nemotron_h",
    names={
        "embed": "embeddings",
        **{f"layers.{{i}}.{norm}": "layers.{i}.norm" for norm in ("attn_norm", "ffn_norm")},
        **{f"layers.{{i}}.attn.{x}": f"layers.{{i}}.mixer.{x}_proj" for x in "qkvo"},
        **map_mamba2_names("layers.{i}.mixer"),
        **{f"layers.{{i}}.ffn.{x}": f"layers.{{i}}.mixer.{x}_proj" for x in ("up", "down")},
        "layers.{i}.ffn.router": "layers.{i}.mixer.gate",
        "layers.{i}.ffn.router.correction": "layers.{i}.mixer.gate.e_score_correction_bias",
        **{f"layers.{{i}}.ffn.experts.{x}": _fetch_nemotron_experts(x) for x in ("up", "down")},
        **{f"layers.{{i}}.ffn.shared.{x}": f"layers.{{i}}.mixer.shared_experts.{x}_proj" for x in ("up", "down")},
        "layers.{i}.ffn.latent_in": "layers.{i}.mixer.fc1_latent_proj",
        "layers.{i}.ffn.latent_out": "layers.{i}.mixer.fc2_latent_proj",
        "final_norm": "norm_f",
    },
    prefix="backbone.",
    aliases={"layers.": "model.layers.", "embeddings": "model.embeddings", "norm_f": "model.norm_f"},
    unused=(*LLAMA.unused, "mtp.*"),
    refuse={"mamba_hidden_act": ("silu", None), "sliding_window": (None,), "time_step_limit": NO_LIMIT},
    layers=lambda c: len(_read_kinds(c)),
    **set_all(None, "heads", "kv_heads", "head_dim", "rope"),
    eps=key("layer_norm_epsilon", default=1e-5),
    ffn=mask_layers(key("intermediate_size", default=21504), lambda c: (kind == "mlp" for kind in _read_kinds(c))),
    gated=False,
    activation=_NEMOTRON_ACTIVATION,
    tie=False,  # whatever the config states
    mixer=_build_nemotron_mixers,
    moe=mask_layers(_build_nemotron_experts, lambda c: (kind == "moe" for kind in _read_kinds(c))),
    gguf=gguf.SPARSE_BASE.derive(
        "nemotron_h",
        "nemotron_h_moe",
        names={
            **HEADED_STATES,
            "layers.{i}.ffn_norm": "blk.{i}.attn_norm",
            "layers.{i}.ffn.latent_in": "blk.{i}.ffn_latent_down",
            "layers.{i}.ffn.latent_out": "blk.{i}.ffn_latent_up",
        },
        **set_all(None, "heads", "kv_heads", "head_dim", "rope"),
        ffn=_read_gguf_widths,
        gated=False,
        activation="relu2",
        mixer=_build_gguf_nemotron,
        moe=gguf.mask_unlisted(_build_gguf_nemotron_experts, gguf.SPARSE),
    ),
)
