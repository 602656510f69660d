"""Gemma 4: embeddings for every layer, shared keys and values, heads of two sizes, experts next to the feed-forward."""

from __future__ import annotations

import math
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Full, Recipe, Scale

from ....dsl import (
    Attention,
    Block,
    GatedMLP,
    LayerWithInput,
    MoE,
    PerLayerEmbedding,
    PerLayerInput,
    RMSNorm,
    RoPE,
    SplitFeedForward,
)
from ...tables import gguf
from ...tables.family import Config, Fetch, Names, key, read_required, set_all
from ...tables.rope_config import FREQUENCIES, read_rope
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import name_gated_mlp
from ..dense.llama import LLAMA
from ..experts.mixtral import map_expert_names

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read_types(config: Config, every: int) -> list[str]:
    """Return each layer's attention type: layer_types, by default each `every`-th full_attention, the rest sliding."""
    layers = range(key("num_hidden_layers")(config))
    return list(
        config.get("layer_types") or ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in layers]
    )


def name_kv(config: Config, types: list[str], i: int) -> dict[str, Any]:
    """Return the arguments keep_kv or share_kv of layer `i`, or none, given the attention `types` of all layers.
    The last num_kv_shared_layers layers use the keys and values of the last layer of the same type before them."""
    first = len(types) - (config.get("num_kv_shared_layers") or 0)
    if first == len(types):
        return {}
    last = max((j for j in range(first) if types[j] == types[i]), default=None)
    if i >= first:
        return {"share_kv": types[i]}
    return {"keep_kv": types[i]} if i == last else {}


