"""Gemma 3n: four residual streams (AltUp), low-rank maps beside attention, embeddings for every layer."""

from __future__ import annotations

import math

from ....dsl import (
    AltUpLayer,
    Attention,
    GatedMLP,
    GatherStreams,
    PerLayerEmbedding,
    PerLayerInput,
    RMSNorm,
    SpreadStreams,
)
from ...tables.family import Config, key
from ...tables.settings import ACTIVATIONS
from ..dense.llama import LLAMA
from .gemma4 import PER_LAYER, kv_names, rope_of_type, types_of

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


def _layers(config: Config) -> tuple[AltUpLayer, ...]:
    norm, types = RMSNorm(key("rms_norm_eps", default=1e-6)(config)), types_of(config, 5)
    act = ACTIVATIONS[config.get("hidden_activation", "gelu_pytorch_tanh")]
    layers, size = len(types), key("head_dim", default=256)(config)
    hidden = key("intermediate_size", default=16384)(config)
    hidden = hidden if isinstance(hidden, list) else [hidden] * layers
    sparsity = config.get("activation_sparsity_pattern")
    sparsity = [0.95 if i < 10 < layers else 0.0 for i in range(layers)] if sparsity is None else sparsity
    bias = config.get("attention_bias") or False

    def layer(i: int) -> AltUpLayer:
        attn = Attention(
            key("num_attention_heads")(config),
            key("num_key_value_heads", default=2)(config),
            size,
            rope=rope_of_type(config, types[i], size, _ROPES),
            window=config.get("sliding_window", 512) if types[i] == "sliding_attention" else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            scale=1.0,
            v_norm=norm.plain(),
            **kv_names(config, types, i),
        )
        return AltUpLayer(
            attn,
            GatedMLP(hidden[i], act, sparsity=float(sparsity[i])),
            config.get("laurel_rank", 64),
            PerLayerInput(config.get("hidden_size_per_layer_input", 256), act, norm),
            norm,
            config.get("altup_active_idx", 0),
            config.get("altup_correct_scale", True),
        )

    return tuple(layer(i) for i in range(layers))


def _embedding(config: Config) -> PerLayerEmbedding:
    width = config.get("hidden_size_per_layer_input", 256)
    norm = RMSNorm(key("rms_norm_eps", default=1e-6)(config))
    return PerLayerEmbedding(config.get("vocab_size_per_layer_input", 262_144), width, norm)


GEMMA3N = LLAMA.but(
    "gemma3n_text",
    names={
        **PER_LAYER,
        "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.ffn_norm": "layers.{i}.pre_feedforward_layernorm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
        "layers.{i}.router_norm": "layers.{i}.altup.router_norm",
        "layers.{i}.router": "layers.{i}.altup.modality_router",
        "layers.{i}.prediction": "layers.{i}.altup.prediction_coefs",
        "layers.{i}.correction": "layers.{i}.altup.correction_coefs",
        "layers.{i}.output_scale": "layers.{i}.altup.correct_output_scale",
        "layers.{i}.laurel_left": "layers.{i}.laurel.linear_left",
        "layers.{i}.laurel_right": "layers.{i}.laurel.linear_right",
        "layers.{i}.laurel_norm": "layers.{i}.laurel.post_laurel_norm",
        "spread.projections.{i}": "altup_projections.{i}",
        "gather.projections.{i}": "altup_unembed_projections.{i}",
    },
    idle=(*(f"*.self_attn.{n}.weight" for n in ("k_proj", "v_proj", "k_norm")), "*.correct_output_scale"),
    heads=None,
    kv_heads=None,
    head_dim=None,
    ffn=None,
    rope=None,
    context=key("max_position_embeddings", default=None),
    block=_layers,
    per_layer=_embedding,
    spread=lambda c: SpreadStreams(c.get("altup_num_inputs", 4)),
    gather=lambda c: GatherStreams(),
    embed_scale=lambda c: math.sqrt(c["hidden_size"]),
    logit_softcap=lambda c: c.get("final_logit_softcapping", 30.0) or None,
    tie=key("tie_word_embeddings", default=True),
)
