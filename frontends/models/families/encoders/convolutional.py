"""Encoders with convolutions: SqueezeBERT, whose linear layers are grouped, ConvBERT and Nyströmformer."""

from __future__ import annotations

from weft.ir.errors import WeftError
from weft.ir.recipes import Permute, Recipe, Reshape, Slice

from ....dsl import SpanConvAttention
from ...tables.family import Config, Fetch, key, template
from ...tables.settings import Settings
from ...tables.templates import build_block_diagonal
from ...task_heads import BASE, Head, build_dense_head
from .bert import BERT, LAYER
from .bert_relatives import ELECTRA, read_embedding_width


@template
def _expand_grouped_conv(fetch: Fetch, part: str, settings: Settings, name: str, groups: str) -> Recipe:
    """Return a grouped convolution, stored [out, in / groups, 1], as a block-diagonal matrix [out, in].
    `groups` is the config key with the number of groups; biases are unchanged."""
    stored, count = fetch(f"{name}.{part}"), settings.multipliers[groups]
    if part == "bias":
        return stored
    assert isinstance(settings.ffn, int)
    rows = settings.ffn if "intermediate" in name else settings.dim
    columns = settings.ffn if ".output." in name else settings.dim
    matrix, height = Reshape(stored, (rows, columns // count)), rows // count
    return build_block_diagonal(
        [Slice(matrix, 0, g * height, (g + 1) * height) for g in range(count)], height, columns // count
    )


def _read_groups(config: Config) -> dict[str, int]:
    names = ("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups")
    return {**{n: config.get(n, 4) for n in names}, "post_attention_groups": config.get("post_attention_groups", 1)}


_SQUEEZE = "encoder.layers.{i}"
SQUEEZEBERT = BERT.derive(
    "squeezebert",
    inert=("embedding_size",),
    names={
        **{
            f"layers.{{i}}.attn.{x[0]}": _expand_grouped_conv(f"{_SQUEEZE}.attention.{x}", f"{x[0]}_groups")
            for x in ("query", "key", "value")
        },
        "layers.{i}.attn.o": _expand_grouped_conv(f"{_SQUEEZE}.post_attention.conv1d", "post_attention_groups"),
        "layers.{i}.attn_norm": f"{_SQUEEZE}.post_attention.layernorm",
        "layers.{i}.ffn.up": _expand_grouped_conv(f"{_SQUEEZE}.intermediate.conv1d", "intermediate_groups"),
        "layers.{i}.ffn.down": _expand_grouped_conv(f"{_SQUEEZE}.output.conv1d", "output_groups"),
        "layers.{i}.ffn_norm": f"{_SQUEEZE}.output.layernorm",
    },
    prefix="transformer.",
    refuse={"layer_norm_eps": (1e-12, None)},  # transformers reads it for the norm of the embeddings only
    multipliers=_read_groups,
)


# -- ConvBERT


def _build_span_attention(config: Config) -> SpanConvAttention:
    heads = key("num_attention_heads")(config) // config.get("head_ratio", 2)
    return SpanConvAttention(max(heads, 1), config.get("conv_kernel_size", 9))


@template
def _squeeze_conv(fetch: Fetch, part: str, settings: Settings, name: str, taps: bool = False) -> Recipe:
    """Return a convolution without axes of size 1: [channels, taps] if `taps`, else [out, in], a bias as [out]."""
    shape = (settings.dim, -1) if taps else (-1,) if part == "bias" else (settings.dim // 2, settings.dim)
    return Reshape(fetch(name), shape)


@template
def _expand_grouped_linear(fetch: Fetch, part: str, settings: Settings, name: str, down: bool) -> Recipe:
    """Return a linear layer stored [groups, in, out] as a matrix [out, in]; `down`: the second of a feed-forward."""
    stored, groups = fetch(f"{name}.{part}"), settings.multipliers["groups"]
    if part == "bias" or groups == 1:
        return stored
    assert isinstance(settings.ffn, int)
    sizes = settings.ffn // groups, settings.dim // groups
    wide, high = sizes if down else sizes[::-1]
    transposed_groups = Permute(stored, (0, 2, 1))
    return build_block_diagonal(
        [Reshape(Slice(transposed_groups, 0, g, g + 1), (high, wide)) for g in range(groups)], high, wide
    )


_SELF = f"{LAYER}.attention.self"
CONVBERT = BERT.derive(
    "convbert",
    names={
        "embed_proj": "embeddings_project",
        "layers.{i}.attn.depthwise.weight": _squeeze_conv(f"{_SELF}.key_conv_attn_layer.depthwise.weight", taps=True),
        "layers.{i}.attn.span.weight": _squeeze_conv(f"{_SELF}.key_conv_attn_layer.pointwise.weight"),
        "layers.{i}.attn.span.bias": _squeeze_conv(f"{_SELF}.key_conv_attn_layer.bias"),
        "layers.{i}.attn.kernel": f"{_SELF}.conv_kernel_layer",
        "layers.{i}.attn.conv": f"{_SELF}.conv_out_layer",
        "layers.{i}.ffn.up": _expand_grouped_linear(f"{LAYER}.intermediate.dense", down=False),
        "layers.{i}.ffn.down": _expand_grouped_linear(f"{LAYER}.output.dense", down=True),
    },
    prefix="convbert.",
    tasks={
        "ForSequenceClassification": build_dense_head(BASE),
        "ForMultipleChoice": Head("multiple-choice", "classifier", "last"),
        "ForMaskedLM": ELECTRA.tasks["ForMaskedLM"],
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    from_keys={"pooler": None},
    unused=(*BERT.unused, "generator_*"),
    embed_dim=read_embedding_width("embedding_size", 768),
    mixer=_build_span_attention,
    multipliers=lambda c: {"groups": c.get("num_groups", 1)},
)


# -- Nyströmformer


def _read_taps(config: Config) -> int:
    """Return the number of taps of the convolution of values.

    Raises:
        WeftError: if there are landmarks. They are means over sequences of the config's length, and the inverse of
            their scores starts from a maximum over the entire batch, so that batch rows depend on each other.
    """
    landmarks, length = config.get("num_landmarks", 64), config.get("segment_means_seq_len", 64)
    if landmarks != length:
        raise WeftError(
            f"num_landmarks={landmarks} must equal segment_means_seq_len={length}, which means full attention: "
            "attention by landmarks is not supported"
        )
    return int(key("conv_kernel_size", default=65)(config))


NYSTROMFORMER = BERT.derive(
    "nystromformer",
    names={  # kernels [heads, taps] are stored [heads, 1, taps, 1]
        "layers.{i}.attn.conv": lambda fetch, part, s: Reshape(fetch(f"{_SELF}.conv.{part}"), (s.head_count, -1))
    },
    prefix="nystromformer.",
    tasks={
        "ForSequenceClassification": build_dense_head(BASE),
        "ForMultipleChoice": Head("multiple-choice", "classifier", "first", "pre_classifier", activation="relu"),
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    from_keys={"pooler": None},
    defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    position_offset=2,
    value_conv=_read_taps,
)
