"""Gemma 3n: four residual streams (AltUp), low-rank layers next to attention, embeddings for every layer."""

from __future__ import annotations

import math

from weft.ir.recipes import Recipe, Reshape, Slice

from ....dsl import AltUpLayer, Attention, GatedMLP, GatherStreams, PerLayerInput, RMSNorm, SpreadStreams
from ...tables import gguf
from ...tables.family import Config, Fetch, key, set_all, template
from ...tables.settings import ACTIVATIONS, Settings
from ..dense.llama import LLAMA
from .gemma4 import (
    GGUF_PER_LAYER,
    GGUF_SETTINGS,
    PER_LAYER,
    build_embedding,
    build_rope,
    convert_keys,
    name_kv,
    read_types,
)

_BASES = {
    "sliding_attention": key("rope_local_base_freq", default=10_000.0),
    "full_attention": key("rope_theta", default=1_000_000.0),
}


def _build_layers(config: Config) -> tuple[AltUpLayer, ...]:
    norm, types = RMSNorm(key("rms_norm_eps", default=1e-6)(config)), read_types(config, 5)
    act = ACTIVATIONS[config.get("hidden_activation", "gelu_pytorch_tanh")]
    layers, size = len(types), key("head_dim", default=256)(config)
    hidden = key("intermediate_size", default=16384)(config)
    hidden = hidden if isinstance(hidden, list) else [hidden] * layers
    sparsity = config.get("activation_sparsity_pattern")
    sparsity = [0.95 if i < 10 < layers else 0.0 for i in range(layers)] if sparsity is None else sparsity
    bias = config.get("attention_bias") or False
    ropes = {kind: {"rope_type": "default", "rope_theta": base(config)} for kind, base in _BASES.items()}

    def layer(i: int) -> AltUpLayer:
        attn = Attention(
            key("num_attention_heads")(config),
            key("num_key_value_heads", default=2)(config),
            size,
            rope=build_rope(config, types[i], size, ropes),
            window=config.get("sliding_window", 512) if types[i] == "sliding_attention" else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            scale=1.0,
            v_norm=norm.plain(),
            **name_kv(config, types, i),
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


def _build_gguf_layers(config: Config) -> tuple[AltUpLayer, ...]:
    """Return the layers of a file; as in llama.cpp, by default the first 20 have separate keys and values."""
    shared = {"attention.shared_kv_layers": max(config["block_count"] - 20, 0)}
    scales = config.get("activation_sparsity_scale")  # in standard deviations
    return _build_layers(
        {
            **convert_keys({**shared, **config}),
            "activation_sparsity_pattern": scales and [round((1 + math.erf(s / math.sqrt(2))) / 2, 6) for s in scales],
            "altup_active_idx": config.get("altup.active_idx", 0),
        }
    )


@template
def _unstack_matrix(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return the matrix of stream {i}, which tensor `name` stores in a stack of all streams."""
    i = int(fetch.layer)
    return Reshape(Slice(fetch(f"{name}.{part}"), 0, i, i + 1), (settings.dim, settings.dim))


GEMMA3N_GGUF = gguf.BASE.derive(
    "gemma3n",
    names={
        **GGUF_PER_LAYER,
        **{f"layers.{{i}}.{n}": f"blk.{{i}}.altup_{n}" for n in ("router_norm", "router")},
        "layers.{i}.prediction": "blk.{i}.altup_predict_coef",
        "layers.{i}.correction": "blk.{i}.altup_correct_coef",
        "layers.{i}.output_scale": "blk.{i}.altup_correct_scale.weight",
        "layers.{i}.laurel_left": "blk.{i}.laurel_l",
        "layers.{i}.laurel_right": "blk.{i}.laurel_r",
        "layers.{i}.laurel_norm": "blk.{i}.laurel_post_norm",
        "spread.projections.{i}": _unstack_matrix("altup_proj"),
        "gather.projections.{i}": _unstack_matrix("altup_unembd_proj"),
    },
    # Keys and values of layers that share those of another layer are not used.
    unused=(*gguf.BASE.unused, *(f"*.attn_{n}.weight" for n in ("k", "v", "k_norm"))),
    **GGUF_SETTINGS,
    block=_build_gguf_layers,
    per_layer=lambda c: build_embedding(convert_keys(c)),
    spread=lambda c: SpreadStreams(c.get("altup.num_inputs", 4)),
    gather=lambda c: GatherStreams(),
    logit_softcap=lambda c: c.get("final_logit_softcapping", 30.0) or None,
)
GEMMA3N = LLAMA.derive(
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
    **set_all(None, "heads", "kv_heads", "head_dim", "ffn", "rope"),
    context=key("max_position_embeddings", default=None),
    block=_build_layers,
    per_layer=build_embedding,
    spread=lambda c: SpreadStreams(c.get("altup_num_inputs", 4)),
    gather=lambda c: GatherStreams(),
    embed_scale=lambda c: math.sqrt(c["hidden_size"]),
    logit_softcap=lambda c: c.get("final_logit_softcapping", 30.0) or None,
    defaults={"tie_word_embeddings": True},
    gguf=GEMMA3N_GGUF,
)
