"""OPT: GPT-2's blocks with ReLU, its positions counted from 2."""

from __future__ import annotations

from ...tables.family import BIASES, Family, key, read_same, set_all
from ...task_heads import GPT_HEADS

OPT = Family(
    model_types=("opt",),
    inert=("intermediate_size",),
    settings={
        "vocab": key("vocab_size"),
        "dim": read_same("hidden_size", "word_embed_proj_dim"),
        "layers": key("num_hidden_layers"),
        "heads": key("num_attention_heads"),
        "ffn": key("ffn_dim"),
        "context": key("max_position_embeddings"),
        "learned_positions": key("max_position_embeddings"),
        "position_offset": 2,
        "norm": "layer",
        "norm_weight": key("layer_norm_elementwise_affine", default=True),
        "eps": 1e-5,
        "arrangement": lambda c: "pre" if c.get("do_layer_norm_before", True) else "post",
        "activation": key("activation_function", default="relu"),
        "gated": False,
        **set_all(key("enable_bias", default=True), *BIASES),
        "tie": key("tie_word_embeddings", default=True),
    },
    names={
        "embed": "embed_tokens",
        "positions": "embed_positions",
        "layers.{i}.attn_norm": "layers.{i}.self_attn_layer_norm",
        **{f"layers.{{i}}.attn.{x}": f"layers.{{i}}.self_attn.{x}_proj" for x in "qkv"},
        "layers.{i}.attn.o": "layers.{i}.self_attn.out_proj",
        "layers.{i}.ffn_norm": "layers.{i}.final_layer_norm",
        "layers.{i}.ffn.up": "layers.{i}.fc1",
        "layers.{i}.ffn.down": "layers.{i}.fc2",
        "final_norm": "final_layer_norm",
        "lm_head": "lm_head",
    },
    prefix="model.decoder.",
    tasks=GPT_HEADS,
    unused=("lm_head.weight",),
    refuse={"_remove_final_layer_norm": (False, None)},
)