def build_rope(config: Config, kind: str, head: int, defaults: dict[str, Any]) -> RoPE:
    """Return the RoPE of layers of type `kind` for heads of `head` features; `defaults` are rope_parameters by type."""
    base = {"rope_theta": defaults[kind]["rope_theta"]}
    settings = base | ((config.get("rope_parameters") or defaults).get(kind) or {})
    if settings.get("rope_type") != "proportional":
        return read_rope({**config, "rope_parameters": settings})
    rotated_pairs = int(settings.get("partial_rotary_factor", 1.0) * head // 2)
    theta = float(settings.get("rope_theta", defaults[kind]["rope_theta"]))
    return RoPE(theta, scaling="proportional", factor=float(settings.get("factor", 1.0)), rotated=rotated_pairs)


def _read_head_sizes(config: Config, i: int, kind: str) -> tuple[int, int]:
    """Return the head size and the number of KV heads of layer `i`, which may depend on its type `kind`."""
    by_layer = config.get("per_layer_config") or {}
    layer_config = by_layer.get(str(i), by_layer.get(i)) or {}
    size, groups = key("head_dim", default=256)(config), key("num_key_value_heads", default=4)(config)
    if kind == "full_attention" and "per_layer_config" not in config:
        layer_config = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            layer_config["num_key_value_heads"] = config["num_global_key_value_heads"]
    return layer_config.get("head_dim") or size, layer_config.get("num_key_value_heads") or groups


def _build_attention(config: Config, types: list[str], i: int, norm: RMSNorm) -> Attention:
    size, groups = _read_head_sizes(config, i, types[i])
    local, bias = types[i] == "sliding_attention", config.get("attention_bias") or False
    return Attention(
        key("num_attention_heads")(config),
        groups,
        size,
        rope=build_rope(config, types[i], size, _ROPES),
        window=config.get("sliding_window", 512) if local else None,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        scale=1.0,
        v_norm=norm.plain(),
        keys_as_values=bool(config.get("attention_k_eq_v")) and not local,
        **name_kv(config, types, i),
    )


def _build_layers(config: Config) -> tuple[LayerWithInput, ...]:
    norm, types = RMSNorm(key("rms_norm_eps", default=1e-6)(config)), read_types(config, 6)
    act = ACTIVATIONS[config.get("hidden_activation", "gelu_pytorch_tanh")]
    width, hidden = config.get("hidden_size_per_layer_input", 256), key("intermediate_size")(config)
    first_shared = len(types) - (config.get("num_kv_shared_layers") or 0)
    experts = None
    if config.get("enable_moe_block"):
        count, k, inner = read_required(config, "num_experts", "top_k_experts", "moe_intermediate_size")
        experts = MoE(count, inner, k, act)

    def layer(i: int) -> LayerWithInput:
        wide = 2 if config.get("use_double_wide_mlp") and i >= first_shared else 1
        attn, dense = _build_attention(config, types, i, norm), GatedMLP(wide * hidden, act)
        block = Block(attn, None if experts else dense, norm, "sandwich")
        beside = SplitFeedForward(dense, experts, norm) if experts else None
        return LayerWithInput(block, beside, PerLayerInput(width, act, norm) if width else None)

    return tuple(layer(i) for i in range(len(types)))


def build_embedding(config: Config) -> PerLayerEmbedding | None:
    """Return the embedding for every layer; None if hidden_size_per_layer_input is 0."""
    width = config.get("hidden_size_per_layer_input", 256)
    norm = RMSNorm(key("rms_norm_eps", default=1e-6)(config))
    return PerLayerEmbedding(config.get("vocab_size_per_layer_input", 262_144), width, norm) if width else None


def nest_names(names: Names, at: str = "block") -> Names:
    """Return `names`, with parameters of layers moved into the field `at` of the layers ("layers.{i}.block.attn.q")."""
    return {name.replace("layers.{i}.", f"layers.{{i}}.{at}.", 1): template for name, template in names.items()}


def _scale_experts_down(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the experts' down weights, each times its per_expert_scale."""
    down = _EXPERTS["layers.{i}.ffn.moe.experts.down"]
    assert callable(down)
    return Scale(down(fetch, part, settings), fetch("layers.{i}.router.per_expert_scale"))


_BLOCK: Names = {
    **{name: template for name, template in LLAMA.names.items() if name.startswith("layers.")},
    "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.ffn_norm": "layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
}
_EXPERTS = map_expert_names("layers.{i}.experts", "gate_proj", "up_proj", "down_proj", at="layers.{i}.ffn.moe")
PER_LAYER: Names = {
    "per_layer.table": "embed_tokens_per_layer",
    "per_layer.projection": "per_layer_model_projection",
    "per_layer.norm": "per_layer_projection_norm",
    "layers.{i}.per_layer.gate": "layers.{i}.per_layer_input_gate",
    "layers.{i}.per_layer.projection": "layers.{i}.per_layer_projection",
    "layers.{i}.per_layer.norm": "layers.{i}.post_per_layer_input_norm",
}


# -- GGUF


def convert_keys(config: Config) -> dict[str, Any]:
    """Return the keys of a GGUF file as a Hugging Face config of Gemma 3n or 4."""
    layers, local = range(config["block_count"]), gguf.find_local_layers(config, 5)
    types = ["sliding_attention" if is_local else "full_attention" for is_local in local]
    wide = int(key("attention.key_length")(config))
    near = int(config.get("attention.key_length_swa", wide))
    groups, hidden = key("attention.head_count_kv")(config), key("feed_forward_length")(config)
    groups = groups if isinstance(groups, list) else [groups for _ in layers]
    sizes = [near if is_local else wide for is_local in local]
    return {
        "num_hidden_layers": config["block_count"],
        "num_attention_heads": key("attention.head_count")(config),
        "per_layer_config": {i: {"head_dim": sizes[i], "num_key_value_heads": groups[i]} for i in layers},
        "head_dim": wide,
        "num_key_value_heads": max(groups),
        "intermediate_size": hidden,
        "layer_types": types,
        "sliding_window": key("attention.sliding_window")(config),
        "num_kv_shared_layers": config.get("attention.shared_kv_layers", 0),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon")(config),
        "hidden_size_per_layer_input": key("embedding_length_per_layer_input")(config),
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {
            "sliding_attention": {"rope_theta": config.get("rope.freq_base_swa", 10_000.0)},
            "full_attention": {"rope_theta": config.get("rope.freq_base", 10_000.0), **_read_fraction(config, wide)},
        },
    }


def _read_fraction(config: Config, head: int) -> dict[str, Any]:
    """Return rope_parameters for the fraction of rotated features in global heads, if a file has frequency divisors.
    Rotated features have the divisor 1, all others 10³⁰. Without divisors, the result is empty."""
    divisors = config.get(FREQUENCIES)
    if divisors is None:
        return {}
    n_rotated = sum(divisor == 1 for divisor in divisors)
    if any(divisor not in (1, 1e30) for divisor in divisors):
        raise WeftError(f"tensor {FREQUENCIES} must have values 1 and 1e30 only")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * n_rotated / head}


def _build_gguf_layers(config: Config) -> tuple[LayerWithInput, ...]:
    converted = convert_keys(config)
    hidden = converted["intermediate_size"]
    first_shared = len(converted["layer_types"]) - converted["num_kv_shared_layers"]
    local = gguf.find_local_layers(config, 5)
    return _build_layers(
        {
            **converted,
            "intermediate_size": hidden[0] if isinstance(hidden, list) else hidden,
            "use_double_wide_mlp": isinstance(hidden, list) and hidden[-1] == 2 * hidden[0],
            "attention_k_eq_v": any(not local[i] and i not in config[gguf.VALUED] for i in range(first_shared)),
            "enable_moe_block": bool(config[gguf.SPARSE]),
            "num_experts": config.get("expert_count"),
            "top_k_experts": config.get("expert_used_count"),
            "moe_intermediate_size": config.get("expert_feed_forward_length"),
        }
    )


def _fetch_layer_scale(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the factor [1] of a layer's output; 1 if the file has none."""
    name = "blk.{i}.layer_output_scale.weight"
    return fetch(name) if fetch.has(name) else Full(1.0, (1,))


GGUF_PER_LAYER: Names = {
    "per_layer.table": "per_layer_token_embd",
    "per_layer.projection": "per_layer_model_proj",
    "per_layer.norm": "per_layer_proj_norm",
    "layers.{i}.per_layer.gate": "blk.{i}.inp_gate",
    "layers.{i}.per_layer.projection": "blk.{i}.proj",
    "layers.{i}.per_layer.norm": "blk.{i}.post_norm",
}
GGUF_SETTINGS: dict[str, Any] = {  # the blocks of these files state their own settings
    "from_keys": {"qk_norm": None, "qkv_bias": None, "out_bias": None},
    **dict.fromkeys(("heads", "kv_heads", "head_dim", "ffn", "rope")),
    "embed_scale": lambda c: math.sqrt(c["embedding_length"]),
}
GEMMA4_GGUF = gguf.SPARSE_BASE.derive(
    "gemma4",
    inert=(*gguf.BASE.inert, "rope.dimension_count", "rope.dimension_count_swa"),
    names={
        **nest_names({name: template for name, template in gguf.BASE.names.items() if name.startswith("layers.")}),
        **GGUF_PER_LAYER,
        "layers.{i}.scalar": _fetch_layer_scale,
        **{f"layers.{{i}}.ffn.dense.{n}": f"blk.{{i}}.ffn_{n}" for n in ("gate", "up", "down")},
        "layers.{i}.ffn.dense_norm": "blk.{i}.ffn_norm",
        "layers.{i}.ffn.dense_post_norm": "blk.{i}.post_ffw_norm_1",
        "layers.{i}.ffn.moe_norm": "blk.{i}.pre_ffw_norm_2",
        "layers.{i}.ffn.moe_post_norm": "blk.{i}.post_ffw_norm_2",
        "layers.{i}.ffn.post_norm": "blk.{i}.post_ffw_norm",
        "layers.{i}.ffn.router_norm": lambda fetch, part, s: Scale(fetch("blk.{i}.ffn_gate_inp.scale"), s.dim**-0.5),
        "layers.{i}.ffn.moe.router": "blk.{i}.ffn_gate_inp",
        **{f"layers.{{i}}.ffn.moe.experts.{n}": gguf.read_expert_part(n, "weight") for n in ("gate", "up")},
        "layers.{i}.ffn.moe.experts.down": lambda fetch, part, s: Scale(
            fetch("blk.{i}.ffn_down_exps.weight"), fetch("blk.{i}.ffn_down_exps.scale")
        ),
    },
    **GGUF_SETTINGS,
    block=_build_gguf_layers,
    per_layer=lambda c: build_embedding(convert_keys(c)),
    logit_softcap=lambda c: c.get("final_logit_softcapping") or None,
)
GEMMA4 = LLAMA.derive(
    "gemma4_text",
    inert=("vocab_size_per_layer_input",),
    names={
        **nest_names(_BLOCK),
        **PER_LAYER,
        "layers.{i}.scalar": "layers.{i}.layer_scalar",
        **name_gated_mlp("layers.{i}.ffn.dense", "layers.{i}.mlp"),
        "layers.{i}.ffn.dense_norm": "layers.{i}.pre_feedforward_layernorm",
        "layers.{i}.ffn.dense_post_norm": "layers.{i}.post_feedforward_layernorm_1",
        "layers.{i}.ffn.moe_norm": "layers.{i}.pre_feedforward_layernorm_2",
        "layers.{i}.ffn.moe_post_norm": "layers.{i}.post_feedforward_layernorm_2",
        "layers.{i}.ffn.post_norm": "layers.{i}.post_feedforward_layernorm",
        "layers.{i}.ffn.router_norm": lambda fetch, part, s: Scale(fetch("layers.{i}.router.scale"), s.dim**-0.5),
        "layers.{i}.ffn.moe.router": "layers.{i}.router.proj",
        **_EXPERTS,
        "layers.{i}.ffn.moe.experts.down": _scale_experts_down,
    },
    refuse={"use_bidirectional_attention": (None, False, "vision")},
    # Keys and values of layers that share those of another layer are not used.
    idle=tuple(f"*.self_attn.{n}.weight" for n in ("k_proj", "v_proj", "k_norm")),
    **set_all(None, "heads", "kv_heads", "head_dim", "ffn", "rope"),
    context=key("max_position_embeddings", default=None),
    block=_build_layers,
    per_layer=build_embedding,
    embed_scale=lambda c: math.sqrt(c["hidden_size"]),
    logit_softcap=key("final_logit_softcapping", default=None),
    defaults={"tie_word_embeddings": True},
    gguf=GEMMA4_GGUF,
)
