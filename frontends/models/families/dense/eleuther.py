"""GPT-Neo, GPT-J and GPT-NeoX (Pythia), and Phi, whose blocks are GPT-J's."""

from __future__ import annotations

from typing import Any

from weft.ir.errors import WeftError

from ....dsl import RoPE
from ...tables import gguf
from ...tables.family import BIASES, Config, Loader, key, read_required, set_all
from ...tables.rope_config import read_rope, rope_with
from ...tables.templates import split_qkv
from ...task_heads import GPT_HEADS
from .gpt2 import GPT2
from .llama import LLAMA


def _read_windows(config: Config) -> tuple[int | None, ...]:
    types = config.get("attention_layers")
    if types is None:
        attention_types = config.get("attention_types") or [[["global", "local"], 12]]
        types = [kind for kinds, times in attention_types for kind in list(kinds) * times]
    return tuple(config.get("window_size", 256) if kind == "local" else None for kind in types)


GPT_NEO = GPT2.derive(
    "gpt_neo",
    names={
        **{f"layers.{{i}}.attn.{x}": f"h.{{i}}.attn.attention.{x}_proj" for x in "qkv"},
        "layers.{i}.attn.o": "h.{i}.attn.attention.out_proj",
        "layers.{i}.ffn.up": "h.{i}.mlp.c_fc",
        "layers.{i}.ffn.down": "h.{i}.mlp.c_proj",
    },
    dim=key("hidden_size"),
    layers=key("num_layers", "num_hidden_layers"),
    heads=key("num_heads", "num_attention_heads"),
    ffn=lambda c: c.get("intermediate_size") or 4 * c["hidden_size"],
    context=key("max_position_embeddings"),
    learned_positions=key("max_position_embeddings"),
    qkv_bias=False,
    window=_read_windows,
    scale=1.0,
    transformers="GPTNeoForCausalLM",
)
GPTJ = GPT2.derive(
    "gptj",
    names={
        "layers.{i}.norm": "h.{i}.ln_1",
        **{f"layers.{{i}}.attn.{x}": f"h.{{i}}.attn.{x}_proj" for x in "qkv"},
        "layers.{i}.attn.o": "h.{i}.attn.out_proj",
        "layers.{i}.ffn.up": "h.{i}.mlp.fc_in",
        "layers.{i}.ffn.down": "h.{i}.mlp.fc_out",
    },
    learned_positions=None,
    arrangement="parallel",
    rope=lambda c: RoPE(dim=c.get("rotary_dim", 64), interleaved=True),
    scale=None,
    qkv_bias=False,
    out_bias=False,
    head_bias=True,
    defaults={"tie_word_embeddings": False},
    transformers="GPTJForCausalLM",
)


def _build_neox_rope(config: Config) -> Any:
    size, heads = read_required(config, "hidden_size", "num_attention_heads")
    if config.get("head_dim") not in (None, size // heads):
        raise WeftError(f"head_dim={config['head_dim']} must be hidden_size / num_attention_heads = {size // heads}")
    rotary = {"partial_rotary_factor": config.get("rotary_pct", 0.25), "rope_theta": config.get("rotary_emb_base", 1e4)}
    return read_rope({**config, **rotary}, partial=True)


GPT_NEOX = LLAMA.derive(
    "gpt_neox",
    kv_heads=None,
    head_dim=None,
    norm="layer",
    eps=key("layer_norm_eps", default=1e-5),
    arrangement=lambda c: "parallel_norms" if c.get("use_parallel_residual", True) else "pre",
    defaults={"hidden_act": "gelu", "attention_bias": True},
    gated=False,
    ffn_bias=True,
    rope=_build_neox_rope,
    names={
        "embed": "embed_in",
        **split_qkv("layers.{i}.attn", "layers.{i}.attention.query_key_value", grouped=True),
        "layers.{i}.attn.o": "layers.{i}.attention.dense",
        "layers.{i}.ffn.up": "layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.ffn.down": "layers.{i}.mlp.dense_4h_to_h",
        "final_norm": "final_layer_norm",
        "lm_head": "embed_out",
    },
    prefix="gpt_neox.",
    tasks=GPT_HEADS,
    unused=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq", "embed_out.weight"),
    transformers="GPTNeoXForCausalLM",
    gguf=gguf.UNGATED.derive(
        "gptneox",
        names=gguf.PACKED,
        activation="gelu",
        arrangement=lambda c: "parallel_norms" if c.get("use_parallel_residual", True) else "pre",
        loader=Loader("nqof", head="own", partial_rope=True),
    ),
)
GPT_NEOX_JAPANESE = GPT_NEOX.derive(
    "gpt_neox_japanese",
    inert=("intermediate_size",),
    names={"layers.{i}.attn.o.bias": "layers.{i}.attention.dense_bias"},
    prefix="gpt_neox_japanese.",
    arrangement="pre",
    ffn=lambda c: int(c["hidden_size"] * c.get("intermediate_multiple_size", 4)),
    rope=lambda c: _build_neox_rope({"rotary_pct": 1.0, **c}),
    qkv_bias=False,
    out_bias=lambda c: (*[False] * (key("num_hidden_layers")(c) - 1), True),
    ffn_bias=False,
    defaults={"tie_word_embeddings": True},
)
PHI = LLAMA.derive(
    "phi",
    names={
        "layers.{i}.norm": "layers.{i}.input_layernorm",
        "layers.{i}.attn.o": "layers.{i}.self_attn.dense",
        **{f"layers.{{i}}.attn.{x}_norm": f"layers.{{i}}.self_attn.{x}_layernorm" for x in "qk"},
        "layers.{i}.ffn.up": "layers.{i}.mlp.fc1",
        "layers.{i}.ffn.down": "layers.{i}.mlp.fc2",
        "final_norm": "final_layernorm",
    },
    norm="layer",
    eps=key("layer_norm_eps", default=1e-5),
    arrangement="parallel",
    defaults={"hidden_act": "gelu_new"},
    gated=False,
    rope=rope_with(partial_rotary_factor=0.5),
    qk_norm=lambda c: "head" if c.get("qk_layernorm") else "none",
    **set_all(True, *BIASES),
    head_bias=True,
    transformers="PhiForCausalLM",
    gguf=gguf.UNGATED.derive("phi2", arrangement="parallel", loader=Loader("nqofh", head="own", partial_rope=True)),
)
