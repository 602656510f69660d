"""Relatives of BERT: other names, projected embeddings, norms before the sublayers, relative positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Add, Recipe, Take

from ....dsl import MLP, AdaptedBlock, Attention, Block, LayerNorm, MaskScaling, RoPE, T5Bias
from ...tables.family import Config, Fetch, key, read_required, rule, set_all, template
from ...tables.settings import ACTIVATIONS, Settings
from ...task_heads import BASE, ROBERTA_HEADS, SPANS, Head, build_dense_head, build_lm_head, read_labels
from .bert import BERT, LAYER, ROBERTA

_PRE = Head("text-classification", "classifier", "first", "pre_classifier", activation="relu")
DISTILBERT = BERT.derive(
    "distilbert",
    inert=("sinusoidal_pos_embds",),
    names={
        **{f"layers.{{i}}.attn.{x}": f"transformer.layer.{{i}}.attention.{x}_lin" for x in "qkv"},
        "layers.{i}.attn.o": "transformer.layer.{i}.attention.out_lin",
        "layers.{i}.attn_norm": "transformer.layer.{i}.sa_layer_norm",
        "layers.{i}.ffn.up": "transformer.layer.{i}.ffn.lin1",
        "layers.{i}.ffn.down": "transformer.layer.{i}.ffn.lin2",
        "layers.{i}.ffn_norm": "transformer.layer.{i}.output_layer_norm",
    },
    prefix="distilbert.",
    from_keys={"pooler": None},
    tasks={
        "ForSequenceClassification": _PRE,
        "ForMultipleChoice": replace(_PRE, task="multiple-choice"),
        "ForMaskedLM": Head(
            *("fill-mask", "vocab_projector"),
            dense="vocab_transform",
            norm="vocab_layer_norm",
            activation=BASE,
            tied=key("tie_word_embeddings", default=True),
        ),
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    unused=("vocab_*", "*classifier.*", "qa_outputs.*", "*embeddings.position_ids"),
    dim=key("dim"),
    layers=key("n_layers"),
    heads=key("n_heads"),
    ffn=key("hidden_dim"),
    token_types=0,
    eps=1e-12,
    activation=key("activation", default="gelu"),
)


@rule
def read_embedding_width(config: Config, name: str, default: int | None) -> Any:
    """Return the width of embeddings, in the config key `name`; None if it equals hidden_size."""
    width = key(name, default=default)(config)
    return None if width == key("hidden_size")(config) else width


ELECTRA = BERT.derive(
    "electra",
    names={"embed_proj": "embeddings_project"},
    prefix="electra.",
    from_keys={"pooler": None},
    tasks={
        "ForSequenceClassification": build_dense_head("gelu"),
        "ForMultipleChoice": Head(
            *("multiple-choice", "classifier", "first", "sequence_summary.summary"),
            activation=key("summary_activation", default="gelu"),
            refuse={"summary_type": ("first", None)},
        ),
        "ForMaskedLM": Head(
            *("fill-mask", "generator_lm_head"),
            dense="generator_predictions.dense",
            norm="generator_predictions.LayerNorm",
            activation="gelu",
            tied=key("tie_word_embeddings", default=True),
        ),
        "ForPreTraining": Head(
            *("replaced-token-detection", "discriminator_predictions.dense_prediction"),
            dense="discriminator_predictions.dense",
            activation=BASE,
        ),
        "ForNextSentencePrediction": None,
    },
    unused=("*embeddings.position_ids", "discriminator_predictions.*", "generator_*", "classifier.*"),
    embed_dim=read_embedding_width("embedding_size", 128),
)
REMBERT = BERT.derive(
    "rembert",
    names={"embed_proj": "encoder.embedding_hidden_mapping_in"},
    prefix="rembert.",
    tasks={
        "ForMaskedLM": build_lm_head(
            "cls.predictions",
            "dense",
            "LayerNorm",
            out_bias="",
            activation=BASE,
            tied=False,
            width=key("output_embedding_size", default=1664),
        ),
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    embed_dim=key("input_embedding_size", default=256),
)
BERT_GENERATION = BERT.derive("bert-generation", from_keys={"pooler": None}, unused=("lm_head.*",), token_types=0)


def _add_task_row(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the table of token types, each row plus the row of task 0 (transformers' default) if there are tasks."""
    types, tasks = (f"embeddings.{kind}_type_embeddings.{part}" for kind in ("token", "task"))
    if not fetch.has(tasks):
        return fetch(types)
    return Add((fetch(types), Take(fetch(tasks), (0,) * settings.token_types, 0)))


ERNIE = BERT.derive("ernie", inert=("use_task_id",), names={"token_types": _add_task_row}, prefix="ernie.")

