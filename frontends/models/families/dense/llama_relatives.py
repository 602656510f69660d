"""Relatives of Llama with one or two differences: other norms, activations, windows, scales, or rotary layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Full

from ....dsl import RMSNorm, RoPE, ScoredKeysAttention, Temperature
from ...tables import gguf
from ...tables.family import BIASES, Config, Loader, Rule, Template, key, read_required, rule, set_all
from ...tables.rope_config import build_ropes, find_rope, read_gguf_rope, read_rope, rope_with
from ...tables.templates import add_one, reshape_tensor, split_gate_up, swap_halves
from .llama import COHERE, GRANITE, LLAMA, LLAMA_GGUF, MISTRAL, OLMO2, OLMO2_GGUF, alternate_windows, pick_windows


@rule
def rotate_local(config: Config, rope: Rule, local: Rule) -> tuple[RoPE | None, ...]:
    """Return one RoPE per layer: `rope(config)` if `local(config)`, the windows, has one for the layer, else None."""
    rotation = rope(config)
    return tuple(None if window is None else rotation for window in local(config))


ARCEE = LLAMA.derive(
    "arcee",
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    gated=False,
    transformers="ArceeForCausalLM",
    gguf=LLAMA_GGUF.derive("arcee", activation="relu2", gated=False, moe=None, loader=Loader(free_heads=True)),
)


def _build_llama3_defaults(theta: float, factor: float) -> dict[str, Any]:
    """Return default rope_parameters: those of Llama 3.1 with another `theta` and `factor`."""
    numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **numbers}


def _repeat_per_layer(config: Config, name: str) -> list[float]:
    (values,) = read_required(config, name)
    return values if isinstance(values, list) else [values] * config["block_count"]


def _fill_from_metadata(name: str) -> Template:
    """Return a template for a parameter [1] that has the layer's value of the metadata key `name` of a GGUF file."""
    return lambda fetch, part, settings: Full(settings.multipliers[name][int(fetch.layer)], (1,))


_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
APERTUS = LLAMA.derive(
    "apertus",
    names={
        "layers.{i}.attn_norm": "layers.{i}.attention_layernorm",
        "layers.{i}.ffn_norm": "layers.{i}.feedforward_layernorm",
        **{f"layers.{{i}}.ffn.activation.{n}": reshape_tensor(f"layers.{{i}}.mlp.act_fn.{n}", 1) for n in _XIELU},
    },
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "xielu"},
    gated=False,
    ffn_bias=False,
    qk_norm="head",
    rope=rope_with(rope_theta=12e6, rope_parameters=_build_llama3_defaults(12e6, 8.0)),
    gguf=gguf.BASE.derive(
        "apertus",
        names={f"layers.{{i}}.ffn.activation.{n}": _fill_from_metadata(f"xielu.{n}") for n in _XIELU},
        from_keys={"qk_norm": lambda keys: "head"},
        activation="xielu",
        gated=False,
        multipliers=lambda c: {f"xielu.{n}": _repeat_per_layer(c, f"xielu.{n}") for n in _XIELU},
    ),
)
SEED_OSS = LLAMA.derive(
    "seed_oss",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    out_bias=key("attention_out_bias", default=False),
    transformers="SeedOssForCausalLM",
    gguf=gguf.BASE.derive("seed_oss", names=gguf.NORM_AFTER, loader=Loader(optional_biases="q", free_heads=True)),
)
HELIUM = LLAMA.derive(
    "helium",
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
    rope=rope_with(rope_theta=1e5, interleaved=True),
    out_bias=False,
    transformers="HeliumForCausalLM",
)
_GLM_GGUF = gguf.BASE.derive(
    "chatglm", names={**gguf.SEPARATE_OR_PACKED, **gguf.PACKED_GATE}, rope=gguf.build_interleaved_rope
)
GLM = LLAMA.derive(
    "glm",
    names=split_gate_up("layers.{i}.ffn", "layers.{i}.mlp.gate_up_proj"),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    rope=rope_with(partial_rotary_factor=0.5, interleaved=True),
    out_bias=False,
    ffn_bias=False,
    transformers="GlmForCausalLM",
    gguf=_GLM_GGUF,
)
GLM4 = GLM.derive(
    "glm4",
    names={
        "layers.{i}.attn_post_norm": "layers.{i}.post_self_attn_layernorm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_mlp_layernorm",
    },
    arrangement="sandwich",
    transformers="Glm4ForCausalLM",
    gguf=_GLM_GGUF.derive(
        "glm4",
        # Sections are M-RoPE's, for which the converter reorders the rows.
        rope=lambda c: (read_gguf_rope if any(c.get("rope.dimension_sections") or ()) else gguf.build_interleaved_rope)(
            c
        ),
        arrangement="sandwich",
    ),
)
NANOCHAT = LLAMA.derive(
    "nanochat",
    names={
        "layers.{i}.attn.q": swap_halves("layers.{i}.self_attn.q_proj"),
        "layers.{i}.attn.k": swap_halves("layers.{i}.self_attn.k_proj", of_keys=True),
        "layers.{i}.ffn.up": "layers.{i}.mlp.fc1",
        "layers.{i}.ffn.down": "layers.{i}.mlp.fc2",
    },
    norm_weight=False,
    embed_norm=True,
    qk_norm="head",
    qk_norm_last=True,
    defaults={"hidden_act": "relu2"},
    gated=False,
    ffn_bias=False,
    logit_softcap=lambda c: c.get("final_logit_softcapping", 15.0) or None,
)
MINISTRAL = MISTRAL.derive(
    "ministral",
    window=lambda c: pick_windows(c, c.get("sliding_window", 4096), ["sliding_attention"] * c["num_hidden_layers"]),
    transformers="MinistralForCausalLM",
)


