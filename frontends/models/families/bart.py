"""BART and its relatives: biases, LayerNorm, positions that are learned (mBART) or sinusoids (Marian, Pegasus)."""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Recipe, Reshape

from ..tables.family import Config, Family, Fetch, Names, key
from ..tables.settings import Settings


def _names(part: str) -> Names:
    """Names of the encoder or decoder."""
    layer = f"{part}.layers.{{i}}"
    names: Names = {
        f"{part}.positions": f"{part}.embed_positions",
        f"{part}.embed_norm": f"{part}.layernorm_embedding",
        f"{layer}.ffn.up": f"{layer}.fc1",
        f"{layer}.ffn.down": f"{layer}.fc2",
        f"{layer}.ffn_norm": f"{layer}.final_layer_norm",
        f"{part}.final_norm": f"{part}.layer_norm",
    }
    for ours, theirs in {"attn": "self_attn", "cross": "encoder_attn"}.items():
        names[f"{layer}.{ours}_norm"] = f"{layer}.{theirs}_layer_norm"
        for weight, name in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items():
            names[f"{layer}.{ours}.{weight}"] = f"{layer}.{theirs}.{name}"
    return names


def _logits_bias(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """The head's bias, stored as one row of its own."""
    return fetch("lm_head.weight") if part == "weight" else Reshape(fetch("final_logits_bias"), (settings.vocab,))


def _scale(config: Config) -> float:
    return float(key("d_model")(config) ** 0.5) if config.get("scale_embedding") else 1.0


def _decoder(config: Config) -> dict[str, Any]:
    sizes = {"layers": "decoder_layers", "heads": "decoder_attention_heads", "ffn": "decoder_ffn_dim"}
    return {setting: key(name)(config) for setting, name in sizes.items()}


BART = Family(
    model_types=("bart",),
    settings={
        "kind": "encoder-decoder",
        "vocab": key("vocab_size"),
        "dim": key("d_model"),
        "layers": key("encoder_layers"),
        "heads": key("encoder_attention_heads"),
        "ffn": key("encoder_ffn_dim"),
        "context": key("max_position_embeddings"),
        "norm": "layer",
        "eps": 1e-5,
        "arrangement": "post",
        "activation": key("activation_function", default="gelu"),
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "embed_scale": _scale,
        "embed_norm": True,
        "learned_positions": key("max_position_embeddings"),
        "position_offset": 2,
        "decoder": _decoder,
    },
    names={"embed": "shared", **_names("encoder"), **_names("decoder"), "decoder.lm_head": _logits_bias},
    prefix="model.",
    found={
        "tie": lambda keys: "lm_head.weight" not in keys,
        "head_bias": lambda keys: "final_logits_bias" in keys,
    },
    unused=("*coder.embed_tokens.weight", "*coder.embed_positions.weight", "*coder.version"),
    refuse={"is_encoder_decoder": (True, None)},
    aliases={"shared.": "decoder.embed_tokens."},
)
MBART = BART.but("mbart", arrangement="pre")
MARIAN = BART.but(
    "marian",
    refuse={"share_encoder_decoder_embeddings": (True, None)},
    embed_norm=False,
    learned_positions=None,
    sinusoids=key("max_position_embeddings"),
)
PEGASUS = MARIAN.but("pegasus", arrangement="pre")