MEGATRON = BERT.derive(
    "megatron-bert",
    names={
        "layers.{i}.attn_norm": f"{LAYER}.attention.ln",
        "layers.{i}.ffn_norm": f"{LAYER}.ln",
        "final_norm": "encoder.ln",
    },
    arrangement="pre",
    embed_norm=False,
)
XLM_ROBERTA_XL = ROBERTA.derive(
    "xlm-roberta-xl",
    names={
        "layers.{i}.attn_norm": f"{LAYER}.attention.self_attn_layer_norm",
        "layers.{i}.ffn_norm": f"{LAYER}.LayerNorm",
        "final_norm": "encoder.LayerNorm",
    },
    arrangement="pre",
    embed_norm=False,
    defaults={"layer_norm_eps": 1e-5},
)
ROBERTA_PRELAYERNORM = ROBERTA.derive(
    "roberta-prelayernorm",
    names={
        "layers.{i}.attn_norm": f"{LAYER}.attention.LayerNorm",
        "layers.{i}.ffn_norm": f"{LAYER}.intermediate.LayerNorm",
        "final_norm": "LayerNorm",
    },
    prefix="roberta_prelayernorm.",
    arrangement="pre",
)
MPNET = BERT.derive(
    "mpnet",
    names={
        **{f"layers.{{i}}.attn.{x}": f"{LAYER}.attention.attn.{x}" for x in "qkvo"},
        "layers.{i}.attn_norm": f"{LAYER}.attention.LayerNorm",
        "position_bias": "encoder.relative_attention_bias",
    },
    prefix="mpnet.",
    tasks=ROBERTA_HEADS,
    unused=("*embeddings.position_ids", "lm_head.*", "classifier.*"),
    refuse={"relative_attention_num_buckets": (32, None)},  # transformers computes 32, whatever the config states
    **set_all(lambda c: key("max_position_embeddings")(c) - 2, "context", "learned_positions"),
    position_offset=2,
    token_types=0,
    position_bias=lambda c: T5Bias(heads=key("num_attention_heads")(c)),
)


# -- XLM


def _check_language(config: Config) -> int:
    """Return 0, the number of token types; raise WeftError if the model has language embeddings, another input."""
    if config.get("n_langs", 1) > 1 and config.get("use_lang_emb", True):
        raise WeftError(f"n_langs={config['n_langs']} with use_lang_emb is not supported: weft has no language input")
    return 0


