"""T5 and its successors: relative position biases, RMSNorm before sublayers, no scale; Switch with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.ir.recipes import Recipe

from ....dsl import MoE, Router, T5Bias
from ...tables import gguf
from ...tables.family import Config, Family, Fetch, Names, key, rule, template
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import add_one, name_gated_mlp
from ...task_heads import ENCODER_DECODER_HEADS, LAST_EOS_HEAD
from ..dense.gemma import GEMMA2
from ..experts.mixtral import stack_experts


def _map_names(part: str, ffn: int) -> Names:
    """Return the checkpoint names of `part` (encoder or decoder); `ffn` is the index of its feed-forward sublayer."""
    block = f"{part}.block.{{i}}.layer"
    names: Names = {
        f"{part}.position_bias": f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{part}.layers.{{i}}.attn_norm": f"{block}.0.layer_norm",
        f"{part}.layers.{{i}}.cross_norm": f"{block}.1.layer_norm",
        f"{part}.layers.{{i}}.ffn_norm": f"{block}.{ffn}.layer_norm",
        f"{part}.layers.{{i}}.ffn.gate": f"{block}.{ffn}.DenseReluDense.wi_0",
        f"{part}.layers.{{i}}.ffn.up": _fetch_up(f"{block}.{ffn}.DenseReluDense"),
        f"{part}.layers.{{i}}.ffn.down": f"{block}.{ffn}.DenseReluDense.wo",
        f"{part}.final_norm": f"{part}.final_layer_norm",
    }
    for weight in "qkvo":
        names[f"{part}.layers.{{i}}.attn.{weight}"] = f"{block}.0.SelfAttention.{weight}"
        names[f"{part}.layers.{{i}}.cross.{weight}"] = f"{block}.1.EncDecAttention.{weight}"
    return names


@template
def _fetch_up(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return ``up`` of feed-forward `name`: wi_1 with a gate, else wi."""
    return fetch(f"{name}.{'wi_1' if settings.gated else 'wi'}.{part}")


def build_t5_bias(config: Config) -> T5Bias:
    """Return the relative position bias of a config, with heads, so that all layers can share it."""
    buckets = config.get("relative_attention_num_buckets", 32)
    return T5Bias(buckets, config.get("relative_attention_max_distance", 128), key("num_heads")(config))


def make_feed_forward_rules(default: str) -> dict[str, Any]:
    """Return the rules for activation and gated by feed_forward_proj: [gated-]name, where gated-gelu means gelu_tanh.
    dense_act_fn and is_gated_act, which transformers writes, override that key; `default` is its default."""
    proj = key("feed_forward_proj", default=default)

    def activation(c: Config) -> str:
        return "gelu_new" if proj(c) == "gated-gelu" else proj(c).removeprefix("gated-")

    return {
        "activation": lambda c: c.get("dense_act_fn") or activation(c),
        "gated": lambda c: c.get("is_gated_act", proj(c).startswith("gated-")),
    }


def _compute_logit_scale(config: Config) -> Any:
    """Return the factor of logits: 1/√dim if scale_decoder_outputs (else tie_word_embeddings) is not False, else 1."""
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    return 1.0 if tied is False else key("d_model")(config) ** -0.5


def _map_gguf_names(part: str, short: str) -> Names:
    """Return the tensor names of `part` (encoder or decoder) in GGUF files, where the part is called `short`."""
    block = f"{short}.blk.{{i}}"
    sublayers = {"attn": "attn", "cross": "cross_attn"}
    return {
        f"{part}.position_bias": f"{short}.blk.0.attn_rel_b",
        f"{part}.layers.{{i}}.attn.bias": f"{block}.attn_rel_b",
        **{f"{part}.layers.{{i}}.{a}.{x}": f"{block}.{b}_{x}" for a, b in sublayers.items() for x in "qkvo"},
        **{f"{part}.layers.{{i}}.{a}_norm": f"{block}.{b}_norm" for a, b in (sublayers | {"ffn": "ffn"}).items()},
        **{f"{part}.layers.{{i}}.ffn.{x}": f"{block}.ffn_{x}" for x in ("gate", "up", "down")},
        f"{part}.final_norm": f"{short}.output_norm",
    }


