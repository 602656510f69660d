"""Llama and its relatives: RoPE and a gated feed-forward in pre-norm blocks, with the differences of each table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....dsl import RoPE, Router
from ...tables import gguf
from ...tables.family import BIASES, Config, Family, Loader, key, rule, set_all
from ...tables.rope_config import read_context, read_gguf_rope, read_rope, rope_with
from ...tables.templates import concat_heads, flatten_heads, name_gated_mlp, split_gate_up, split_qkv
from ...task_heads import GENERIC_HEADS

LLAMA_GGUF = gguf.SPARSE_BASE.derive(
    "llama",
    names=gguf.INTERLEAVED,
    moe=gguf.build_experts(Router()),  # of Mixtral
    loader=Loader(optional_biases="qof", experts="optional", free_heads=True),
)
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
        "rope": read_rope,
        "context": read_context,
    },
    names={
        "embed": "embed_tokens",
        "layers.{i}.attn_norm": "layers.{i}.input_layernorm",
        **{f"layers.{{i}}.attn.{x}": f"layers.{{i}}.self_attn.{x}_proj" for x in "qkvo"},
        **{f"layers.{{i}}.attn.{x}_norm": f"layers.{{i}}.self_attn.{x}_norm" for x in "qk"},
        "layers.{i}.ffn_norm": "layers.{i}.post_attention_layernorm",
        **name_gated_mlp("layers.{i}.ffn", "layers.{i}.mlp"),
        "final_norm": "norm",
        "lm_head": "lm_head",
    },
    prefix="model.",
    unused=("*.rotary_emb.inv_freq", "lm_head.weight"),
    tasks=GENERIC_HEADS,
    transformers="LlamaForCausalLM",
    gguf=LLAMA_GGUF,
)


def pick_windows(config: Config, window: int | None, types: list[str]) -> tuple[int | None, ...]:
    """Return `window` for each layer of type sliding_attention, else None. The key layer_types overrides `types`."""
    return tuple(window if t == "sliding_attention" else None for t in config.get("layer_types") or types)


@rule
def alternate_windows(
    config: Config, every: int, first_global: bool = False, window: int | None = 4096, period: str = ""
) -> tuple[int | None, ...]:
    """Return the window of each layer; of each `every` layers, all except the last (`first_global`: first) are local.
    Global layers have None. Local layers have sliding_window, by default `window`. The config key `period`, if given,
    overrides `every`; layer_types overrides both."""
    layers = range(key("num_hidden_layers")(config))
    length = (config.get(period) if period else None) or every
    wide = 0 if first_global else length - 1
    types = ["full_attention" if i % length == wide else "sliding_attention" for i in layers]
    return pick_windows(config, config.get("sliding_window", window), types)


def read_qwen_windows(config: Config) -> Any:
    """Return the window of each Qwen layer, None for global ones; None without use_sliding_window or a window.
    Layers of type sliding_attention are local, by default those from max_window_layers on."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    if not config.get("use_sliding_window") or window is None:
        return None
    full = config.get("max_window_layers", 28)
    return pick_windows(config, window, ["full_attention" if i < full else "sliding_attention" for i in range(layers)])


