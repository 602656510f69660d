"""DeBERTa: BERT with separate attention to content and relative positions."""

from __future__ import annotations

from dataclasses import replace

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe

from ....dsl import MLP, Block, ConvolvedBlock, DisentangledAttention, LayerNorm, RelativeTable
from ...tables.family import Config, Fetch, key, read_required, read_same, template
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import slice_qkv
from ...task_heads import Head
from .bert import BERT, LAYER

SELF = f"{LAYER}.attention.self"


def _read_score_terms(config: Config) -> list[str]:
    """Return the terms of scores in addition to content-to-content: some of c2p, p2c; raise WeftError for others."""
    stated = config.get("pos_att_type") or []
    terms = [term.strip() for term in stated.lower().split("|")] if isinstance(stated, str) else list(stated)
    is_valid = set(terms) <= {"c2p", "p2c"} and len(set(terms)) == len(terms)
    if not config.get("relative_attention") or not is_valid:
        raise WeftError(
            f"pos_att_type={stated!r} is not supported, only c2p and p2c, once each, and relative_attention=True"
        )
    return terms


def _build_attention(config: Config, key_bias: bool = True) -> DisentangledAttention:
    terms, shared = _read_score_terms(config), bool(config.get("share_att_key"))
    return DisentangledAttention(key("num_attention_heads")(config), "c2p" in terms, "p2c" in terms, shared, key_bias)


def _read_span(config: Config) -> int:
    """Return the largest distance: max_relative_positions if positive, else max_position_embeddings."""
    reach = int(config.get("max_relative_positions", -1))
    return reach if reach > 0 else int(key("max_position_embeddings")(config))


def _build_relative_table(config: Config) -> RelativeTable | None:
    if not _read_score_terms(config):
        return None
    buckets = int(config.get("position_buckets", -1))
    normed = "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower()
    norm = LayerNorm(config.get("layer_norm_eps", 1e-7)) if normed else None
    span = _read_span(config)
    return RelativeTable(buckets, span, norm) if buckets > 0 else RelativeTable(span, norm=norm)


def _build_convolved_blocks(config: Config) -> tuple[ConvolvedBlock | None, ...] | None:
    """Return the blocks per layer: the first with a convolution, None (the default block) after; None without one."""
    kernel = config.get("conv_kernel_size") or 0
    if kernel <= 0:
        return None
    norm = LayerNorm(key("layer_norm_eps", default=1e-7)(config))
    hidden, layers = read_required(config, "intermediate_size", "num_hidden_layers")
    feed = MLP(hidden, ACTIVATIONS[config.get("hidden_act", "gelu")], bias=True)
    act = ACTIVATIONS[config.get("conv_act", "tanh")]
    block = Block(_build_attention(config), feed, norm, "post")
    return (ConvolvedBlock(block, kernel, config.get("conv_groups", 1), act, norm), *[None] * (layers - 1))


_POOLED = Head(
    *("text-classification", "classifier", "first", "pooler.dense"), activation=key("pooler_hidden_act", default="gelu")
)
DEBERTA_V2 = BERT.derive(
    "deberta-v2",
    inert=("pooler_hidden_size", "pooler_hidden_act"),
    names={
        **{f"layers.{{i}}.attn.{x[0]}": f"{SELF}.{x}_proj" for x in ("query", "key", "value")},
        "layers.{i}.attn.pos_k": f"{SELF}.pos_key_proj",
        "layers.{i}.attn.pos_q": f"{SELF}.pos_query_proj",
        "relative.weight": "encoder.rel_embeddings.weight",
        "relative.norm": "encoder.LayerNorm",
        "layers.{i}.conv": "encoder.conv.conv",
        "layers.{i}.conv_norm": "encoder.conv.LayerNorm",
    },
    prefix="deberta.",
    from_keys={"pooler": None},
    tasks={
        "ForSequenceClassification": _POOLED,
        "ForMultipleChoice": replace(_POOLED, task="multiple-choice"),
        "ForMaskedLM": replace(BERT.tasks["ForMaskedLM"], refuse={"legacy": (True, None)}),
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    unused=(
        *BERT.unused,
        *("*embeddings.position_embeddings.weight", "lm_predictions.*", "mask_predictions.*", "pooler.*"),
    ),
    dim=read_same("hidden_size", "embedding_size"),
    defaults={"layer_norm_eps": 1e-7, "type_vocab_size": 0},
    learned_positions=lambda c: key("max_position_embeddings")(c) if c.get("position_biased_input", True) else None,
    relative=_build_relative_table,
    mixer=_build_attention,
    block=_build_convolved_blocks,
)


@template
def _unpack_qkv(fetch: Fetch, part: str, settings: Settings, which: str) -> Recipe:
    """Return q, k or v (`which`) of in_proj, which is fused head by head; q and v have separate biases."""
    weight = slice_qkv(f"{SELF}.in_proj", which, grouped=True)
    return weight(fetch, part, settings) if part == "weight" else fetch(f"{SELF}.{which}_bias")


DEBERTA = DEBERTA_V2.derive(
    "deberta",
    names={
        **{f"layers.{{i}}.attn.{which}": _unpack_qkv(which) for which in "qkv"},
        "layers.{i}.attn.pos_k": f"{SELF}.pos_proj",
        "layers.{i}.attn.pos_q": f"{SELF}.pos_q_proj",
    },
    refuse={"talking_head": (False, None), "share_att_key": (False, None), "position_buckets": (-1, 0, None)},
    mixer=lambda c: _build_attention(c, key_bias=False),
    block=None,
)
