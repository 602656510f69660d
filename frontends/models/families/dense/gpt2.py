"""GPT-2 and GPT-BigCode: learned positions, LayerNorm, ungated MLP, q, k and v packed."""

from __future__ import annotations

from typing import Any

from ...tables import gguf
from ...tables.family import BIASES, Config, Family, Loader, key, set_all
from ...tables.templates import split_qkv, transpose_linear
from ...task_heads import GPT_HEADS


def _read_scales(config: Config) -> Any:
    """Return the scale of scores: None for 1/√d, or 1 if scale_attn_weights is false. With
    scale_attn_by_inverse_layer_idx, return a tuple: this scale divided by i + 1 for layer i."""
    plain = (config["n_embd"] // config["n_head"]) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    if not config.get("scale_attn_by_inverse_layer_idx"):
        return None if config.get("scale_attn_weights", True) else plain
    return tuple(plain / (i + 1) for i in range(config["n_layer"]))


GPT2_GGUF = gguf.UNGATED.derive(
    "gpt2", names=gguf.PACKED, rope=None, learned_positions=key("context_length"), loader=Loader("nqof")
)
GPT2 = Family(
    model_types=("gpt2",),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("n_embd"),
        "layers": key("n_layer"),
        "heads": key("n_head"),
        "ffn": lambda c: c.get("n_inner") or 4 * key("n_embd")(c),
        "context": key("n_positions"),
        "learned_positions": key("n_positions"),
        "norm": "layer",
        "eps": key("layer_norm_epsilon", default=1e-5),
        "activation": key("activation_function", default="gelu_new"),
        "gated": False,
        **set_all(True, *BIASES),
        "scale": _read_scales,
        "tie": key("tie_word_embeddings", default=True),
    },
    names={
        "embed": "wte",
        "positions": "wpe",
        "layers.{i}.attn_norm": "h.{i}.ln_1",
        **split_qkv("layers.{i}.attn", "h.{i}.attn.c_attn", transposed=True),
        "layers.{i}.attn.o": transpose_linear("h.{i}.attn.c_proj"),
        "layers.{i}.ffn_norm": "h.{i}.ln_2",
        "layers.{i}.ffn.up": transpose_linear("h.{i}.mlp.c_fc"),
        "layers.{i}.ffn.down": transpose_linear("h.{i}.mlp.c_proj"),
        "final_norm": "ln_f",
        "lm_head": "lm_head",
    },
    prefix="transformer.",
    tasks=GPT_HEADS,
    unused=("*.attn.bias", "*.attn.masked_bias", "lm_head.weight"),
    refuse={"add_cross_attention": (False, None)},
    transformers="GPT2LMHeadModel",
    gguf=GPT2_GGUF,
)

# GPT-2 with one key/value head, its weights stored [out, in].
GPT_BIGCODE = GPT2.derive(
    "gpt_bigcode",
    inert=("num_key_value_heads",),
    names={
        **split_qkv("layers.{i}.attn", "h.{i}.attn.c_attn", grouped=True),
        "layers.{i}.attn.o": "h.{i}.attn.c_proj",
        "layers.{i}.ffn.up": "h.{i}.mlp.c_fc",
        "layers.{i}.ffn.down": "h.{i}.mlp.c_proj",
    },
    kv_heads=lambda c: 1 if c.get("multi_query", True) else None,
    defaults={"activation_function": "gelu_pytorch_tanh"},
    transformers="GPTBigCodeForCausalLM",
    gguf=GPT2_GGUF.derive("starcoder"),
)
