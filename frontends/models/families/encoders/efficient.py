"""Encoders of long sequences: windows (Longformer, LED), global tokens (LongT5), blocks (BigBird), Fourier transforms.

Longformer and LED attend globally at tokens marked by their input global_attention_mask. The default marks none, and
only that is imported.
"""

from __future__ import annotations

from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe

from ....dsl import BlockSparse, FourierMixing, RMSNorm, TransientGlobalAttention, TransientGlobals
from ...tables.family import Config, Fetch, Rule, key, rule, template
from ...tables.settings import Settings
from ...task_heads import BASE, build_dense_head
from ..seq2seq.bart import BART
from ..seq2seq.t5 import T5, build_t5_bias
from .bert import BERT, LAYER, ROBERTA


@rule
def _halve_windows(config: Config, layers: str) -> tuple[int, ...]:
    """Return the window of each layer: half of attention_window (a number, or one per layer), plus the token itself.
    `layers` is the config key with the number of layers."""
    windows = config.get("attention_window", 512)
    return tuple(w // 2 + 1 for w in (windows if isinstance(windows, list) else [windows] * key(layers)(config)))


LONGFORMER = ROBERTA.derive(
    "longformer",
    prefix="longformer.",
    tasks=dict.fromkeys(("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice")),  # global attention
    unused=(*ROBERTA.unused, "qa_outputs.*"),
    idle=("*_global.*",),
    window=_halve_windows("num_hidden_layers"),
)


def _read_led_decoder(config: Config) -> dict[str, Any]:
    positions = key("max_decoder_position_embeddings")(config)
    return {**BART.settings["decoder"](config), "context": positions, "learned_positions": positions, "window": None}


LED = BART.derive(
    "led",
    names={
        **{
            f"encoder.layers.{{i}}.attn.{x[0]}": f"encoder.layers.{{i}}.self_attn.longformer_self_attn.{x}"
            for x in ("query", "key", "value")
        },
        "encoder.layers.{i}.attn.o": "encoder.layers.{i}.self_attn.output",
    },
    prefix="led.",
    idle=(*BART.idle, "*_global.*"),
    refuse={"is_encoder_decoder": (True, None)},
    context=key("max_encoder_position_embeddings"),
    learned_positions=key("max_encoder_position_embeddings"),
    position_offset=0,
    embed_scale=1.0,
    window=_halve_windows("encoder_layers"),
    decoder=_read_led_decoder,
)
GLOBAL = "transient-global"


@template
def _fetch_encoder_attention(fetch: Fetch, part: str, settings: Settings, name: str, layer: str = "{i}") -> Recipe:
    """Return tensor `name` of the attention in encoder layer `layer`, whose names contain the attention's class."""
    kind = "LocalSelfAttention" if settings.mixer is None else "TransientGlobalSelfAttention"
    return fetch(f"encoder.block.{layer}.layer.0.{kind}.{name}.{part}")


def _restrict_to_global(make: Rule) -> Rule:
    """Return the rule `make` for configs of encoders with global tokens, None for all other configs."""
    return lambda config: make(config) if config.get("encoder_attention_type") == GLOBAL else None


def _read_window(config: Config) -> int:
    """Return LongT5's window, local_radius + 1: the distance of the nearest masked token."""
    return int(config.get("local_radius", 127)) + 1


def _build_global_tokens(config: Config) -> TransientGlobals:
    bias, block = build_t5_bias(config), config.get("global_block_size", 16)
    return TransientGlobals(key("num_heads")(config), _read_window(config), block, bias.buckets, bias.max_distance)


def _build_global_attention(config: Config) -> TransientGlobalAttention:
    norm = RMSNorm(key("layer_norm_epsilon", default=1e-6)(config))
    return TransientGlobalAttention(key("num_heads")(config), key("d_kv")(config), norm, scale=1.0)


def _read_longt5_decoder(config: Config) -> dict[str, Any]:
    full: dict[str, Any] = {"window": None, "mixer": None, "relative": None, "position_bias": build_t5_bias(config)}
    return full | {"layers": key("num_decoder_layers", "num_layers")(config)}


LONGT5 = T5.derive(
    "longt5",
    names={
        **{f"encoder.layers.{{i}}.attn.{x}": _fetch_encoder_attention(x) for x in "qkvo"},
        "encoder.layers.{i}.attn.global_norm": _fetch_encoder_attention("global_input_layer_norm"),
        "encoder.position_bias": _fetch_encoder_attention("relative_attention_bias", "0"),
        "encoder.relative.local": _fetch_encoder_attention("relative_attention_bias", "0"),
        "encoder.relative.blocks": _fetch_encoder_attention("global_relative_attention_bias", "0"),
    },
    refuse={"encoder_attention_type": ("local", GLOBAL, None)},
    window=_read_window,
    mixer=_restrict_to_global(_build_global_attention),
    relative=_restrict_to_global(_build_global_tokens),
    # Shared by all encoder layers; with global tokens `relative` has it.
    position_bias=lambda c: None if c.get("encoder_attention_type") == GLOBAL else build_t5_bias(c),
    decoder=_read_longt5_decoder,
)


def _build_block_mask(config: Config) -> BlockSparse | None:
    """Return the visible blocks of keys in transformers' inference, where all random blocks are the first block: each
    of its keys counts 1 + num_random_blocks times. Sequences of at most 5 + 2 · num_random_blocks blocks have full
    attention. Return None if all sequences have it."""
    kind = config.get("attention_type", "block_sparse")
    if kind not in ("block_sparse", "original_full"):
        raise WeftError(f"attention_type={kind!r} is unknown; known are block_sparse, original_full")
    if kind == "original_full":
        return None
    block, random = config.get("block_size", 64), config.get("num_random_blocks", 3)
    return BlockSparse(block, first_weight=1 + random, dense=(5 + 2 * random) * block)


BIG_BIRD = BERT.derive(
    "big_bird",
    names={"pooler": "pooler"},
    from_keys={"pooler": lambda keys: not keys.isdisjoint(("pooler.weight", "bert.pooler.weight"))},
    tasks={
        "ForSequenceClassification": build_dense_head(BASE),
        "ForQuestionAnswering": None,
    },  # its code masks the question
    mask=_build_block_mask,
    defaults={"hidden_act": "gelu_new"},
    embed_scale=lambda c: key("hidden_size")(c) ** 0.5 if c.get("rescale_embeddings") else 1.0,
    qkv_bias=key("use_bias", default=True),
)
FNET = BERT.derive(
    "fnet",
    inert=("num_attention_heads",),
    names={"embed_proj": "embeddings.projection", "layers.{i}.attn_norm": f"{LAYER}.fourier.output.LayerNorm"},
    prefix="fnet.",
    heads=None,
    mixer=lambda c: FourierMixing(),
    defaults={"type_vocab_size": 4, "hidden_act": "gelu_new"},
    embed_dim=key("hidden_size"),
)
