"""Models of linear recurrences: MiniMax's lightning attention, RecurrentGemma, RWKV-4, xLSTM."""

from __future__ import annotations

import math

from weft.ir.recipes import Permute, Recipe, Reshape, Slice

from ....dsl import (
    MLSTM,
    RGLRU,
    Attention,
    LayerNorm,
    LightningAttention,
    NormedResidual,
    RMSNorm,
    RWKVChannelMix,
    RWKVTimeMix,
)
from ...tables.family import Config, Family, Fetch, key, read_required, template
from ...tables.rope_config import rope_with
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import add_one, name_gated_mlp, reshape_tensor
from ..dense.llama import LLAMA
from ..experts.mixtral import MIXTRAL, read_activation
from .mamba import reshape_conv

_RECURRENT = "linear_attention"


# -- MiniMax


def _build_minimax_blocks(config: Config) -> tuple[NormedResidual, ...]:
    heads, dim, layers = read_required(config, "num_attention_heads", "hidden_size", "num_hidden_layers")
    size, act, eps = config.get("head_dim") or dim // heads, read_activation(config), config.get("rms_norm_eps", 1e-5)
    kv_heads, window = config.get("num_key_value_heads") or heads, config.get("sliding_window")
    attention = Attention(heads, kv_heads, size, rope_with(rope_theta=1e6)(config), window)
    kinds = config.get("layer_types") or [("full_attention", _RECURRENT)[i % 2] for i in range(layers)]
    moe = MIXTRAL.settings["moe"](config)

    def scales(kind: str) -> tuple[float, float]:
        alpha, beta = (float(config.get(f"{kind}_{name}_factor", 1)) for name in ("alpha", "beta"))
        return alpha, beta

    def block(i: int) -> NormedResidual:
        recurrent = kinds[i] == _RECURRENT
        decay = 1 - i / (layers - 1 + 1e-5) + 1e-5
        lightning = LightningAttention(heads, size, decay, act, RMSNorm(1e-6))
        mixer, kind = (lightning, "linear_attn") if recurrent else (attention, "full_attn")
        return NormedResidual(mixer, moe, RMSNorm(eps), scales(kind), scales("mlp"))

    return tuple(block(i) for i in range(layers))


@template
def _fetch_minimax_qkv(fetch: Fetch, part: str, s: Settings, which: str) -> Recipe:
    """Return q, k or v (`which`): a separate tensor, or in lightning attention rows of one tensor, by head."""
    if not isinstance(s.block[int(fetch.layer)].attn, LightningAttention):
        return fetch(f"layers.{{i}}.self_attn.{which}_proj.{part}")
    heads, index = s.head_count, "qkv".index(which)
    by_head = Reshape(fetch(f"layers.{{i}}.self_attn.qkv_proj.{part}"), (heads, 3, s.head_size, -1))
    return Reshape(Slice(by_head, 1, index, index + 1), (heads * s.head_size, -1))


MINIMAX = MIXTRAL.derive(
    "minimax",
    names={
        **{f"layers.{{i}}.attn.{x}": _fetch_minimax_qkv(x) for x in "qkv"},
        "layers.{i}.attn.norm": "layers.{i}.self_attn.norm",
        "layers.{i}.attn.gate": "layers.{i}.self_attn.output_gate",
        "layers.{i}.attn.out": "layers.{i}.self_attn.out_proj",
    },
    idle=("*.slope_rate", "*.query_decay", "*.key_decay", "*.diagonal_decay"),  # values that follow from the config
    window=None,
    block=_build_minimax_blocks,
)


# -- RecurrentGemma

_GRIFFIN_ACTIVATION = key("hidden_activation", default="gelu_pytorch_tanh")


