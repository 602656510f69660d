"""DeepSeek-V2 to V3.2, GLM: latent attention, routing in groups, shared experts, lightning indexes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Permute, Recipe, Reshape, Slice
from weft.ir.recipes.frequencies import compute_yarn_temperature

from ....dsl import MLA, GatedMLP, LightningIndex, MoE, RMSNorm, RoPE, Router
from ...tables import gguf
from ...tables.family import REQUIRED, Config, Fetch, Names, Rule, key, mask_layers, read_required, rule, template
from ...tables.rope_config import find_rope, read_gguf_rope, read_rope
from ...tables.settings import Settings
from ...tables.templates import name_gated_mlp
from ..dense.llama import LLAMA
from .mixtral import SPARSE, read_activation

_NORM = RMSNorm(1e-6)  # of the latents, whatever the config states for other norms


def find_latent_attention(settings: Settings) -> MLA:
    """Return the latent attention of the first layer that has one; the sizes are equal in all layers."""
    mixers = settings.mixer if isinstance(settings.mixer, tuple) else (settings.mixer,)
    return next((mixer for mixer in mixers if isinstance(mixer, MLA)), None) or settings.block.attn


@template
def slice_head_rows(fetch: Fetch, part: str, settings: Settings, name: str, which: str) -> Recipe:
    """Return the rows of k or v (`which`) in the tensor `name`, which has the rows of k, then of v, for each head."""
    mla = find_latent_attention(settings)
    keys, keys_and_values = mla.head_dim, mla.head_dim + mla.v_head_dim
    start, stop = (0, keys) if which == "k" else (keys, keys_and_values)
    rows = Slice(Reshape(fetch(name), (mla.heads, keys_and_values, -1)), 1, start, stop)
    return Reshape(rows, (mla.heads * (stop - start), -1))


def _build_rope(config: Config) -> RoPE:
    """Return the RoPE of the rotary part of each head, of which all features are rotated. A partial_rotary_factor is
    ignored for type default, or if this factor of a head size is the width of the rotary part; `read_rope` refuses any
    other factor, since it would omit frequencies."""
    settings, (plain, rotary) = dict(find_rope(config)), read_required(config, "qk_nope_head_dim", "qk_rope_head_dim")
    fraction = settings.get("partial_rotary_factor") or 1.0
    sizes = [config["head_dim"]] if config.get("head_dim") else [rotary, plain + rotary]
    if settings.get("rope_type", settings.get("type", "default")) == "default" or rotary in (
        int(n * fraction) for n in sizes
    ):
        settings.pop("partial_rotary_factor", None)
    resolved = {**config, "rope_parameters": settings, "partial_rotary_factor": None}
    return replace(read_rope(resolved), interleaved=config.get("rope_interleave", True))


def _compute_scale(config: Config) -> float | None:
    """Return 1/(t√d), t YaRN's temperature of attention, if RoPE is scaled and mscale_all_dim set; None for 1/√d."""
    rope, mscale = _build_rope(config), find_rope(config).get("mscale_all_dim")
    if rope.scaling == "none" or not mscale:
        return None
    width = sum(read_required(config, "qk_nope_head_dim", "qk_rope_head_dim"))
    return float(width**-0.5 * compute_yarn_temperature(rope.factor, float(mscale)) ** 2)


