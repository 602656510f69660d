"""Decoders before GPT-2, and later ones with the same positions: GPT, CTRL, BioGPT."""

from __future__ import annotations

from ....dsl import Sinusoidal
from ...tables.family import BIASES, Config, key, set_all
from ...task_heads import Head
from ..dense.gpt2 import GPT2
from ..dense.opt import OPT
from .bart import make_embedding_scale


def _read_activation(config: Config) -> str:
    """Return the activation of a config, where GPT's gelu is gelu_tanh."""
    name = str(config.get("afn") or "gelu")
    return "gelu_new" if name == "gelu" else name


OPENAI_GPT = GPT2.derive(
    "openai-gpt",
    names={"embed": "tokens_embed", "positions": "positions_embed"},
    refuse={"afn": ("gelu", "relu", "silu", "swish", None)},
    ffn=lambda c: 4 * key("n_embd")(c),
    arrangement="post",
    activation=_read_activation,
    scale=None,
)
CTRL = GPT2.derive(
    "ctrl",
    tasks={"ForSequenceClassification": Head("text-classification", "classifier", "last", bias=False)},
    names={
        "embed": "w",
        "positions": None,
        **{f"layers.{{i}}.attn.{x}": f"h.{{i}}.multi_head_attention.W{x}" for x in "qkv"},
        "layers.{i}.attn.o": "h.{i}.multi_head_attention.dense",
        "layers.{i}.attn_norm": "h.{i}.layernorm1",
        "layers.{i}.ffn.up": "h.{i}.ffn.0",
        "layers.{i}.ffn.down": "h.{i}.ffn.2",
        "layers.{i}.ffn_norm": "h.{i}.layernorm2",
        "final_norm": "layernorm",
    },
    refuse={"layer_norm_epsilon": (1e-6, None)},  # of the last norm only; those of the layers are constant
    ffn=key("dff"),
    eps=1e-6,
    activation="relu",
    scale=None,
    head_bias=True,
    embed_scale=lambda c: key("n_embd")(c) ** 0.5,
    learned_positions=None,
    sinusoids=lambda c: Sinusoidal(key("n_positions")(c), interleaved=False),
)
BIOGPT = OPT.derive(
    "biogpt",
    names={"final_norm": "layer_norm", "lm_head": "output_projection"},
    prefix="biogpt.",
    unused=("output_projection.weight",),
    refuse={"_remove_final_layer_norm": None},
    dim=key("hidden_size"),
    ffn=key("intermediate_size"),
    norm_weight=True,
    arrangement="pre",
    activation=key("hidden_act", default="gelu"),
    **set_all(True, *BIASES),
    embed_scale=make_embedding_scale(True, "hidden_size"),
)