def _read_griffin_kinds(config: Config) -> list[str]:
    types = list(config.get("block_types") or ("recurrent", "recurrent", "attention"))
    layers = int(key("num_hidden_layers", default=26)(config))
    return (types * (layers // len(types) + 1))[:layers]


def _build_griffin_mixers(config: Config) -> tuple[RGLRU | None, ...]:
    heads, dim = read_required(config, "num_attention_heads", "hidden_size")
    act = ACTIVATIONS[_GRIFFIN_ACTIVATION(config)]
    unit = RGLRU(heads, config.get("lru_width") or dim, config.get("conv1d_width", 4), act)
    return tuple(unit if kind == "recurrent" else None for kind in _read_griffin_kinds(config))


def _round_to_bfloat16(number: float) -> float:
    """Return `number` rounded to bfloat16, the type in which transformers stores it."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


@template
def _reshape_block_diagonal(fetch: Fetch, part: str, s: Settings, name: str) -> Recipe:
    """Return a block-diagonal matrix [width, width/heads], stored [heads, in, out], or its bias [width]."""
    unit = next(mixer for mixer in s.mixer if mixer is not None)
    stored = fetch(f"{name}_{part}")
    if part == "bias":
        return Reshape(stored, (-1,))
    return Reshape(Permute(stored, (0, 2, 1)), (unit.width, -1))


_GRIFFIN = "layers.{i}.temporal_block"
RECURRENT_GEMMA = LLAMA.derive(
    "recurrent_gemma",
    inert=("max_position_embeddings",),
    names={
        "layers.{i}.attn_norm": add_one("layers.{i}.temporal_pre_norm"),
        "layers.{i}.ffn_norm": add_one("layers.{i}.channel_pre_norm"),
        "final_norm": add_one("final_norm"),
        **{f"layers.{{i}}.attn.{x}": f"{_GRIFFIN}.{x}_proj" for x in "qkvo"},
        "layers.{i}.attn.in": f"{_GRIFFIN}.linear_x",
        "layers.{i}.attn.gate": f"{_GRIFFIN}.linear_y",
        "layers.{i}.attn.out": f"{_GRIFFIN}.linear_out",
        "layers.{i}.attn.conv.weight": reshape_conv(
            f"{_GRIFFIN}.conv_1d.weight", lambda s: next(m.width for m in s.mixer if m is not None)
        ),
        "layers.{i}.attn.conv.bias": f"{_GRIFFIN}.conv_1d.bias",
        "layers.{i}.attn.input": _reshape_block_diagonal(f"{_GRIFFIN}.rg_lru.input_gate"),
        "layers.{i}.attn.recur": _reshape_block_diagonal(f"{_GRIFFIN}.rg_lru.recurrent_gate"),
        "layers.{i}.attn.rate": f"{_GRIFFIN}.rg_lru.recurrent_param",
        **name_gated_mlp("layers.{i}.ffn", "layers.{i}.mlp_block"),
    },
    defaults={"num_hidden_layers": 26, "tie_word_embeddings": True},
    ffn=lambda c: key("intermediate_size", default=7680)(c) // 2,
    activation=_GRIFFIN_ACTIVATION,
    out_bias=True,
    ffn_bias=True,
    rope=rope_with(partial_rotary_factor=0.5),
    window=key("attention_window_size", "sliding_window", default=2048),
    embed_scale=lambda c: _round_to_bfloat16(math.sqrt(key("hidden_size")(c))),
    logit_softcap=key("logits_soft_cap", default=30.0),
    context=None,
    mixer=_build_griffin_mixers,
)


# -- RWKV


RWKV = Family(
    model_types=("rwkv",),
    inert=("num_attention_heads",),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("hidden_size"),
        "layers": key("num_hidden_layers"),
        "norm": "layer",
        "eps": key("layer_norm_epsilon", default=1e-5),
        "embed_norm": True,
        "mixer": lambda c: RWKVTimeMix(c.get("attention_hidden_size") or key("hidden_size")(c)),
        "moe": lambda c: RWKVChannelMix(c.get("intermediate_size") or 4 * key("hidden_size")(c)),
        "context": key("context_length", default=None),
        "tie": key("tie_word_embeddings", default=False),
    },
    names={
        "embed": "embeddings",
        "embed_norm": "blocks.0.pre_ln",
        "layers.{i}.attn_norm": "blocks.{i}.ln1",
        "layers.{i}.ffn_norm": "blocks.{i}.ln2",
        **{
            f"layers.{{i}}.attn.{x}": f"blocks.{{i}}.attention.{name}"
            for x, name in (("k", "key"), ("v", "value"), ("r", "receptance"), ("out", "output"))
        },
        **{
            f"layers.{{i}}.attn.{x}.mix": reshape_tensor(f"blocks.{{i}}.attention.time_mix_{name}", -1)
            for x, name in (("k", "key"), ("v", "value"), ("r", "receptance"))
        },
        "layers.{i}.attn.decay": "blocks.{i}.attention.time_decay",
        "layers.{i}.attn.first": "blocks.{i}.attention.time_first",
        **{
            f"layers.{{i}}.ffn.{x}": f"blocks.{{i}}.feed_forward.{name}"
            for x, name in (("k", "key"), ("v", "value"), ("r", "receptance"))
        },
        **{
            f"layers.{{i}}.ffn.{x}.mix": reshape_tensor(f"blocks.{{i}}.feed_forward.time_mix_{name}", -1)
            for x, name in (("k", "key"), ("r", "receptance"))
        },
        "final_norm": "ln_out",
        "lm_head": "head",
    },
    prefix="rwkv.",
    refuse={"layer_norm_epsilon": (1e-5, None)},  # only of the layers: the last norm has 1e-5
    unused=("head.weight",),
)


# -- xLSTM


def _build_mlstm(config: Config) -> MLSTM:
    dim, eps = key("hidden_size", "embedding_dim")(config), config.get("norm_eps", 1e-6)
    return MLSTM(
        config.get("num_heads", 8),
        int(dim * config.get("qk_dim_factor", 0.5)),
        int(dim * config.get("v_dim_factor", 1.0)),
        config.get("gate_soft_cap", 15.0),
        config.get("eps", 1e-6),
        LayerNorm(eps, bias=False),
    )


def _read_xlstm_width(config: Config) -> int:
    width = key("hidden_size", "embedding_dim")(config) * config.get("ffn_proj_factor", 2.667)
    multiple = config.get("ffn_round_up_to_multiple_of", 64)
    return int((width + multiple - 1) // multiple * multiple)


XLSTM = Family(
    model_types=("xlstm",),
    inert=("max_position_embeddings", "intermediate_size", "num_attention_heads"),
    settings={
        "vocab": key("vocab_size", default=50304),
        "dim": key("hidden_size", "embedding_dim"),
        "layers": key("num_blocks", "num_hidden_layers"),
        "ffn": _read_xlstm_width,
        "eps": key("norm_eps", default=1e-6),
        "mixer": _build_mlstm,
        "logit_softcap": key("output_logit_soft_cap", default=30.0),
        "tie": False,  # whatever the config states
    },
    names={
        "embed": "embeddings",
        "layers.{i}.attn_norm": "blocks.{i}.norm_mlstm",
        "layers.{i}.ffn_norm": "blocks.{i}.norm_ffn",
        **{f"layers.{{i}}.attn.{x}": f"blocks.{{i}}.mlstm_layer.{x}" for x in "qkv"},
        **{f"layers.{{i}}.attn.{x}": f"blocks.{{i}}.mlstm_layer.{x}gate_preact" for x in "if"},
        "layers.{i}.attn.gate": "blocks.{i}.mlstm_layer.ogate_preact",
        "layers.{i}.attn.norm": "blocks.{i}.mlstm_layer.multihead_norm",
        "layers.{i}.attn.out": "blocks.{i}.mlstm_layer.out_proj",
        "layers.{i}.ffn.gate": "blocks.{i}.ffn.proj_up_gate",
        "layers.{i}.ffn.up": "blocks.{i}.ffn.proj_up",
        "layers.{i}.ffn.down": "blocks.{i}.ffn.proj_down",
        "final_norm": "out_norm",
        "lm_head": "lm_head",
    },
    prefix="backbone.",
    unused=("lm_head.weight",),
    refuse={"use_bias": (False, None), "weight_mode": ("single", None)},
)