@rule
def _choose_gguf_bias(config: Config, by_layer: bool) -> T5Bias | None:
    """Return the bias per layer (`by_layer`) or for all layers; None for other files."""
    if (len(config[gguf.BIASED]) > 1) != by_layer:
        return None
    return T5Bias(key("attention.relative_buckets_count")(config), 128, key("attention.head_count")(config))


def _compute_gguf_logit_scale(config: Config) -> Any:
    """Return the factor of logits: 1/√dim for the first T5 (without gates) and UMT5 (a bias per layer), else 1.
    transformers does the same; llama.cpp leaves it out, which does not change the order of tokens."""
    unscaled = config[gguf.GATED] and len(config[gguf.BIASED]) < 2
    return 1.0 if unscaled else key("embedding_length")(config) ** -0.5


T5_GGUF = gguf.BASE.derive(
    "t5",
    inert=(*gguf.BASE.inert, "attention.head_count_kv"),
    names={
        **{name: None for name in gguf.BASE.names if "layers" in name or name == "final_norm"},
        **_map_gguf_names("encoder", "enc"),
        **_map_gguf_names("decoder", "dec"),
        "decoder.lm_head": "output",
    },
    from_keys=dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias", "head_bias", "norm_bias", "qk_norm")),
    unused=("dec.blk.*.cross_attn_rel_b.weight",),
    kind="encoder-decoder",
    kv_heads=None,
    rope=None,
    scale=1.0,
    gated=lambda c: bool(c[gguf.GATED]),
    activation=lambda c: "gelu_new" if c[gguf.GATED] else "relu",
    logit_scale=_compute_gguf_logit_scale,
    position_bias=_choose_gguf_bias(by_layer=False),
    bias=_choose_gguf_bias(by_layer=True),
    decoder=lambda c: {"layers": key("decoder_block_count", "block_count")(c)},
)
T5 = Family(
    model_types=("t5",),
    settings={
        "kind": "encoder-decoder",
        "vocab": key("vocab_size"),
        "dim": key("d_model"),
        "layers": key("num_layers"),
        "heads": key("num_heads"),
        "head_dim": key("d_kv"),
        "ffn": key("d_ff"),
        "context": key("n_positions", default=None),
        "eps": key("layer_norm_epsilon", default=1e-6),
        "scale": 1.0,
        "position_bias": build_t5_bias,
        **make_feed_forward_rules("relu"),
        "logit_scale": _compute_logit_scale,
        "decoder": lambda c: {"layers": key("num_decoder_layers", "num_layers")(c)},
    },
    names={"embed": "shared", **_map_names("encoder", 1), **_map_names("decoder", 2), "decoder.lm_head": "lm_head"},
    from_keys={"tie": lambda keys: "lm_head.weight" not in keys},
    tasks={**ENCODER_DECODER_HEADS, "ForSequenceClassification": replace(LAST_EOS_HEAD, prefix="transformer.")},
    unused=("*coder.embed_tokens.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    refuse={"is_encoder_decoder": (True, None)},
    aliases={"shared.": "decoder.embed_tokens."},
    gguf=T5_GGUF,
)
MT5 = T5.derive("mt5", logit_scale=1.0, gguf=T5_GGUF, **make_feed_forward_rules("gated-gelu"))
UMT5 = T5.derive(
    "umt5",
    names={
        f"{part}.layers.{{i}}.attn.bias": f"{part}.block.{{i}}.layer.0.SelfAttention.relative_attention_bias"
        for part in ("encoder", "decoder")
    },
    bias=build_t5_bias,
    position_bias=None,
    gguf=T5_GGUF,
    **make_feed_forward_rules("gated-gelu"),
)


# -- T5Gemma: an encoder and a decoder with the blocks and configs of Gemma 2


def _map_gemma_names(part: str) -> Names:
    """Return the checkpoint names of `part` (encoder or decoder), which has norms before and after each sublayer."""
    layer = f"{part}.layers.{{i}}"
    names: Names = {f"{part}.embed": f"{part}.embed_tokens", f"{part}.final_norm": add_one(f"{part}.norm")}
    for ours, theirs in {"attn": "self_attn", "cross": "cross_attn", "ffn": "feedforward"}.items():
        names[f"{layer}.{ours}_norm"] = add_one(f"{layer}.pre_{theirs}_layernorm")
        names[f"{layer}.{ours}_post_norm"] = add_one(f"{layer}.post_{theirs}_layernorm")
        names |= {f"{layer}.{ours}.{x}": f"{layer}.{theirs}.{x}_proj" for x in "qkvo" if ours != "ffn"}
    return {**names, **name_gated_mlp(f"{layer}.ffn", f"{layer}.mlp")}


def _apply_to_part(part: str, rule: Any) -> Any:
    """Return the rule that applies `rule` to the config's entry `part` (encoder or decoder); constants stay."""
    return (lambda c: rule(key(part)(c))) if callable(rule) else rule


T5GEMMA = Family(
    model_types=("t5gemma",),
    inert=("vocab_size", "decoder.cross_attention_hidden_size"),
    settings={name: _apply_to_part("encoder", rule) for name, rule in GEMMA2.settings.items()}
    | {
        "kind": "encoder-decoder",
        # One more than in GEMMA2: the encoder sees |i − j| ≤ sliding_window.
        "window": lambda c: tuple(w and w + 1 for w in GEMMA2.settings["window"](key("encoder")(c))),
        "share_embeddings": False,
        "decoder": lambda c: {
            name: _apply_to_part("decoder", rule)(c) if callable(rule) else rule
            for name, rule in GEMMA2.settings.items()
            if name != "tie"
        },
    },
    names={**_map_gemma_names("encoder"), **_map_gemma_names("decoder"), "decoder.lm_head": "lm_head.out_proj"},
    prefix="model.",
    from_keys={"tie": lambda keys: "lm_head.out_proj.weight" not in keys},
    refuse={"is_encoder_decoder": (True, None)},
)


def _build_sparse_layers(config: Config, layers: int, sparse: int) -> tuple[MoE | None, ...]:
    """Return per layer a mixture of experts, in `sparse` evenly spaced layers of `layers`, or None in all others."""
    bias, capacity = config.get("router_bias", False), config.get("expert_capacity", 64)
    router = Router(renormalize=False, bias=bias, capacity=capacity)
    act = ACTIVATIONS[config.get("dense_act_fn", "relu")]
    moe = MoE(config.get("num_experts", 8), key("d_ff")(config), 1, act, router, gated=False)
    step = layers // sparse if sparse else layers
    return tuple(moe if step == 1 or i % step == 1 else None for i in range(layers))


def _read_decoder(config: Config) -> dict[str, object]:
    layers = key("num_decoder_layers", "num_layers")(config)
    return {"layers": layers, "moe": _build_sparse_layers(config, layers, config.get("num_sparse_decoder_layers", 3))}


def _map_switch_names(part: str, ffn: int) -> Names:
    """Return the names of `part` (encoder or decoder) that differ from T5; `ffn` is its feed-forward's index."""
    ours, theirs = f"{part}.layers.{{i}}.ffn", f"{part}.block.{{i}}.layer.{ffn}.mlp"
    return {
        f"{ours}.up": f"{theirs}.wi",
        f"{ours}.down": f"{theirs}.wo",
        f"{ours}.router": f"{theirs}.router.classifier",
        f"{ours}.experts.up": stack_experts(f"{theirs}.experts.expert_{{e}}.wi"),
        f"{ours}.experts.down": stack_experts(f"{theirs}.experts.expert_{{e}}.wo"),
    }


SWITCH = T5.derive(
    "switch_transformers",
    inert=("encoder_sparse_step", "decoder_sparse_step"),
    names={**_map_switch_names("encoder", 1), **_map_switch_names("decoder", 2)},
    refuse={"dense_act_fn": (*ACTIVATIONS, None), "feed_forward_proj": ("relu", None)},
    activation=key("dense_act_fn", default="relu"),
    gated=False,
    moe=lambda c: _build_sparse_layers(c, key("num_layers")(c), c.get("num_sparse_encoder_layers", 3)),
    decoder=_read_decoder,
)
