"""BERT, RoBERTa and ALBERT: post-norm encoders with learned positions and token types."""

from __future__ import annotations

from ...tables import gguf
from ...tables.family import BIASES, Config, Family, key, set_all
from ...task_heads import BASE, BERT_HEADS, ROBERTA_HEADS, Head, add_pair_head, build_lm_head

LAYER = "encoder.layer.{i}"

BERT = Family(
    model_types=("bert",),
    settings={
        "kind": "encoder",
        "vocab": key("vocab_size"),
        "dim": key("hidden_size"),
        "layers": key("num_hidden_layers"),
        "heads": key("num_attention_heads"),
        "ffn": key("intermediate_size"),
        "context": key("max_position_embeddings"),
        "learned_positions": key("max_position_embeddings"),
        "token_types": key("type_vocab_size", default=2),
        "norm": "layer",
        "eps": key("layer_norm_eps", default=1e-12),
        "arrangement": "post",
        "embed_norm": True,
        "activation": key("hidden_act", default="gelu"),
        "gated": False,
        **set_all(True, *BIASES),
    },
    names={
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        **{f"layers.{{i}}.attn.{x[0]}": f"{LAYER}.attention.self.{x}" for x in ("query", "key", "value")},
        "layers.{i}.attn.o": f"{LAYER}.attention.output.dense",
        "layers.{i}.attn_norm": f"{LAYER}.attention.output.LayerNorm",
        "layers.{i}.ffn.up": f"{LAYER}.intermediate.dense",
        "layers.{i}.ffn.down": f"{LAYER}.output.dense",
        "layers.{i}.ffn_norm": f"{LAYER}.output.LayerNorm",
        "pooler": "pooler.dense",
    },
    prefix="bert.",
    from_keys={"pooler": lambda keys: any(k.endswith("pooler.dense.weight") for k in keys)},
    tasks=BERT_HEADS,
    unused=("*embeddings.position_ids", "cls.*", "classifier.*", "qa_outputs.*"),
    refuse={"is_decoder": (False, None), "position_embedding_type": ("absolute", None)},
    aliases={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    gguf=gguf.UNGATED.derive(
        "bert",
        **gguf.ENCODER,
        names={"layers.{i}.attn_norm": "blk.{i}.attn_output_norm", "layers.{i}.ffn_norm": "blk.{i}.layer_output_norm"},
        arrangement="post",
        activation="gelu",
        rope=None,
        embed_norm=True,
        learned_positions=key("context_length"),
        token_types=lambda c: c["token_types"],
    ),
)


def _count_positions(config: Config) -> int:
    """Return the number of RoBERTa's positions: the rows of its table, except the unused first pad_token_id + 1."""
    return int(key("max_position_embeddings")(config)) - int(key("pad_token_id", default=1)(config)) - 1


ROBERTA = BERT.derive(
    "roberta",
    "xlm-roberta",
    "camembert",
    prefix="roberta.",
    unused=("*embeddings.position_ids", "lm_head.*", "classifier.*", "qa_outputs.*"),
    tasks=ROBERTA_HEADS,
    context=_count_positions,
    learned_positions=_count_positions,
    position_offset=lambda c: key("pad_token_id", default=1)(c) + 1,
)

DATA2VEC_TEXT = ROBERTA.derive("data2vec-text", prefix="data2vec_text.")

SHARED = "encoder.albert_layer_groups.{i}.albert_layers.0"

_words = build_lm_head("predictions", "dense", "LayerNorm", activation=BASE)
ALBERT = BERT.derive(
    "albert",
    names={
        "embed_proj": "encoder.embedding_hidden_mapping_in",
        **{f"layers.{{i}}.block.attn.{x[0]}": f"{SHARED}.attention.{x}" for x in ("query", "key", "value")},
        "layers.{i}.block.attn.o": f"{SHARED}.attention.dense",
        "layers.{i}.block.attn_norm": f"{SHARED}.attention.LayerNorm",
        "layers.{i}.block.ffn.up": f"{SHARED}.ffn",
        "layers.{i}.block.ffn.down": f"{SHARED}.ffn_output",
        "layers.{i}.block.ffn_norm": f"{SHARED}.full_layer_layer_norm",
        "pooler": "pooler",
    },
    prefix="albert.",
    from_keys={"pooler": lambda keys: bool(keys & {"pooler.weight", "albert.pooler.weight"})},
    unused=("*embeddings.position_ids", "predictions.*", "sop_classifier.*", "classifier.*"),
    tasks={
        "ForMaskedLM": _words,
        "ForPreTraining": add_pair_head(
            _words, Head("next-sentence-prediction", "sop_classifier.classifier", "pooler"), "sop_logits"
        ),
        "ForNextSentencePrediction": None,
    },
    refuse={"inner_group_num": (1, None)},
    embed_dim=key("embedding_size", default=128),
    shared_layers=key("num_hidden_groups", default=1),
    defaults={"hidden_act": "gelu_new"},
)
