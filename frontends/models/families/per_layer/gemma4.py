"""Gemma 4: embeddings for every layer, shared keys and values, heads of two sizes, experts beside the feed-forward."""

from __future__ import annotations

import math
from typing import Any

from weft.ir.recipes import Recipe, Scale

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
from ...tables.family import Config, Fetch, Names, key, required
from ...tables.rope_config import rope_of
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import gated
from ..dense.llama import LLAMA
from ..experts.mixtral import per_expert

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def types_of(config: Config, every: int) -> list[str]:
    """The kind of attention of each layer; by default each `every`-th is global."""
    layers = range(key("num_hidden_layers")(config))
    return list(
        config.get("layer_types") or ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in layers]
    )


def kv_names(config: Config, types: list[str], i: int) -> dict[str, Any]:
    """Arguments of `Attention` in layer `i`: the last num_kv_shared_layers attend to the keys and values of the last
    layer before them that is of their kind."""
    first = len(types) - (config.get("num_kv_shared_layers") or 0)
    if first == len(types):
        return {}
    last = max((j for j in range(first) if types[j] == types[i]), default=None)
    if i >= first:
        return {"share_kv": types[i]}
    return {"keep_kv": types[i]} if i == last else {}


def rope_of_type(config: Config, kind: str, head: int, defaults: dict[str, Any]) -> RoPE:
    """RoPE of the layers of a `kind`, for heads of `head` numbers."""
    said = (config.get("rope_parameters") or defaults).get(kind) or {}
    if said.get("rope_type") != "proportional":
        return rope_of({**config, "rope_parameters": said})
    turned = int(said.get("partial_rotary_factor", 1.0) * head // 2)
    theta = float(said.get("rope_theta", defaults[kind]["rope_theta"]))
    return RoPE(theta, scaling="proportional", factor=float(said.get("factor", 1.0)), rotated=turned)


def _of_layer(config: Config, i: int, kind: str) -> tuple[int, int]:
    """The size and the number of key/value heads of a layer; global ones may have their own."""
    said = config.get("per_layer_config") or {}
    own = said.get(str(i), said.get(i)) or {}
    size, groups = key("head_dim", default=256)(config), key("num_key_value_heads", default=4)(config)
    if kind == "full_attention" and "per_layer_config" not in config:
        own = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    return own.get("head_dim") or size, own.get("num_key_value_heads") or groups


def _attention(config: Config, types: list[str], i: int, norm: RMSNorm) -> Attention:
    size, groups = _of_layer(config, i, types[i])
    local, bias = types[i] == "sliding_attention", config.get("attention_bias") or False
    return Attention(
        key("num_attention_heads")(config),
        groups,
        size,
        rope=rope_of_type(config, types[i], size, _ROPES),
        window=config.get("sliding_window", 512) if local else None,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        scale=1.0,
        v_norm=norm.plain(),
        keys_as_values=bool(config.get("attention_k_eq_v")) and not local,
        **kv_names(config, types, i),
    )


def _layers(config: Config) -> tuple[LayerWithInput, ...]:
    norm, types = RMSNorm(key("rms_norm_eps", default=1e-6)(config)), types_of(config, 6)
    act = ACTIVATIONS[config.get("hidden_activation", "gelu_pytorch_tanh")]
    width, hidden = config.get("hidden_size_per_layer_input", 256), key("intermediate_size")(config)
    first_shared = len(types) - (config.get("num_kv_shared_layers") or 0)
    experts = None
    if config.get("enable_moe_block"):
        count, k, inner = required(config, "num_experts", "top_k_experts", "moe_intermediate_size")
        experts = MoE(count, inner, k, act)

    def layer(i: int) -> LayerWithInput:
        wide = 2 if config.get("use_double_wide_mlp") and i >= first_shared else 1
        attn, dense = _attention(config, types, i, norm), GatedMLP(wide * hidden, act)
        block = Block(attn, None if experts else dense, norm, "sandwich")
        beside = SplitFeedForward(dense, experts, norm) if experts else None
        return LayerWithInput(block, beside, PerLayerInput(width, act, norm) if width else None)

    return tuple(layer(i) for i in range(len(types)))


def _embedding(config: Config) -> PerLayerEmbedding | None:
    width = config.get("hidden_size_per_layer_input", 256)
    norm = RMSNorm(key("rms_norm_eps", default=1e-6)(config))
    return PerLayerEmbedding(config.get("vocab_size_per_layer_input", 262_144), width, norm) if width else None


def inside(names: Names, at: str = "block") -> Names:
    """`names` of parameters whose blocks stand in the field `at` of their layers."""
    return {name.replace("layers.{i}.", f"layers.{{i}}.{at}.", 1): template for name, template in names.items()}


def _router_norm(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """The router's scale, divided by √dim."""
    return Scale(fetch("layers.{i}.router.scale"), settings.dim**-0.5)


def _weighed_down(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """The output maps of experts, each times its number per_expert_scale."""
    down = _EXPERTS["layers.{i}.ffn.moe.experts.down"]
    assert callable(down)
    return Scale(down(fetch, part, settings), fetch("layers.{i}.router.per_expert_scale"))


_BLOCK: Names = {
    **{name: template for name, template in LLAMA.names.items() if name.startswith("layers.")},
    "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.ffn_norm": "layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
}
_EXPERTS = per_expert("layers.{i}.experts", "gate_proj", "up_proj", "down_proj", at="layers.{i}.ffn.moe")
PER_LAYER: Names = {
    "per_layer.table": "embed_tokens_per_layer",
    "per_layer.projection": "per_layer_model_projection",
    "per_layer.norm": "per_layer_projection_norm",
    "layers.{i}.per_layer.gate": "layers.{i}.per_layer_input_gate",
    "layers.{i}.per_layer.projection": "layers.{i}.per_layer_projection",
    "layers.{i}.per_layer.norm": "layers.{i}.post_per_layer_input_norm",
}
GEMMA4 = LLAMA.but(
    "gemma4_text",
    names={
        **inside(_BLOCK),
        **PER_LAYER,
        "layers.{i}.scalar": "layers.{i}.layer_scalar",
        **gated("layers.{i}.ffn.dense", "layers.{i}.mlp"),
        "layers.{i}.ffn.dense_norm": "layers.{i}.pre_feedforward_layernorm",
        "layers.{i}.ffn.dense_post_norm": "layers.{i}.post_feedforward_layernorm_1",
        "layers.{i}.ffn.moe_norm": "layers.{i}.pre_feedforward_layernorm_2",
        "layers.{i}.ffn.moe_post_norm": "layers.{i}.post_feedforward_layernorm_2",
        "layers.{i}.ffn.post_norm": "layers.{i}.post_feedforward_layernorm",
        "layers.{i}.ffn.router_norm": _router_norm,
        "layers.{i}.ffn.moe.router": "layers.{i}.router.proj",
        **_EXPERTS,
        "layers.{i}.ffn.moe.experts.down": _weighed_down,
    },
    refuse={"use_bidirectional_attention": (None, False, "vision")},
    # What layers that share keys and values have of their own is not used.
    idle=tuple(f"*.self_attn.{n}.weight" for n in ("k_proj", "v_proj", "k_norm")),
    heads=None,
    kv_heads=None,
    head_dim=None,
    ffn=None,
    rope=None,
    context=key("max_position_embeddings", default=None),
    block=_layers,
    per_layer=_embedding,
    embed_scale=lambda c: math.sqrt(c["hidden_size"]),
    logit_softcap=key("final_logit_softcapping", default=None),
    tie=key("tie_word_embeddings", default=True),
)