def build_mla(config: Config) -> MLA:
    """Return the latent attention of a config with DeepSeek's keys."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, plain, rotary, value = read_required(config, *names)
    rope, scale = _build_rope(config), _compute_scale(config)
    return MLA(heads, rank, plain, rotary, value, rope, config.get("q_lora_rank"), _NORM, scale)


@rule
def find_sparse_layers(config: Config, first_dense: int | None) -> Iterator[bool]:
    """Return for each layer whether it has experts: by mlp_layer_types, else if it is after the dense layers. Their
    number is first_k_dense_replace or num_dense_layers, by default `first_dense`; None means that no layer is dense."""
    layers = range(key("num_hidden_layers")(config))
    types = config.get("mlp_layer_types")
    if first_dense is None or types:
        return (not types or types[i] == "sparse" for i in layers)
    dense = key("first_k_dense_replace", "num_dense_layers", default=first_dense)(config)
    return (i >= dense for i in layers)


def make_moe_rule(routing: Rule, first_dense: int | None, biased: bool = False, shared: Any = REQUIRED) -> Rule:
    """Return the rule for `moe` of each layer: experts in the layers of `find_sparse_layers`, None in all others.
    `routing` is the rule for the `Router`, `shared` the default number of shared experts (0: none, whatever the config
    states). With `biased`, mlp_bias also applies to the shared experts."""

    def make(config: Config) -> MoE:
        hidden, act = key("moe_intermediate_size")(config), read_activation(config)
        options: dict[str, Any] = {}
        if shared != 0:
            wide = hidden * key("n_shared_experts", "num_shared_experts", default=shared)(config)
            options["shared"] = GatedMLP(wide, act, biased and config.get("mlp_bias", False))
        experts = key("n_routed_experts", "num_local_experts", "num_experts")(config)
        return MoE(experts, hidden, key("num_experts_per_tok")(config), act, routing(config), **options)

    return mask_layers(make, find_sparse_layers(first_dense))


def _build_v2_router(config: Config) -> Router:
    plain = Router(renormalize=False, scale=float(config.get("routed_scaling_factor", 1.0)))
    if config.get("topk_method", "greedy") != "group_limited_greedy":
        return plain
    return replace(plain, groups=key("n_group")(config), top_groups=key("topk_group")(config), group_score="max")


@rule
def make_v3_router(
    config: Config,
    renormalize: bool = True,
    scale: float = 2.5,
    groups: int = 8,
    top_groups: int = 4,
    factor: str = "routed_scaling_factor",
) -> Router:
    """Return DeepSeek-V3's sigmoid router with a selection bias. The arguments are defaults of config keys, except
    `factor`, which is the key of the scale."""
    return Router(
        scoring="sigmoid",
        correction=True,
        renormalize=config.get("norm_topk_prob", renormalize),
        scale=float(config.get(factor, scale)),
        groups=config.get("n_group", groups),
        top_groups=config.get("topk_group", top_groups),
    )


@template
def _merge_heads(fetch: Fetch, part: str, settings: Settings, name: str, transpose: bool = False) -> Recipe:
    """Return a linear layer [heads·rows, rank], stored per head as [rows, rank] or, if `transpose`, [rank, rows]."""
    mla = find_latent_attention(settings)
    stored, rows = fetch(f"{name}.{part}"), mla.head_dim if transpose else mla.v_head_dim
    return Reshape(Permute(stored, (0, 2, 1)) if transpose else stored, (mla.heads * rows, -1))


def name_latent_attention(prefix: str, name: str) -> Names:
    """Return the checkpoint names or templates of latent attention `name`, keyed by parameter (`prefix`.q_down, …)."""
    projections = {"down": "a_proj", "norm": "a_layernorm", "up": "b_proj"}
    return {
        **{f"{prefix}.q_{ours}": f"{name}.q_{theirs}" for ours, theirs in projections.items()},
        f"{prefix}.kv_down": f"{name}.kv_a_proj_with_mqa",
        f"{prefix}.kv_norm": f"{name}.kv_a_layernorm",
        **{f"{prefix}.{x}_up.weight": slice_head_rows(f"{name}.kv_b_proj.weight", x) for x in "kv"},
    }


def build_gguf_mla(config: Config) -> MLA:
    """Return the latent attention of a file, where key_length_mla, not key_length, is the width of a head's keys."""
    rotary, width = key("rope.dimension_count")(config), key("attention.key_length_mla")(config)
    factor = config.get("rope.scaling.factor", 1.0)
    strength = 1 + config.get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)  # of YaRN on the scores
    return MLA(
        key("attention.head_count")(config),
        key("attention.kv_lora_rank")(config),
        width - rotary,
        rotary,
        key("attention.value_length_mla")(config),
        replace(read_gguf_rope(config), interleaved=True, amplitude=1.0),
        config.get("attention.q_lora_rank"),
        RMSNorm(key("attention.layer_norm_rms_epsilon")(config)),
        None if strength == 1 else width**-0.5 * strength**2,
    )


