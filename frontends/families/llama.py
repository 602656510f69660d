"""Llama and its relatives: pre-norm (or OLMo 2's post-sublayer norm), RMSNorm, RoPE, gated feed-forward."""

from __future__ import annotations

from typing import Any

from .family import Config, Family, key
from .rope import context_of, rope_of

NAMES = {
    "embed": "embed_tokens",
    "layers.{i}.attn_norm": "layers.{i}.input_layernorm",
    "layers.{i}.attn.q": "layers.{i}.self_attn.q_proj",
    "layers.{i}.attn.k": "layers.{i}.self_attn.k_proj",
    "layers.{i}.attn.v": "layers.{i}.self_attn.v_proj",
    "layers.{i}.attn.o": "layers.{i}.self_attn.o_proj",
    "layers.{i}.attn.q_norm": "layers.{i}.self_attn.q_norm",
    "layers.{i}.attn.k_norm": "layers.{i}.self_attn.k_norm",
    "layers.{i}.ffn_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.ffn.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.ffn.up": "layers.{i}.mlp.up_proj",
    "layers.{i}.ffn.down": "layers.{i}.mlp.down_proj",
    "final_norm": "norm",
    "lm_head": "lm_head",
}

LLAMA = Family(
    model_types=("llama",),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("hidden_size"),
        "layers": key("num_hidden_layers"),
        "heads": key("num_attention_heads"),
        "kv_heads": key("num_key_value_heads", default=None),
        "head_dim": key("head_dim", default=None),
        "ffn": key("intermediate_size"),
        "activation": key("hidden_act", default="silu"),
        "eps": key("rms_norm_eps", default=1e-6),
        "qkv_bias": key("attention_bias", default=False),
        "out_bias": key("attention_bias", default=False),
        "ffn_bias": key("mlp_bias", default=False),
        "tie": key("tie_word_embeddings", default=False),
        "rope": rope_of,
        "context": context_of,
    },
    names=NAMES,
    prefix="model.",
    unused=("*.rotary_emb.inv_freq", "lm_head.weight"),
)


def layer_windows(config: Config) -> Any:
    """Windows of Qwen models: use_sliding_window, and layer_types or else max_window_layers say which layers."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    if not config.get("use_sliding_window") or window is None:
        return None
    full = config.get("max_window_layers", 28)
    types = config.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    return tuple(window if t == "sliding_attention" else None for t in types[:layers])


MISTRAL = LLAMA.but(
    "mistral", kv_heads=key("num_key_value_heads", default=8), window=lambda c: c.get("sliding_window", 4096)
)
QWEN2 = LLAMA.but("qwen2", window=layer_windows, qkv_bias=True, out_bias=False)
QWEN3 = LLAMA.but("qwen3", window=layer_windows, head_dim=key("head_dim", default=128), qk_norm="head")
OLMO2 = LLAMA.but(
    "olmo2",
    names={
        "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
    },
    eps=key("rms_norm_eps", default=1e-5),
    arrangement="post_sublayer",
    qk_norm="full",
)