_SUMMARY = {
    "summary_type": ("first", None),
    "summary_activation": (None,),
    **dict.fromkeys(("summary_use_proj", "summary_proj_to_labels"), (True, None)),
}
XLM = BERT.derive(
    "xlm",
    names={
        "embed": "embeddings",
        "positions": "position_embeddings",
        "embed_norm": "layer_norm_emb",
        **{f"layers.{{i}}.attn.{x}": f"attentions.{{i}}.{x}_lin" for x in "qkv"},
        "layers.{i}.attn.o": "attentions.{i}.out_lin",
        "layers.{i}.attn_norm": "layer_norm1.{i}",
        "layers.{i}.ffn.up": "ffns.{i}.lin1",
        "layers.{i}.ffn.down": "ffns.{i}.lin2",
        "layers.{i}.ffn_norm": "layer_norm2.{i}",
    },
    prefix="transformer.",
    from_keys={"pooler": None},
    tasks={
        "ForSequenceClassification": Head("text-classification", "sequence_summary.summary", "first", refuse=_SUMMARY),
        "ForQuestionAnsweringSimple": SPANS,
        "ForQuestionAnswering": None,  # by beams of starts and ends
        "ForMultipleChoice": Head(
            *("multiple-choice", "logits_proj", "first", "sequence_summary.summary"),
            activation=None,
            refuse=_SUMMARY,
            width=lambda c: len(labels) if isinstance(labels := read_labels(c), tuple) else labels,
        ),
        "WithLMHeadModel": Head(
            *("fill-mask", "pred_layer.proj"),
            tied=key("tie_word_embeddings", default=True),
            refuse={"asm": (False, None)},
        ),
        "ForMaskedLM": None,
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    unused=("*position_ids", "pred_layer.*", "qa_outputs.*", "sequence_summary.*", "*lang_embeddings.weight"),
    refuse={"causal": (False, None), "is_encoder": (True, None)},
    dim=key("emb_dim", "hidden_size", default=2048),
    layers=key("n_layers", "num_hidden_layers", default=12),
    heads=key("n_heads", "num_attention_heads", default=16),
    ffn=lambda c: 4 * key("emb_dim", "hidden_size", default=2048)(c),
    token_types=_check_language,
    activation=lambda c: "gelu" if c.get("gelu_activation", True) else "relu",
)
# transformers 5 cannot run FlauBERT with pre_norm: each layer asks its cache for an item that it does not have.
FLAUBERT = XLM.derive("flaubert", inert=("bos_index", "eos_index", "pad_index"), refuse={"pre_norm": (False, None)})


# -- X-MOD: an adapter per language after each block, of which that of default_language is read


def _build_xmod_block(config: Config) -> AdaptedBlock:
    dim, heads, hidden = read_required(config, "hidden_size", "num_attention_heads", "intermediate_size")
    eps, pre = key("layer_norm_eps", default=1e-12)(config), config.get("pre_norm")
    act = ACTIVATIONS[config.get("hidden_act", "gelu")]
    if not (config.get("adapter_layer_norm") or config.get("adapter_reuse_layer_norm", True)):
        raise WeftError("adapter_reuse_layer_norm=False is not supported without adapter_layer_norm")
    norm, attention = LayerNorm(eps), Attention(heads, qkv_bias=True, out_bias=True)
    block = Block(attention, MLP(hidden, act, bias=True), norm, "pre" if pre else "post")
    adapter = MLP(dim // config.get("adapter_reduction_factor", 2), act, bias=True)
    return AdaptedBlock(block, adapter, norm, normed_residual=bool(pre))


def _read_default_language(config: Config) -> dict[str, str]:
    language = config.get("default_language")
    if language is None:
        raise WeftError("default_language=None is not supported: set it to the language of the adapters to read")
    return {"language": language}


@template
def _fetch_adapter(fetch: Fetch, part: str, settings: Settings, which: str) -> Recipe:
    return fetch(f"{LAYER}.output.adapter_modules.{settings.multipliers['language']}.{which}.{part}")


@template
def _choose_norm(fetch: Fetch, part: str, settings: Settings, which: str) -> Recipe:
    """Return the norm `which` (ffn, adapter): the stored adapter_layer_norm for the norm right before the adapter, else
    BERT's LayerNorm. Right before the adapter is norm adapter in pre-norm blocks, norm ffn in post-norm blocks."""
    before_adapter = (which == "adapter") == (settings.arrangement == "pre")
    adapter_norm = f"{LAYER}.output.adapter_layer_norm.{part}"
    return fetch(adapter_norm if before_adapter and fetch.has(adapter_norm) else f"{LAYER}.output.LayerNorm.{part}")


XMOD = ROBERTA.derive(
    "xmod",
    names={
        **{name.replace("{i}.", "{i}.block."): of for name, of in BERT.names.items() if name.startswith("layers.")},
        "layers.{i}.block.ffn_norm": _choose_norm("ffn"),
        "layers.{i}.adapter_norm": _choose_norm("adapter"),
        "layers.{i}.adapter.up": _fetch_adapter("dense1"),
        "layers.{i}.adapter.down": _fetch_adapter("dense2"),
        "final_norm": "encoder.LayerNorm",
    },
    unused=(*ROBERTA.unused, "*.adapter_modules.*"),
    refuse={"ln_before_adapter": (True, None)},
    arrangement=lambda c: "pre" if c.get("pre_norm") else "post",
    block=_build_xmod_block,
    multipliers=_read_default_language,
)


# -- ESM: proteins


def _is_absolute(config: Config) -> bool:
    return (config.get("position_embedding_type") or "absolute") == "absolute"


def _fetch_frequencies(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the rotary frequencies that the checkpoint stores, as in transformers, else those of the config."""
    rope = settings.rope
    assert isinstance(rope, RoPE)
    # The first layer's represent those of all; transformers 5 writes a star instead of its number.
    owners = ("", *(f"encoder.layer.{i}.attention.self." for i in "*0"))
    stored = (name for name in (f"{owner}rotary_embeddings.inv_freq" for owner in owners) if fetch.has(name))
    return next((fetch(name) for name in stored), rope.recipe(settings.head_size))


ESM = ROBERTA.derive(
    "esm",
    names={
        "embed_norm": "embeddings.layer_norm",
        "layers.{i}.attn_norm": f"{LAYER}.attention.LayerNorm",
        "layers.{i}.ffn_norm": f"{LAYER}.LayerNorm",
        "final_norm": "encoder.emb_layer_norm_after",
        "rope.frequencies": _fetch_frequencies,
    },
    prefix="esm.",
    idle=("*contact_head.*",),
    unused=(*ROBERTA.unused, "*.inv_freq", "*.position_embeddings.weight"),
    refuse={"position_embedding_type": ("absolute", "rotary", None), "is_folding_model": (False, None)},
    learned_positions=lambda c: ROBERTA.settings["learned_positions"](c) if _is_absolute(c) else None,
    context=lambda c: ROBERTA.settings["context"](c) if _is_absolute(c) else key("max_position_embeddings")(c),
    rope=lambda c: None if _is_absolute(c) else RoPE(float(c.get("rope_theta") or 10_000.0)),
    mask_scaling=lambda c: MaskScaling(key("mask_token_id")(c)) if c.get("token_dropout") else None,
    token_types=0,
    arrangement="pre",
    embed_norm=lambda c: bool(c.get("emb_layer_norm_before")),
    activation="gelu",
)