GGUF_LATENT: Names = {
    "layers.{i}.attn.q_down": "blk.{i}.attn_q_a",
    "layers.{i}.attn.q_norm": "blk.{i}.attn_q_a_norm",
    "layers.{i}.attn.q_up": "blk.{i}.attn_q_b",
    "layers.{i}.attn.kv_down": "blk.{i}.attn_kv_a_mqa",
    "layers.{i}.attn.kv_norm": "blk.{i}.attn_kv_a_norm",
}
DEEPSEEK_GGUF = gguf.SPARSE_BASE.derive(
    "deepseek2",
    names={
        **GGUF_LATENT,
        "layers.{i}.attn.k_up": _merge_heads("blk.{i}.attn_k_b", transpose=True),
        "layers.{i}.attn.v_up": _merge_heads("blk.{i}.attn_v_b"),
    },
    mixer=build_gguf_mla,
    moe=gguf.route_experts("softmax"),
)
DEEPSEEK_V2 = LLAMA.derive(
    "deepseek_v2",
    inert=("num_key_value_heads", "n_group", "topk_group", "ep_size", "head_dim", "seq_aux", "scoring_func"),
    names={
        **SPARSE,
        **name_latent_attention("layers.{i}.attn", "layers.{i}.self_attn"),
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_experts"),
    },
    refuse={
        "attention_bias": (False, None),
        "moe_layer_freq": (1, None),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy", None),
    },
    kv_heads=None,
    head_dim=None,
    rope=_build_rope,
    mixer=build_mla,
    moe=make_moe_rule(_build_v2_router, first_dense=0, biased=True),
    gguf=DEEPSEEK_GGUF,
)
DEEPSEEK_V3 = DEEPSEEK_V2.derive(
    "deepseek_v3",
    inert=("num_key_value_heads", "head_dim", "ep_size"),
    names={"layers.{i}.ffn.router.correction": "layers.{i}.mlp.gate.e_score_correction_bias"},
    refuse={
        "norm_topk_prob": (True, False, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    ffn_bias=False,
    unused=(*LLAMA.unused, "model.layers.61.*"),  # an extra layer, trained to predict two tokens ahead
    moe=make_moe_rule(make_v3_router(), first_dense=3),
    gguf=DEEPSEEK_GGUF,
)
FULL, SHARED = "full", "shared"  # the types of indexes: a separate one, or that of an earlier layer


def read_index_types(config: Config) -> list[str]:
    """Return the type of each layer's index (full or shared): indexer_types, else the letters of index_topk_pattern.

    The default is full for every index_topk_freq-th layer from index_skip_topk_offset − 1 on, and for all before it.
    Raises WeftError for other types, fewer types than layers, or if the first type is not full.
    """
    layers, source = key("num_hidden_layers")(config), "indexer_types"
    types = config.get(source)
    if types is None and (pattern := config.get("index_topk_pattern")) is not None:
        source, types = "index_topk_pattern", [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
    if types is None:
        every, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        types = [SHARED if max(i + 1 - offset, 0) % every else FULL for i in range(layers)]
    if len(types) < layers or types[0] != FULL or not {FULL, SHARED}.issuperset(types):
        raise WeftError(f"{source}={types} must list full or shared for each of {layers} layers, first full")
    return list(types[:layers])


def _share_index(plain: MLA, index: LightningIndex, has_index: Sequence[bool]) -> tuple[MLA, ...]:
    """Return `plain` per layer: with `index` where `has_index` is true, else with the last such layer's selection."""
    keeping = replace(plain, index=index, keep_index="index")
    return tuple(
        replace(plain, share_index="index") if not has else keeping if not following else replace(plain, index=index)
        for has, following in zip(has_index, [*has_index[1:], True], strict=True)
    )


@rule
def make_index_rule(config: Config, heads: int, interleaved: bool) -> tuple[MLA, LightningIndex]:
    """Return latent attention, and its index with index_n_heads heads, by default `heads`. `interleaved` is a setting
    of the index's RoPE. Raise WeftError without q_lora_rank."""
    plain = build_mla({**config, "rope_interleave": True})
    if plain.q_rank is None or plain.rope is None:
        raise WeftError("q_lora_rank=None is not supported: the indexer reads queries of this rank")
    index = LightningIndex(
        key("index_n_heads", default=heads)(config),
        key("index_head_dim", default=128)(config),
        key("index_topk", default=2048)(config),
        replace(plain.rope, dim=plain.rope_dim, interleaved=interleaved),
    )
    return plain, index


_V32, _GLM = make_index_rule(64, interleaved=False), make_index_rule(32, interleaved=True)


def _build_indexed_mla(config: Config) -> MLA:
    """Return latent attention with an index, for all layers; raise WeftError if a layer has another type."""
    unsupported = next((kind for kind in config.get("layer_types") or () if kind != "indexed_attention"), None)
    if unsupported is not None:
        raise WeftError(f"layer_types has {unsupported!r}; only indexed_attention is supported")
    plain, index = _V32(config)
    return replace(plain, index=index)


def _build_gguf_mlas(config: Config) -> tuple[MLA, ...]:
    """Return each layer's latent attention; the file's key of index types, else its tensors, show who has an index."""
    plain, layers = build_gguf_mla(config), range(key("block_count")(config))
    assert plain.rope is not None
    index = LightningIndex(
        key("attention.indexer.head_count")(config),
        key("attention.indexer.key_length")(config),
        key("attention.indexer.top_k")(config),
        replace(plain.rope, dim=plain.rope_dim),
    )
    types, there = config.get("attention.indexer.types"), config[gguf.INDEXED]
    has_index = [i in there if types is None else bool(types[i]) for i in layers]
    if not has_index[0]:
        raise WeftError("tensor blk.0.indexer.proj is missing: the first layer needs an indexer")
    return _share_index(plain, index, has_index)


DEEPSEEK_V32 = DEEPSEEK_V3.derive(
    "deepseek_v32",
    names={
        "layers.{i}.attn.index.q": "layers.{i}.self_attn.indexer.wq_b",
        "layers.{i}.attn.index.k": "layers.{i}.self_attn.indexer.wk",
        "layers.{i}.attn.index.k_norm": "layers.{i}.self_attn.indexer.k_norm",
        "layers.{i}.attn.index.weights": "layers.{i}.self_attn.indexer.weights_proj",
    },
    mixer=_build_indexed_mla,
    moe=make_moe_rule(make_v3_router(), first_dense=3, shared=1),
)
GLM_MOE_DSA = DEEPSEEK_V32.derive(
    "glm_moe_dsa",
    inert=("num_key_value_heads", "head_dim", "layer_types"),
    defaults={"rms_norm_eps": 1e-5},
    unused=(*DEEPSEEK_V32.unused, "model.layers.78.*"),  # an extra layer, trained to predict two tokens ahead
    mixer=lambda c: _share_index(*_GLM(c), [kind == FULL for kind in read_index_types(c)]),
    moe=make_moe_rule(make_v3_router(groups=1, top_groups=1), first_dense=3, shared=1),
    gguf=DEEPSEEK_GGUF.derive(
        "glm-dsa",
        names={
            "layers.{i}.attn.index.q": "blk.{i}.indexer.attn_q_b",
            "layers.{i}.attn.index.k": "blk.{i}.indexer.attn_k",
            "layers.{i}.attn.index.k_norm": "blk.{i}.indexer.k_norm",
            "layers.{i}.attn.index.weights": "blk.{i}.indexer.proj",
        },
        mixer=_build_gguf_mlas,
    ),
)
