"""Encoders of waveforms: wav2vec 2.0 (Baevski 2020) and HuBERT (Hsu 2021)."""

from __future__ import annotations

from weft.ir.recipes import Map, Recipe, Reshape, Scale
from weft.ir.recipes.matrices import Norms

from ....dsl import Convolution, GroupNorm, LayerNorm, PositionalConvolution, SoundStem
from ...tables.family import BIASES, Config, Family, Fetch, key, set_all
from ...tables.settings import ACTIVATIONS, Settings
from ...task_heads import Head

_CONV = "encoder.pos_conv_embed.conv"


def _normalize_kernel(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the positional convolution's kernel, g · v/‖v‖ per tap (weight normalization, Salimans & Kingma 2016)."""
    stem = f"{_CONV}.parametrizations.weight"
    is_new = fetch.has(f"{stem}.original1")
    names = (f"{stem}.original0", f"{stem}.original1") if is_new else (f"{_CONV}.weight_g", f"{_CONV}.weight_v")
    length, direction = map(fetch, names)
    return Scale(Scale(direction, Map(Norms(direction, 2), "reciprocal"), 2), Reshape(length, (-1,)), 2)


def _build_stem(config: Config) -> SoundStem:
    channels, kernels, strides = (
        key(f"conv_{name}", default=default)(config)
        for name, default in (("dim", [512] * 7), ("kernel", [10, 3, 3, 3, 3, 2, 2]), ("stride", [5, 2, 2, 2, 2, 2, 2]))
    )
    if not len(channels) == len(kernels) == len(strides):
        counts = f"{len(channels)}, {len(kernels)} and {len(strides)}"
        raise ValueError(f"conv_dim, conv_kernel and conv_stride must be equally long, but have {counts} values")
    style = config.get("feat_extract_norm", "group")
    norms = [GroupNorm()] + [None] * len(channels) if style == "group" else [LayerNorm()] * len(channels)
    activation = ACTIVATIONS[config.get("feat_extract_activation", "gelu")]
    bias, eps = config.get("conv_bias", False), key("layer_norm_eps", default=1e-5)(config)
    layers = [
        Convolution(dim, size, stride, bias=bias, norm=norm, activation=activation)
        for dim, size, stride, norm in zip(channels, kernels, strides, norms, strict=False)
    ]
    kernel, groups = config.get("num_conv_pos_embeddings", 128), config.get("num_conv_pos_embedding_groups", 16)
    norm = LayerNorm(eps) if config.get("feat_proj_layer_norm", True) else None
    positions = PositionalConvolution(kernel, groups, activation)
    return SoundStem(layers, norm=norm, projects=True, positions=positions, seen="whole")


_LAYER = "encoder.layers.{i}"
_CONVOLUTION = "feature_extractor.conv_layers.{i}"
WAV2VEC2 = Family(
    inert=("num_feat_extract_layers",),
    model_types=("wav2vec2",),
    settings={
        "kind": "audio-encoder",
        "vocab": None,
        "dim": key("hidden_size"),
        "layers": key("num_hidden_layers"),
        "heads": key("num_attention_heads"),
        "ffn": key("intermediate_size"),
        "norm": "layer",
        "eps": key("layer_norm_eps", default=1e-5),
        "arrangement": lambda c: "pre" if c.get("do_stable_layer_norm") else "post",
        "activation": key("hidden_act", default="gelu"),
        "gated": False,
        **set_all(True, *BIASES),
        "embed_norm": lambda c: not c.get("do_stable_layer_norm"),
        "stem": _build_stem,
    },
    names={
        "stem.convolutions.{i}.conv": f"{_CONVOLUTION}.conv",
        "stem.convolutions.{i}.norm": f"{_CONVOLUTION}.layer_norm",
        "stem.norm": "feature_projection.layer_norm",
        "stem.project": "feature_projection.projection",
        "positions.weight": _normalize_kernel,
        "positions.bias": f"{_CONV}.bias",
        "embed_norm": "encoder.layer_norm",
        "final_norm": "encoder.layer_norm",
        "layers.{i}.attn_norm": f"{_LAYER}.layer_norm",
        **{f"layers.{{i}}.attn.{x}": f"{_LAYER}.attention.{x}_proj" for x in "qkv"},
        "layers.{i}.attn.o": f"{_LAYER}.attention.out_proj",
        "layers.{i}.ffn_norm": f"{_LAYER}.final_layer_norm",
        "layers.{i}.ffn.up": f"{_LAYER}.feed_forward.intermediate_dense",
        "layers.{i}.ffn.down": f"{_LAYER}.feed_forward.output_dense",
    },
    prefix="wav2vec2.",
    tasks={
        "ForCTC": Head("ctc", "lm_head", labels=key("vocab_size")),
        "ForSequenceClassification": Head(
            *("audio-classification", "classifier", "mean", "projector"),
            activation=None,
            width=key("classifier_proj_size", default=256),
            refuse={"use_weighted_layer_sum": (False, None)},
        ),
    },
    unused=(
        *("*masked_spec_embed", "quantizer.*", "project_q.*", "project_hid.*"),  # of training
        *("lm_head.*", "*classifier.*", "projector.*", "layer_weights"),  # heads
    ),
    refuse={"feat_extract_norm": ("group", "layer", None), "add_adapter": (False, None), "adapter_attn_dim": (None,)},
)
HUBERT = WAV2VEC2.derive("hubert", prefix="hubert.", refuse={"conv_pos_batch_norm": (False, None)})
