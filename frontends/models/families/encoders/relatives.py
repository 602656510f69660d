"""Relatives of BERT: other names, projected embeddings, norms before the sublayers, relative positions."""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Add, Recipe, Take

from ....dsl import MaskScaling, RoPE, T5Bias
from ...tables.family import Config, Fetch, key
from ...tables.settings import Settings
from .bert import BERT, LAYER, ROBERTA

DISTILBERT = BERT.but(
    "distilbert",
    names={
        **{f"layers.{{i}}.attn.{x}": f"transformer.layer.{{i}}.attention.{x}_lin" for x in "qkv"},
        "layers.{i}.attn.o": "transformer.layer.{i}.attention.out_lin",
        "layers.{i}.attn_norm": "transformer.layer.{i}.sa_layer_norm",
        "layers.{i}.ffn.up": "transformer.layer.{i}.ffn.lin1",
        "layers.{i}.ffn.down": "transformer.layer.{i}.ffn.lin2",
        "layers.{i}.ffn_norm": "transformer.layer.{i}.output_layer_norm",
    },
    prefix="distilbert.",
    found={"pooler": None},
    unused=("vocab_*", "*classifier.*", "qa_outputs.*", "*embeddings.position_ids"),
    dim=key("dim"),
    layers=key("n_layers"),
    heads=key("n_heads"),
    ffn=key("hidden_dim"),
    token_types=0,
    eps=1e-12,
    activation=key("activation", default="gelu"),
)


def _narrower(config: Config) -> Any:
    """The width of embeddings that are projected, which equal ones are not."""
    width = key("embedding_size", default=128)(config)
    return None if width == key("hidden_size")(config) else width


ELECTRA = BERT.but(
    "electra",
    names={"embed_proj": "embeddings_project"},
    prefix="electra.",
    found={"pooler": None},
    unused=("*embeddings.position_ids", "discriminator_predictions.*", "generator_*", "classifier.*"),
    embed_dim=_narrower,
)
REMBERT = BERT.but(
    "rembert",
    names={"embed_proj": "encoder.embedding_hidden_mapping_in"},
    prefix="rembert.",
    embed_dim=key("input_embedding_size", default=256),
)
BERT_GENERATION = BERT.but("bert-generation", found={"pooler": None}, unused=("lm_head.*",), token_types=0)


def _with_task(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """The rows of token types, each with that of the first task added: transformers' default, where tasks are known."""
    types, tasks = (f"embeddings.{kind}_type_embeddings.{part}" for kind in ("token", "task"))
    if not fetch.has(tasks):
        return fetch(types)
    return Add((fetch(types), Take(fetch(tasks), (0,) * settings.token_types, 0)))


ERNIE = BERT.but("ernie", names={"token_types": _with_task}, prefix="ernie.")

MEGATRON = BERT.but(
    "megatron-bert",
    names={
        "layers.{i}.attn_norm": f"{LAYER}.attention.ln",
        "layers.{i}.ffn_norm": f"{LAYER}.ln",
        "final_norm": "encoder.ln",
    },
    arrangement="pre",
    embed_norm=False,
)
XLM_ROBERTA_XL = ROBERTA.but(
    "xlm-roberta-xl",
    names={
        "layers.{i}.attn_norm": f"{LAYER}.attention.self_attn_layer_norm",
        "layers.{i}.ffn_norm": f"{LAYER}.LayerNorm",
        "final_norm": "encoder.LayerNorm",
    },
    arrangement="pre",
    embed_norm=False,
    eps=key("layer_norm_eps", default=1e-5),
)
ROBERTA_PRELAYERNORM = ROBERTA.but(
    "roberta-prelayernorm",
    names={
        "layers.{i}.attn_norm": f"{LAYER}.attention.LayerNorm",
        "layers.{i}.ffn_norm": f"{LAYER}.intermediate.LayerNorm",
        "final_norm": "LayerNorm",
    },
    prefix="roberta_prelayernorm.",
    arrangement="pre",
)


def _mpnet_positions(config: Config) -> int:
    return int(key("max_position_embeddings")(config)) - 2


MPNET = BERT.but(
    "mpnet",
    names={
        **{f"layers.{{i}}.attn.{x}": f"{LAYER}.attention.attn.{x}" for x in "qkvo"},
        "layers.{i}.attn_norm": f"{LAYER}.attention.LayerNorm",
        "position_bias": "encoder.relative_attention_bias",
    },
    prefix="mpnet.",
    unused=("*embeddings.position_ids", "lm_head.*", "classifier.*"),
    refuse={"relative_attention_num_buckets": (32, None)},  # transformers computes 32 whatever the config says
    context=_mpnet_positions,
    learned_positions=_mpnet_positions,
    position_offset=2,
    token_types=0,
    position_bias=lambda c: T5Bias(heads=key("num_attention_heads")(c)),
)


# -- ESM: proteins


def _absolute(config: Config) -> bool:
    return (config.get("position_embedding_type") or "absolute") == "absolute"


def _frequencies(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Rotary frequencies, which transformers reads from the checkpoint where they are."""
    rope = settings.rope
    assert isinstance(rope, RoPE)
    # The first layer's stand for those of all; transformers 5 writes a star for its number.
    owners = ("", *(f"encoder.layer.{i}.attention.self." for i in "*0"))
    stored = (name for name in (f"{owner}rotary_embeddings.inv_freq" for owner in owners) if fetch.has(name))
    return next((fetch(name) for name in stored), rope.recipe(settings.head_size))


ESM = ROBERTA.but(
    "esm",
    names={
        "embed_norm": "embeddings.layer_norm",
        "layers.{i}.attn_norm": f"{LAYER}.attention.LayerNorm",
        "layers.{i}.ffn_norm": f"{LAYER}.LayerNorm",
        "final_norm": "encoder.emb_layer_norm_after",
        "rope.frequencies": _frequencies,
    },
    prefix="esm.",
    idle=("*contact_head.*",),
    unused=(*ROBERTA.unused, "*.inv_freq", "*.position_embeddings.weight"),
    refuse={"position_embedding_type": ("absolute", "rotary", None), "is_folding_model": (False, None)},
    learned_positions=lambda c: ROBERTA.settings["learned_positions"](c) if _absolute(c) else None,
    context=lambda c: ROBERTA.settings["context"](c) if _absolute(c) else key("max_position_embeddings")(c),
    rope=lambda c: None if _absolute(c) else RoPE(float(c.get("rope_theta") or 10_000.0)),
    mask_scaling=lambda c: MaskScaling(key("mask_token_id")(c)) if c.get("token_dropout") else None,
    token_types=0,
    arrangement="pre",
    embed_norm=lambda c: bool(c.get("emb_layer_norm_before")),
    activation="gelu",
)
