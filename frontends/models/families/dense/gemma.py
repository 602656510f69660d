"""Gemma: norms that multiply by 1 + weight, scaled embeddings, GeGLU.

From Gemma 2 on there are norms before and after both sublayers (in VaultGemma only before), and some layers are local.
"""

from __future__ import annotations

import math
from typing import Any

from ...tables import gguf
from ...tables.family import Config, Loader, key, rule
from ...tables.rope_config import build_ropes
from ...tables.templates import add_one
from .llama import LLAMA, alternate_windows

_PERIOD = "sliding_window_pattern"
_GEMMA2_WINDOWS, _GEMMA3_WINDOWS = alternate_windows(2, period=_PERIOD), alternate_windows(6, period=_PERIOD)


@rule
def _choose_gguf_scale(config: Config, layers_of_27b: int) -> float:
    """Return the scale of scores: 1/√head_dim, or 1/√(dim / heads) in the 27B model, of `layers_of_27b` layers."""
    share = key("embedding_length")(config) // key("attention.head_count")(config)
    wide = config["block_count"] == layers_of_27b
    return float((share if wide else config.get("attention.key_length", share)) ** -0.5)


def _read_activation(config: Config) -> Any:
    """Return the activation; gelu, the name in the oldest configs, means gelu_tanh."""
    name = key("hidden_act", default="gelu_pytorch_tanh")(config)
    return "gelu_pytorch_tanh" if name == "gelu" else name


GEMMA_GGUF = gguf.BASE.derive(
    "gemma",
    activation="gelu_pytorch_tanh",
    embed_scale=lambda c: math.sqrt(c["embedding_length"]),
    loader=Loader(head="tied", free_heads=True),
)
GEMMA = LLAMA.derive(
    "gemma",
    names={
        "layers.{i}.attn_norm": add_one("layers.{i}.input_layernorm"),
        "layers.{i}.ffn_norm": add_one("layers.{i}.post_attention_layernorm"),
        "final_norm": add_one("norm"),
    },
    refuse={"use_bidirectional_attention": (False, None)},
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    activation=_read_activation,
    ffn_bias=False,
    embed_scale=lambda c: math.sqrt(c["hidden_size"]),
    transformers="GemmaForCausalLM",
    gguf=GEMMA_GGUF,
)
GEMMA2_GGUF = GEMMA_GGUF.derive(
    "gemma2",
    arrangement="sandwich",
    scale=_choose_gguf_scale(46),
    softcap=lambda c: c.get("attn_logit_softcapping", 50.0) or None,
    logit_softcap=lambda c: c.get("final_logit_softcapping", 30.0) or None,
    window=lambda c: gguf.build_windows(2)({"attention.sliding_window": 4096, **c}),
    loader=Loader(head="tied", free_heads=True, windows=True),
)
GEMMA2 = GEMMA.derive(
    "gemma2",
    names={
        "layers.{i}.attn_post_norm": add_one("layers.{i}.post_attention_layernorm"),
        "layers.{i}.ffn_norm": add_one("layers.{i}.pre_feedforward_layernorm"),
        "layers.{i}.ffn_post_norm": add_one("layers.{i}.post_feedforward_layernorm"),
    },
    defaults={"num_key_value_heads": 4},
    arrangement="sandwich",
    activation=key("hidden_activation", default="gelu_pytorch_tanh"),
    scale=lambda c: c.get("query_pre_attn_scalar", 256) ** -0.5,
    softcap=lambda c: c.get("attn_logit_softcapping", 50.0),
    logit_softcap=lambda c: c.get("final_logit_softcapping", 30.0),
    window=_GEMMA2_WINDOWS,
    transformers="Gemma2ForCausalLM",
    gguf=GEMMA2_GGUF,
)
GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    inert=("_sliding_window_pattern", "attn_logit_softcapping"),
    names={f"layers.{{i}}.attn.{x}_norm": add_one(f"layers.{{i}}.self_attn.{x}_norm") for x in "qk"},
    context=key("max_position_embeddings", default=None),
    qk_norm="head",
    rope=build_ropes(_GEMMA3_WINDOWS, bases=(key("rope_theta", default=1e6), key("rope_local_base_freq", default=1e4))),
    window=_GEMMA3_WINDOWS,
    softcap=None,  # of attention: the config has it, but transformers does not apply it
    logit_softcap=key("final_logit_softcapping", default=None),
    transformers="Gemma3ForCausalLM",
    gguf=GEMMA2_GGUF.derive(
        "gemma3",
        scale=_choose_gguf_scale(62),
        softcap=None,
        logit_softcap=lambda c: c.get("final_logit_softcapping") or None,
        rope=gguf.build_two_ropes(gguf.build_windows(6), near_scaled=False, near_theta=1e4),
        window=gguf.build_windows(6),
        loader=Loader(free_heads=True, qk_norm=True, windows=True),
    ),
)
VAULTGEMMA = GEMMA2.derive("vaultgemma", arrangement="pre")
