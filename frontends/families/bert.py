"""BERT and sentence encoders built on it: post-norm encoder with learned positions and token types."""

from __future__ import annotations

from .family import Family, key

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
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    },
    names={
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "layers.{i}.attn.q": f"{LAYER}.attention.self.query",
        "layers.{i}.attn.k": f"{LAYER}.attention.self.key",
        "layers.{i}.attn.v": f"{LAYER}.attention.self.value",
        "layers.{i}.attn.o": f"{LAYER}.attention.output.dense",
        "layers.{i}.attn_norm": f"{LAYER}.attention.output.LayerNorm",
        "layers.{i}.ffn.up": f"{LAYER}.intermediate.dense",
        "layers.{i}.ffn.down": f"{LAYER}.output.dense",
        "layers.{i}.ffn_norm": f"{LAYER}.output.LayerNorm",
        "pooler": "pooler.dense",
    },
    prefix="bert.",
    found={"pooler": lambda keys: bool(keys & {"pooler.dense.weight", "bert.pooler.dense.weight"})},
    unused=("*embeddings.position_ids", "cls.*"),
    refuse={"is_decoder": (False, None), "position_embedding_type": ("absolute", None)},
    aliases={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
)