def build_llama4_temperature(config: Config) -> Temperature:
    """Return the temperature of queries with strength llama_4_scaling_beta and the original context as its length."""
    beta, length = read_required(find_rope(config), "llama_4_scaling_beta", "original_max_position_embeddings")
    return Temperature(beta, length)


def _build_mistral3_rope(config: Config) -> RoPE:
    """Return the RoPE of a file, with YaRN's amplitude for mscale_all_dim = yarn_log_multiplier, if stated."""
    rope, strength = read_gguf_rope(config), config.get("rope.scaling.yarn_log_multiplier")
    return replace(rope, amplitude=rope.attention_factor(1.0, strength)) if strength else rope


def build_gguf_temperature(config: Config) -> Temperature | None:
    """Return the temperature of queries that a file states; None without attention.temperature_scale."""
    scale, length = config.get("attention.temperature_scale"), "rope.scaling.original_context_length"
    return Temperature(scale, key(length, "context_length")(config)) if scale else None


MINISTRAL3 = MISTRAL.derive(
    "ministral3",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    temperature=build_llama4_temperature,
    window=key("sliding_window", default=None),
    gguf=LLAMA_GGUF.derive("mistral3", rope=_build_mistral3_rope, temperature=build_gguf_temperature),
)
EVERY_FOURTH_GLOBAL = alternate_windows(4, period="sliding_window_pattern")
_WINDOW = "attention.sliding_window"


def _add_exaone4_window(config: Config) -> Config:
    """Return the keys of a file; a file of the 32 B model (64 layers) without a window gets the window 4,096."""
    return {_WINDOW: 4096, **config} if config["block_count"] == 64 else config


EXAONE4 = OLMO2.derive(
    "exaone4",
    qk_norm="head",
    qkv_bias=False,
    out_bias=False,
    window=EVERY_FOURTH_GLOBAL,
    rope=lambda c: (rotate_local(read_rope, EVERY_FOURTH_GLOBAL) if c.get("sliding_window", 4096) else read_rope)(c),
    transformers="Exaone4ForCausalLM",
    gguf=gguf.BASE.derive(
        "exaone4",
        arrangement="post_sublayer",
        window=lambda c: gguf.build_windows(4)(_add_exaone4_window(c)),
        rope=lambda c: (gguf.build_local_ropes(4) if _add_exaone4_window(c).get(_WINDOW) else read_gguf_rope)(c),
    ),
)
OLMO3 = OLMO2.derive(
    "olmo3",
    window=alternate_windows(4),
    rope=build_ropes(alternate_windows(4), bases=(key("rope_theta", default=5e5), lambda c: 5e5)),
    context=key("max_position_embeddings", default=None),
    transformers="Olmo3ForCausalLM",
    gguf=OLMO2_GGUF,
)


def _build_hunyuan_rope(config: Config) -> RoPE:
    """Return the RoPE; type dynamic with `alpha` multiplies the base by alpha^(d/(d − 2)), at all sequence lengths."""
    settings = find_rope(config)
    if settings.get("rope_type") != "dynamic" or not settings.get("alpha"):
        return read_rope(config)
    dim = key("head_dim")(config)
    theta = (settings.get("rope_theta") or config.get("rope_theta", 1e4)) * settings["alpha"] ** (dim / (dim - 2))
    return RoPE(theta)