MISTRAL = LLAMA.derive(
    "mistral",
    **set_all(False, *BIASES),
    defaults={"num_key_value_heads": 8},
    window=lambda c: c.get("sliding_window", 4096),
    transformers="MistralForCausalLM",
    gguf=LLAMA_GGUF,
)
QWEN2 = LLAMA.derive(
    "qwen2",
    inert=("layer_types", "max_window_layers"),
    ffn_bias=False,
    window=read_qwen_windows,
    qkv_bias=True,
    out_bias=False,
    transformers="Qwen2ForCausalLM",
    gguf=gguf.BASE.derive("qwen2", "qwen2vl", loader=Loader(biases="q")),
)
QWEN3 = LLAMA.derive(
    "qwen3",
    inert=("layer_types", "max_window_layers"),
    ffn_bias=False,
    window=read_qwen_windows,
    defaults={"head_dim": 128},
    qk_norm="head",
    transformers="Qwen3ForCausalLM",
    gguf=gguf.BASE.derive("qwen3", "qwen3vl", loader=Loader(free_heads=True, qk_norm=True)),
)
OLMO2_GGUF = gguf.BASE.derive(
    "olmo2",
    from_keys={"qk_norm": lambda keys: "full"},
    arrangement="post_sublayer",
    window=gguf.build_windows(4),
    rope=gguf.build_two_ropes(gguf.build_windows(4), near_scaled=False),
    loader=Loader(head="own", qk_norm=True),
)
OLMO2 = LLAMA.derive(
    "olmo2",
    ffn_bias=False,
    names={
        "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
    },
    defaults={"rms_norm_eps": 1e-5},
    arrangement="post_sublayer",
    qk_norm="full",
    transformers="Olmo2ForCausalLM",
    gguf=OLMO2_GGUF,
)
OLMO = LLAMA.derive(
    "olmo",
    ffn_bias=False,
    norm="layer",
    norm_weight=False,
    eps=1e-5,
    clip=key("clip_qkv", default=None),
    transformers="OlmoForCausalLM",
    gguf=LLAMA_GGUF.derive(
        "olmo", norm="layer", norm_weight=False, clip=key("attention.clamp_kqv", default=None), loader=Loader()
    ),
)
GRANITE_GGUF = LLAMA_GGUF.derive(
    "granite",
    embed_scale=key("embedding_scale", default=1.0),
    scale=key("attention.scale", default=None),
    residual_scale=key("residual_scale", default=1.0),
    logit_scale=key("logit_scale", reciprocal=True),
    loader=Loader(optional_biases="qof", free_heads=True),
)
GRANITE = LLAMA.derive(
    "granite",
    embed_scale=key("embedding_multiplier", default=1.0),
    scale=key("attention_multiplier", default=1.0),
    residual_scale=key("residual_multiplier", default=1.0),
    logit_scale=key("logits_scaling", default=1.0, reciprocal=True),
    transformers="GraniteForCausalLM",
    gguf=GRANITE_GGUF,
)


def find_rotary_layers(config: Config) -> list[Any]:
    """Return a number per layer, 0 for a layer without RoPE: the list no_rope_layers, despite its name. By default,
    each no_rope_layer_interval-th layer has 0."""
    every, layers = config.get("no_rope_layer_interval", 4), range(key("num_hidden_layers")(config))
    return list(config.get("no_rope_layers") or [(i + 1) % every for i in layers])


@rule
def rotate_listed(config: Config, /, **options: Any) -> tuple[RoPE | None, ...]:
    """Return the RoPE of each layer, None where `find_rotary_layers` has 0; `options` are arguments of `rope_with`."""
    rope = rope_with(**options)(config)
    return tuple(rope if rotary else None for rotary in find_rotary_layers(config))


def _read_smollm3_windows(config: Config) -> tuple[int | None, ...] | None:
    if not config.get("use_sliding_window"):
        return None
    types = ["full_attention" if rope else "sliding_attention" for rope in find_rotary_layers(config)]
    return pick_windows(config, config.get("sliding_window"), types)


