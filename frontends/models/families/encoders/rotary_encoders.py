"""Encoders with rotary positions: ModernBERT and its decoder, EuroBERT, RoFormer, NomicBERT, Jina Embeddings 3, GTE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.ir.recipes import Full, Recipe

from ....dsl import HeadTransform, LayerNorm, RoPE
from ...tables import gguf
from ...tables.family import BIASES, Config, Fetch, Rule, key, set_all
from ...tables.rope_config import build_ropes, rope_with
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import slice_half, split_gate_up, split_qkv
from ...task_heads import BASE, BERT_HEADS, ROBERTA_HEADS, TOKENS, Head, build_dense_head, build_lm_head
from ..dense.llama import LLAMA, alternate_windows
from .bert import BERT
from .bert_relatives import read_embedding_width

EUROBERT = LLAMA.derive(
    "eurobert",
    unused=("*.rotary_emb.inv_freq", "lm_head.*", "dense.*", "classifier.*"),
    tasks={
        "ForSequenceClassification": Head(
            "text-classification",
            "classifier",
            lambda c: {"bos": "first"}.get(pool := c.get("classifier_pooling", "late"), pool),
            "dense",
            activation="gelu",
        ),
        "ForTokenClassification": TOKENS,
        "ForQuestionAnswering": None,
        "ForMaskedLM": Head("fill-mask", "lm_head", bias=False, tied=key("tie_word_embeddings", default=False)),
    },
    kind="encoder",
    defaults={"rms_norm_eps": 1e-5},
    gguf=gguf.BASE.derive("eurobert", **gguf.ENCODER),
)


def _read_windows(config: Config) -> tuple[int | None, ...]:
    """Return ModernBERT's window per layer: half of local_attention on each side, None in global layers."""
    near = {**config, "sliding_window": config.get("local_attention", 128) // 2 + 1}
    return tuple(alternate_windows(3, first_global=True, period="global_attn_every_n_layers")(near))


def _read_decoder_windows(config: Config) -> tuple[int | None, ...]:
    """Return the window per layer of ModernBERT's decoder: half of local_attention, including the token itself."""
    near = {"sliding_window": (config.get("local_attention", 128) or 0) // 2 or None, **config}
    return tuple(alternate_windows(3, first_global=True, period="global_attn_every_n_layers")(near))


def _choose_ropes_by_type(local: Rule) -> Rule:
    bases = key("global_rope_theta", default=160_000.0), key("local_rope_theta", default=10_000.0)
    return build_ropes(local, bases=bases, near_scaled=True)


def _read_gguf_windows(config: Config) -> tuple[int | None, ...] | None:
    """Return each layer's window: half of the file's, plus one for the token itself; None for a global layer.
    Without a window, return None. Unless the file lists the local layers, they are all but the first of each period."""
    window, pattern = config.get("attention.sliding_window"), config.get("attention.sliding_window_pattern", 3)
    local = pattern if isinstance(pattern, list) else [i % pattern != 0 for i in range(config["block_count"])]
    return tuple(window // 2 + 1 if is_local else None for is_local in local) if window else None


def _build_head_transform(config: Config) -> HeadTransform:
    norm = LayerNorm(key("norm_eps", default=1e-5)(config), bias=key("norm_bias", default=False)(config))
    act = ACTIVATIONS[key("classifier_activation", default="gelu")(config)]
    return HeadTransform(norm, act, key("classifier_bias", default=False)(config))


def _build_head(task: str, out: str = "classifier", **options: Any) -> Head:
    return Head(
        *(task, out),
        dense="head.dense",
        norm="head.norm",
        dense_bias=key("classifier_bias", default=False),
        activation=key("classifier_activation", default="gelu"),
        **options,
    )


def _read_pooling(config: Config) -> str:
    return "mean" if config.get("classifier_pooling") == "mean" else "first"


MODERNBERT = LLAMA.derive(
    "modernbert",
    inert=("layer_types",),
    names={
        "embed": "embeddings.tok_embeddings",
        "embed_norm": "embeddings.norm",
        **split_qkv("layers.{i}.attn", "layers.{i}.attn.Wqkv"),
        "layers.{i}.attn.o": "layers.{i}.attn.Wo",
        "layers.{i}.attn_norm": "layers.{i}.attn_norm",
        "layers.{i}.ffn_norm": "layers.{i}.mlp_norm",
        **split_gate_up("layers.{i}.ffn", "layers.{i}.mlp.Wi"),
        "layers.{i}.ffn.down": "layers.{i}.mlp.Wo",
        "final_norm": "final_norm",
    },
    unused=("head.*", "decoder.*", "classifier.*"),
    tasks={
        "ForSequenceClassification": _build_head("text-classification", pool=_read_pooling),
        "ForTokenClassification": _build_head("token-classification"),
        "ForQuestionAnswering": _build_head("question-answering"),
        "ForMultipleChoice": _build_head("multiple-choice", pool=_read_pooling),
        "ForMaskedLM": _build_head(
            "fill-mask",
            "decoder",
            bias=key("decoder_bias", default=True),
            tied=key("tie_word_embeddings", default=True),
        ),
    },
    kind="encoder",
    kv_heads=None,
    head_dim=None,
    context=key("max_position_embeddings"),
    norm="layer",
    norm_bias=key("norm_bias", default=False),
    eps=key("norm_eps", default=1e-5),
    arrangement=lambda c: ("pre_ffn", *["pre"] * (key("num_hidden_layers")(c) - 1)),
    activation=key("hidden_activation", default="gelu"),
    embed_norm=True,
    rope=_choose_ropes_by_type(_read_windows),
    window=_read_windows,
    gguf=gguf.BASE.derive(
        "modern-bert",
        names={**gguf.PACKED, **gguf.PACKED_GATE},
        **gguf.ENCODER,
        norm="layer",
        arrangement=lambda c: ("pre_ffn", *["pre"] * (c["block_count"] - 1)),
        activation=lambda c: "silu" if c.get("hidden_act") in ("silu", "swish") else "gelu",
        embed_norm=True,
        rope=gguf.build_two_ropes(_read_gguf_windows, near_scaled=True, near_theta=1e4),
        window=_read_gguf_windows,
    ),
)
MODERNBERT_DECODER = MODERNBERT.derive(
    "modernbert-decoder",
    names={
        **{f"layers.{{i}}.attn.{x}": f"layers.{{i}}.attn.{x}_proj" for x in "qkv"},
        "head_transform.dense": "lm_head.dense",
        "head_transform.norm": "lm_head.norm",
        "lm_head": "decoder",
    },
    unused=("head.*", "classifier.*", "decoder.weight"),
    tasks={
        "ForSequenceClassification": _build_head(
            "text-classification", pool="last", bias=key("classifier_bias", default=False)
        ),
        **dict.fromkeys(("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM")),
    },
    kind="decoder",
    window=_read_decoder_windows,
    rope=_choose_ropes_by_type(_read_decoder_windows),
    defaults={"tie_word_embeddings": True},
    head_bias=key("decoder_bias", default=True),
    head_transform=_build_head_transform,
)
ROFORMER = BERT.derive(
    "roformer",
    names={"embed_proj": "embeddings_project"},
    prefix="roformer.",
    tasks={
        "ForSequenceClassification": build_dense_head(BASE),
        "ForMultipleChoice": Head("multiple-choice", "classifier", "last"),
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    from_keys={"pooler": None},
    idle=("*encoder.embed_positions.weight",),  # the sines and cosines of all rotations
    refuse={"rotary_value": (False, None)},
    embed_dim=read_embedding_width("embedding_size", None),
    learned_positions=None,
    rope=lambda c: RoPE(interleaved=True),
)
NOMIC = "encoder.layers.{i}"  # transformers renames tensors when it loads, and back when it saves
NOMIC_BERT = BERT.derive(
    "nomic_bert",
    names={
        "embed_norm": "emb_ln",
        **split_qkv("layers.{i}.attn", f"{NOMIC}.attn.Wqkv"),
        "layers.{i}.attn.o": f"{NOMIC}.attn.out_proj",
        "layers.{i}.attn_norm": f"{NOMIC}.norm1",
        "layers.{i}.ffn.gate": f"{NOMIC}.mlp.fc12",
        "layers.{i}.ffn.up": f"{NOMIC}.mlp.fc11",
        "layers.{i}.ffn.down": f"{NOMIC}.mlp.fc2",
        "layers.{i}.ffn_norm": f"{NOMIC}.norm2",
    },
    prefix="nomic_bert.",
    tasks={
        "ForMaskedLM": build_lm_head("cls.predictions", "transform.dense", "transform.layer_norm", activation=BASE),
        **dict.fromkeys(("ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")),
    },
    defaults={"max_position_embeddings": 2048, "hidden_act": "silu"},
    head_dim=key("head_dim", default=None),
    learned_positions=None,
    rope=rope_with(rope_theta=1000.0),
    gated=True,
    **set_all(False, *BIASES),
    gguf=gguf.BASE.derive(
        "nomic-bert",
        names={
            **gguf.PACKED,
            "layers.{i}.attn_norm": "blk.{i}.attn_output_norm",
            "layers.{i}.ffn_norm": "blk.{i}.layer_output_norm",
        },
        **gguf.ENCODER,
        from_keys={"qkv_bias": lambda keys: False},
        norm="layer",
        arrangement="post",
        embed_norm=True,
        token_types=lambda c: c["token_types"],
    ),
)
JINA_V3 = NOMIC_BERT.derive(
    "jina_embeddings_v3",
    names={
        **split_qkv("layers.{i}.attn", f"{NOMIC}.mixer.Wqkv"),
        "layers.{i}.attn.o": f"{NOMIC}.mixer.out_proj",
        "layers.{i}.ffn.up": f"{NOMIC}.mlp.fc1",
    },
    prefix="roberta.",
    tasks={**BERT_HEADS, **ROBERTA_HEADS, "ForMultipleChoice": None},
    defaults={"max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
    rope=rope_with(rope_theta=20_000.0),
    gated=False,
    **set_all(True, *BIASES),
)
_pooled = Head("text-classification", "classifier", "pooler")
GTE_LAYER = "encoder.layer.{i}"


def _fill_zero_bias(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return zeros [ffn] as a bias: only the last linear layer of the feed-forward stores one."""
    assert isinstance(settings.ffn, int)
    return Full(0.0, (settings.ffn,))


GTE = NOMIC_BERT.derive(
    "gte",
    names={
        "embed_norm": "embeddings.LayerNorm",
        **split_qkv("layers.{i}.attn", f"{GTE_LAYER}.attention.qkv_proj"),
        "layers.{i}.attn.o": f"{GTE_LAYER}.attention.o_proj",
        "layers.{i}.attn_norm": f"{GTE_LAYER}.attn_ln",
        "layers.{i}.ffn.gate.weight": slice_half(f"{GTE_LAYER}.mlp.up_gate_proj", 1),
        "layers.{i}.ffn.up.weight": slice_half(f"{GTE_LAYER}.mlp.up_gate_proj", 0),
        "layers.{i}.ffn.gate.bias": _fill_zero_bias,
        "layers.{i}.ffn.up.bias": _fill_zero_bias,
        "layers.{i}.ffn.down": f"{GTE_LAYER}.mlp.down_proj",
        "layers.{i}.ffn_norm": f"{GTE_LAYER}.mlp_ln",
    },
    prefix="new.",
    tasks={  # published checkpoints are called new, transformers' class gte
        "ForSequenceClassification": replace(_pooled, prefix="gte."),
        "ForTokenClassification": replace(TOKENS, prefix="gte."),
        "ForMaskedLM": build_lm_head("lm_head", "dense", "norm", out_bias="", prefix="gte."),
    },
    defaults={"max_position_embeddings": 8192, "type_vocab_size": 1, "hidden_act": "gelu"},
    rope=rope_with(rope_theta=160_000.0),
    **set_all(True, *BIASES),
)
