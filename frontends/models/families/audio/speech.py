"""Encoder-decoders that transcribe speech: Whisper (Radford 2022) and Moonshine (Jeffries 2024)."""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Full

from ....dsl import Convolution, GroupNorm, LearnedPositions, SoundStem
from ...tables.family import Config, Family, Names, Template, key, set_all
from ...tables.rope_config import rope_with
from ...tables.templates import slice_half
from ..seq2seq.bart import BART


def _number_from_one(name: str) -> Template:
    """Return a template for the tensor `name` of convolution {i}, whose number in checkpoints is i + 1."""
    return lambda fetch, part, settings: fetch(f"{name}{int(fetch.layer) + 1}.{part}")


# -- Whisper: the layers of BART in pre-norm form, on a spectrogram of 30 seconds


def _build_spectrogram_stem(config: Config) -> SoundStem:
    dim, frames = key("d_model")(config), key("max_source_positions", default=1500)(config)
    layers = [Convolution(dim, 3, stride, padding=1) for stride in (1, 2)]
    bins = key("num_mel_bins", default=80)(config)
    return SoundStem(layers, bins=bins, length=2 * frames, positions=LearnedPositions(frames))


_ATTENTIONS = ("encoder.layers.{i}.attn", "decoder.layers.{i}.attn", "decoder.layers.{i}.cross")
WHISPER = BART.derive(
    "whisper",
    inert=("scale_embedding",),
    names={
        "encoder.stem.convolutions.{i}.conv": _number_from_one("encoder.conv"),
        # Its keys lack a bias: any bias shifts all scores of a query equally.
        **{f"{attention}.k.bias": lambda fetch, part, s: Full(0.0, (s.dim,)) for attention in _ATTENTIONS},
        "decoder.embed": "decoder.embed_tokens",
        "decoder.lm_head": "proj_out",
    },
    from_keys={"tie": None, "head_bias": None},
    unused=("proj_out.weight",),
    aliases={"shared.": None},
    refuse={"is_encoder_decoder": (True, None)},
    kind="encoder-decoder",
    arrangement="pre",
    embed_norm=False,
    embed_scale=1.0,
    position_offset=0,
    learned_positions=None,
    tie=key("tie_word_embeddings", default=True),
    context=key("max_source_positions", default=1500),
    stem=_build_spectrogram_stem,
    share_embeddings=False,
    decoder=lambda c: {
        **BART.settings["decoder"](c),
        "stem": None,
        **set_all(key("max_target_positions", default=448)(c), "context", "learned_positions"),
    },
)


# -- Moonshine: a waveform through three convolutions, rotary positions in part of each head, a gated decoder


def _build_waveform_stem(config: Config) -> SoundStem:
    dim = key("hidden_size")(config)
    first = Convolution(dim, 127, 64, bias=False, norm=GroupNorm(1), activation="tanh", norm_last=True)
    return SoundStem([first, Convolution(2 * dim, 7, 3), Convolution(dim, 3, 2)], seen="start")


def _map_layer_names(part: str, norms: dict[str, str]) -> Names:
    """Return the checkpoint names of the layers of `part` (encoder or decoder); `norms` maps each sublayer to its
    norm."""
    names: Names = {f"{part}.layers.{{i}}.{ours}_norm": f"{part}.layers.{{i}}.{norms[ours]}" for ours in norms}
    for ours, theirs in {"attn": "self_attn", "cross": "encoder_attn"}.items():
        names |= {f"{part}.layers.{{i}}.{ours}.{x}": f"{part}.layers.{{i}}.{theirs}.{x}_proj" for x in "qkvo"}
    return {
        **names,
        f"{part}.layers.{{i}}.ffn.up": f"{part}.layers.{{i}}.mlp.fc1",
        f"{part}.layers.{{i}}.ffn.down": f"{part}.layers.{{i}}.mlp.fc2",
    }


def _list_size_keys(part: str) -> dict[str, Any]:
    """Return the rules for the settings that have separate config keys for each `part` (encoder or decoder)."""
    return {
        "layers": key(f"{part}_num_hidden_layers", default=6),
        "heads": key(f"{part}_num_attention_heads", default=8),
        "kv_heads": key(f"{part}_num_key_value_heads", default=None),
        "activation": key(f"{part}_hidden_act", default="gelu" if part == "encoder" else "silu"),
    }


MOONSHINE = Family(
    model_types=("moonshine",),
    settings={
        "kind": "encoder-decoder",
        "vocab": key("vocab_size"),
        "dim": key("hidden_size"),
        "ffn": key("intermediate_size"),
        **_list_size_keys("encoder"),
        "norm": "layer",
        "norm_bias": False,
        "eps": 1e-5,
        "gated": False,
        "qkv_bias": key("attention_bias", default=False),
        "ffn_bias": True,
        "rope": rope_with(interleaved=True, partial_rotary_factor=0.9),
        "tie": key("tie_word_embeddings", default=True),
        "context": 4096,  # frames, at 42 per second: the config states no context
        "stem": _build_waveform_stem,
        "share_embeddings": False,
        "decoder": lambda c: {
            **{name: rule(c) for name, rule in _list_size_keys("decoder").items()},
            "context": key("max_position_embeddings", default=512)(c),
            "gated": True,
            "stem": None,
        },
    },
    names={
        "encoder.stem.convolutions.{i}.conv": _number_from_one("encoder.conv"),
        "encoder.stem.convolutions.{i}.norm": "encoder.groupnorm",
        **_map_layer_names("encoder", {"attn": "input_layernorm", "ffn": "post_attention_layernorm"}),
        **_map_layer_names(
            "decoder", {"attn": "input_layernorm", "cross": "post_attention_layernorm", "ffn": "final_layernorm"}
        ),
        "decoder.layers.{i}.ffn.up": slice_half("decoder.layers.{i}.mlp.fc1", 0),  # up above gate
        "decoder.layers.{i}.ffn.gate": slice_half("decoder.layers.{i}.mlp.fc1", 1),
        "encoder.final_norm": "encoder.layer_norm",
        "decoder.embed": "decoder.embed_tokens",
        "decoder.final_norm": "decoder.norm",
        "decoder.lm_head": "proj_out",
    },
    prefix="model.",
    unused=("proj_out.weight",),
    refuse={"is_encoder_decoder": (True, None)},
)