SMOLLM3 = LLAMA.derive(
    "smollm3",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    rope=rotate_listed(rope_theta=2e6),
    window=_read_smollm3_windows,
    transformers="SmolLM3ForCausalLM",
    gguf=LLAMA_GGUF.derive(
        "smollm3",
        rope=lambda c: tuple(read_gguf_rope(c) if (i + 1) % 4 else None for i in range(c["block_count"])),
        loader=Loader(free_heads=True),
    ),
)
PHI3 = LLAMA.derive(
    "phi3",
    **set_all(False, *BIASES),
    names={
        **split_qkv("layers.{i}.attn", "layers.{i}.self_attn.qkv_proj"),
        **split_gate_up("layers.{i}.ffn", "layers.{i}.mlp.gate_up_proj"),
    },
    defaults={"rms_norm_eps": 1e-5},
    window=key("sliding_window", default=None),
    rope=rope_with(partial_rotary_factor=1.0),
    transformers="Phi3ForCausalLM",
    gguf=gguf.BASE.derive(
        "phi3",
        names={**gguf.PACKED, **gguf.PACKED_GATE},
        window=lambda c: c.get("attention.sliding_window") or None,
        loader=Loader(partial_rope=True),
    ),
)
STARCODER2 = LLAMA.derive(
    "starcoder2",
    names={"layers.{i}.ffn.up": "layers.{i}.mlp.c_fc", "layers.{i}.ffn.down": "layers.{i}.mlp.c_proj"},
    defaults={"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    norm="layer",
    eps=key("norm_epsilon", default=1e-5),
    window=key("sliding_window", default=None),
    gated=False,
    **set_all(key("use_bias", default=True), *BIASES),
    transformers="Starcoder2ForCausalLM",
    gguf=gguf.UNGATED.derive("starcoder2", loader=Loader("nqof")),
)

EACH_HEAD = gguf.BASE.derive(  # norms of each head, one tensor for all
    names={f"layers.{{i}}.attn.{x}_norm": flatten_heads(f"blk.{{i}}.attn_{x}_norm") for x in "qk"},
    from_keys={"qk_norm": lambda keys: "each" if "blk.0.attn_q_norm.weight" in keys else "none"},
    norm="layer",
)
STABLELM = LLAMA.derive(
    "stablelm",
    ffn_bias=False,
    names={
        "layers.{i}.norm": "layers.{i}.input_layernorm",  # the single norm of a parallel block
        "layers.{i}.attn.q_norm": concat_heads("layers.{i}.self_attn.q_layernorm.norms.{h}"),
        "layers.{i}.attn.k_norm": concat_heads("layers.{i}.self_attn.k_layernorm.norms.{h}", of_keys=True),
    },
    norm="layer",
    eps=key("layer_norm_eps", default=1e-5),
    arrangement=lambda c: "parallel" if c.get("use_parallel_residual") else "pre",
    rope=rope_with(partial_rotary_factor=0.25),
    qk_norm=lambda c: "each" if c.get("qk_layernorm") else "none",
    qkv_bias=key("use_qkv_bias", default=False),
    out_bias=False,
    transformers="StableLmForCausalLM",
    gguf=EACH_HEAD.derive(
        "stablelm",
        from_keys={"arrangement": lambda keys: "pre" if "blk.0.ffn_norm.weight" in keys else "parallel"},
        loader=Loader("n", "q", head="own", partial_rope=True, qk_norm=True),
    ),
)
COHERE = LLAMA.derive(
    "cohere",
    ffn_bias=False,
    names={
        "layers.{i}.norm": "layers.{i}.input_layernorm",
        **{f"layers.{{i}}.attn.{x}_norm": flatten_heads(f"layers.{{i}}.self_attn.{x}_norm") for x in "qk"},
    },
    norm="layer",
    norm_bias=False,
    eps=key("layer_norm_eps", default=1e-5),
    arrangement="parallel",
    rope=rope_with(rope_theta=5e5, interleaved=True),
    qk_norm=lambda c: "each" if c.get("use_qk_norm") else "none",
    logit_scale=key("logit_scale", default=0.0625),
    defaults={"tie_word_embeddings": True},
    transformers="CohereForCausalLM",
    gguf=EACH_HEAD.derive(
        "command-r",
        arrangement="parallel",
        rope=lambda c: replace(read_gguf_rope(c), interleaved=True),
        logit_scale=key("logit_scale"),
        loader=Loader(head="tied", qk_norm=True),
    ),
)
BITNET = LLAMA.derive(
    "bitnet",
    names={
        f"layers.{{i}}.{ours}.sub_norm": f"layers.{{i}}.{theirs}.{ours}_sub_norm"
        for ours, theirs in {"attn": "self_attn", "ffn": "mlp"}.items()
    },
    defaults={"num_key_value_heads": 5, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    head_dim=None,
    rope=rope_with(rope_theta=5e5),
    sub_norm=True,
    ffn_bias=False,
    transformers="BitNetForCausalLM",
    gguf=gguf.BASE.derive(
        "bitnet",
        names={f"layers.{{i}}.{part}.sub_norm": f"blk.{{i}}.{part}_sub_norm" for part in ("attn", "ffn")},
        activation=key("hidden_act", default="silu"),
        sub_norm=True,
    ),
)
