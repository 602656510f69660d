"""BLOOM, Falcon and MPT: positions as ALiBi biases (Falcon: or RoPE), q, k and v packed."""

from __future__ import annotations

from typing import Any

from ....dsl import ALiBi
from ...tables import gguf
from ...tables.family import BIASES, Config, Family, key, read_nested, set_all
from ...tables.rope_config import read_context, read_rope
from ...tables.templates import pick_by_arrangement, split_qkv
from ...task_heads import GPT_HEADS

BLOOM_GGUF = gguf.UNGATED.derive("bloom", names=gguf.PACKED, rope=None, bias=lambda c: ALiBi(), embed_norm=True)
BLOOM = Family(
    model_types=("bloom",),
    inert=("n_embd", "n_positions", "hidden_dropout"),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("hidden_size", "n_embed"),
        "layers": key("n_layer", "num_hidden_layers"),
        "heads": key("n_head", "num_attention_heads"),
        "ffn": lambda c: 4 * key("hidden_size", "n_embed")(c),
        "context": key("seq_length", default=None),
        "norm": "layer",
        "eps": key("layer_norm_epsilon", default=1e-5),
        "embed_norm": True,
        "activation": "gelu_new",
        "gated": False,
        **set_all(True, *BIASES),
        "bias": lambda config: ALiBi(),
        "tie": key("tie_word_embeddings", default=True),
    },
    names={
        "embed": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "layers.{i}.attn_norm": "h.{i}.input_layernorm",
        **split_qkv("layers.{i}.attn", "h.{i}.self_attention.query_key_value", grouped=True),
        "layers.{i}.attn.o": "h.{i}.self_attention.dense",
        "layers.{i}.ffn_norm": "h.{i}.post_attention_layernorm",
        "layers.{i}.ffn.up": "h.{i}.mlp.dense_h_to_4h",
        "layers.{i}.ffn.down": "h.{i}.mlp.dense_4h_to_h",
        "final_norm": "ln_f",
        "lm_head": "lm_head",
    },
    prefix="transformer.",
    tasks=GPT_HEADS,
    unused=("lm_head.weight",),
    refuse={"apply_residual_connection_post_layernorm": (False, None)},
    gguf=BLOOM_GGUF,
)


def _read_arrangement(config: Config) -> str:
    """Return Falcon's arrangement of blocks: pre, or parallel with one norm (7B) or two norms (40B)."""
    if not config.get("parallel_attn", True):
        return "pre"
    two = config.get("num_ln_in_parallel_attn") in (None, 2)
    return "parallel_norms" if config.get("new_decoder_architecture") and two else "parallel"


def _build_alibi(config: Config) -> ALiBi | None:
    """Return Falcon's ALiBi bias times 1/√head_dim, as Falcon scales scores after the bias; None without ALiBi."""
    head = key("hidden_size")(config) // key("num_attention_heads")(config)
    return ALiBi(scale=head**-0.5) if config.get("alibi") else None


FALCON = BLOOM.derive(
    "falcon",
    inert=("intermediate_size", "ffn_hidden_size"),
    names={
        "layers.{i}.norm": "h.{i}.input_layernorm",
        "layers.{i}.attn_norm": pick_by_arrangement(pre="h.{i}.input_layernorm", parallel_norms="h.{i}.ln_attn"),
        "layers.{i}.ffn_norm": pick_by_arrangement(pre="h.{i}.post_attention_layernorm", parallel_norms="h.{i}.ln_mlp"),
    },
    layers=key("num_hidden_layers", "n_layer"),
    heads=key("num_attention_heads", "n_head"),
    kv_heads=lambda c: (
        1 if c.get("multi_query", True) and not c.get("new_decoder_architecture") else c.get("num_kv_heads")
    ),
    ffn=lambda c: c.get("ffn_hidden_size") or 4 * key("hidden_size")(c),
    context=read_context,
    arrangement=_read_arrangement,
    embed_norm=False,
    activation=key("activation", default="gelu"),
    **set_all(key("bias", default=False), *BIASES),
    bias=_build_alibi,
    rope=lambda c: None if c.get("alibi") else read_rope(c),
    gguf=gguf.UNGATED.derive(
        "falcon",
        names={
            **gguf.PACKED,
            "layers.{i}.attn_norm": "blk.{i}.attn_norm_2",
            "layers.{i}.ffn_norm": "blk.{i}.attn_norm",
        },
        from_keys={"arrangement": lambda keys: "parallel_norms" if "blk.0.attn_norm_2.weight" in keys else "parallel"},
        activation="gelu",
    ),
)

# The values with which transformers computes, whatever an attn_config states.
_MPT_ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False, None),
    "qk_ln": (False, None),
    "attn_uses_sequence_id": (False, None),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}
MPT = BLOOM.derive(
    "mpt",
    names={
        "embed": "wte",
        "layers.{i}.attn_norm": "blocks.{i}.norm_1",
        **split_qkv("layers.{i}.attn", "blocks.{i}.attn.Wqkv"),
        "layers.{i}.attn.o": "blocks.{i}.attn.out_proj",
        "layers.{i}.ffn_norm": "blocks.{i}.norm_2",
        "layers.{i}.ffn.up": "blocks.{i}.ffn.up_proj",
        "layers.{i}.ffn.down": "blocks.{i}.ffn.down_proj",
        "final_norm": "norm_f",
    },
    refuse={
        "logit_scale": (None,),
        "no_bias": (True, None),
        "embedding_fraction": (1, None),
        **{f"attn_config.{name}": allowed for name, allowed in _MPT_ATTENTION.items()},
    },
    dim=key("d_model"),
    layers=key("n_layers"),
    heads=key("n_heads"),
    ffn=lambda c: 4 * key("d_model")(c),  # transformers ignores expansion_ratio
    context=key("max_seq_len", default=None),
    norm_bias=False,
    embed_norm=False,
    activation="gelu",
    **set_all(False, *BIASES),
    clip=read_nested("attn_config", "clip_qkv"),
    scale=read_nested("attn_config", "softmax_scale"),
    gguf=BLOOM_GGUF.derive(
        "mpt",
        activation="gelu",
        embed_norm=False,
        bias=lambda c: ALiBi(c.get("attention.max_alibi_bias") or 8.0),
        clip=key("attention.clamp_kqv", default=None),
    ),
)