HUNYUAN = LLAMA.derive(
    "hunyuan_v1_dense",
    names={
        "layers.{i}.attn.q_norm": "layers.{i}.self_attn.query_layernorm",
        "layers.{i}.attn.k_norm": "layers.{i}.self_attn.key_layernorm",
    },
    defaults={"rms_norm_eps": 1e-5},
    rope=_build_hunyuan_rope,
    ffn_bias=False,
    qk_norm="head",
    qk_norm_last=True,
    transformers="HunYuanDenseV1ForCausalLM",
    gguf=gguf.BASE.derive("hunyuan-dense", qk_norm_last=True, loader=Loader(free_heads=True, qk_norm=True)),
)
ERNIE4_5 = LLAMA.derive(
    "ernie4_5",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    rope=rope_with(rope_theta=5e5, interleaved=True),
    **set_all(key("use_bias", default=False), *BIASES),
    transformers="Ernie4_5ForCausalLM",
    gguf=gguf.BASE.derive("ernie4_5", rope=gguf.build_interleaved_rope),
)
NEMOTRON = LLAMA.derive(
    "nemotron",
    names={
        "layers.{i}.attn_norm": add_one("layers.{i}.input_layernorm"),
        "layers.{i}.ffn_norm": add_one("layers.{i}.post_attention_layernorm"),
        "final_norm": add_one("norm"),
    },
    norm="layer",
    eps=key("norm_eps", default=1e-5),
    rope=rope_with(partial_rotary_factor=0.5),
    defaults={"hidden_act": "relu2"},
    gated=False,
    transformers="NemotronForCausalLM",
    gguf=gguf.UNGATED.derive("nemotron", activation="relu2", loader=Loader("n", "qof", head="own", partial_rope=True)),
)
CWM = LLAMA.derive(
    "cwm",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    rope=rope_with(rope_theta=1e6, rope_parameters=_build_llama3_defaults(1e6, 16.0)),
    qkv_bias=False,
    out_bias=False,
    window=alternate_windows(4, first_global=True, window=8192),
    transformers="CwmForCausalLM",
)
INTERNLM3 = LLAMA.derive(
    "internlm3",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    qkv_bias=key("attention_bias", "qkv_bias", default=False),
    out_bias=key("attention_bias", "qkv_bias", default=False),
    ffn_bias=key("mlp_bias", "bias", default=False),
    transformers="LlamaForCausalLM",
)
IQUESTCODER = LLAMA.derive(
    "iquestcoder",
    refuse={"clip_qkv": (None,), "use_sliding_window": (False, None)},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    transformers="LlamaForCausalLM",
)


def build_layer_ropes(config: Config) -> RoPE | tuple[RoPE | None, ...]:
    """Return the RoPE of each layer with its base in layer_rope_theta (0, null: None); without it, one for all."""
    bases = config.get("layer_rope_theta")
    if bases is None:
        return read_rope(config)
    settings = find_rope(config)
    return tuple(
        read_rope({**config, "rope_parameters": {**settings, "rope_theta": base}}) if base else None for base in bases
    )


GRANITE_SWA = GRANITE.derive(
    "granite_swa",
    names={"layers.{i}.attn.sinks": "layers.{i}.self_attn.sinks"},
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    window=alternate_windows(4, first_global=True, window=128),
    sinks=True,
    rope=build_layer_ropes,
)
HYPERCLOVAX = GRANITE.derive(
    "hyperclovax",
    names={
        "layers.{i}.attn_post_norm": "layers.{i}.post_norm1",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_norm2",
    },
    arrangement=lambda c: "sandwich" if c.get("use_post_norm", True) else "pre",
    scale=key("attention_multiplier", default=None),
    logit_scale=key("logits_scaling", default=1.0),
)
COHERE2 = COHERE.derive(
    "cohere2",
    qk_norm="none",
    window=EVERY_FOURTH_GLOBAL,
    rope=rotate_local(rope_with(rope_theta=1e4, interleaved=True), EVERY_FOURTH_GLOBAL),
    transformers="Cohere2ForCausalLM",
    gguf=gguf.BASE.derive(
        "cohere2",
        norm="layer",
        arrangement="parallel",
        window=gguf.build_windows(4),
        rope=gguf.build_local_ropes(4, interleaved=True),
        logit_scale=key("logit_scale"),
        loader=Loader(head="tied", windows=True),
    ),
)


def _build_doge_attention(config: Config) -> ScoredKeysAttention:
    n_keys, context = config.get("keep_window_size", 2048), key("max_position_embeddings", default=2048)(config)
    if context > n_keys:
        raise WeftError(f"keep_window_size={n_keys} must be at least max_position_embeddings={context}")
    heads, norm = key("num_attention_heads")(config), RMSNorm(key("rms_norm_eps", default=1e-6)(config))
    head, bias = config.get("head_dim") or key("hidden_size")(config) // heads, config.get("attention_bias", False)
    groups, window = config.get("num_key_value_heads"), config.get("sliding_window")
    return ScoredKeysAttention(heads, groups, head, read_rope(config), window, norm, bias)


DOGE = LLAMA.derive(
    "doge",
    names={
        "layers.{i}.attn.a": "layers.{i}.self_attn.A",
        "layers.{i}.attn.step": "layers.{i}.self_attn.dt_proj",
        "layers.{i}.attn_residual_weight": "layers.{i}.input_residual",
        "layers.{i}.ffn_residual_weight": "layers.{i}.post_attention_residual",
    },
    refuse={"is_moe": (False, None)},
    mixer=_build_doge_attention,
    weighted_residual=True,
)
