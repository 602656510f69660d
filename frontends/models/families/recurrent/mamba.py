"""Mamba, Mamba-2 and their hybrids with attention (Jamba, Bamba, Granite 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.ir.recipes import Map, Recipe, Reshape

from ....dsl import Mamba, Mamba2, MoE, RMSNorm, Router
from ...tables import gguf
from ...tables.family import (
    BIASES,
    Config,
    Family,
    Fetch,
    Names,
    Rule,
    Template,
    key,
    mask_layers,
    read_required,
    rule,
    set_all,
    template,
)
from ...tables.rope_config import read_gguf_rope, read_rope, rope_with
from ...tables.settings import Settings
from ...tables.templates import name_gated_mlp, reshape_tensor, split_gate_up
from ..dense.llama import GRANITE_GGUF, LLAMA
from ..experts.mixtral import GRANITE_MOE, build_granite_experts, map_expert_names, read_activation

NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None)
_PLAIN = {"hidden_act": ("silu", "swish", None), "time_step_limit": NO_LIMIT}


def _count_channels(settings: Settings) -> int:
    """Return the number of channels of the state spaces' convolutions, equal in all layers with a state space."""
    mixers = settings.mixer if isinstance(settings.mixer, tuple) else (settings.mixer,)
    layers = (getattr(mixer, "ssm", mixer) for mixer in mixers)
    mixer = next(layer for layer in layers if isinstance(layer, Mamba | Mamba2))
    return int(mixer.inner + (2 * mixer.groups * mixer.state if isinstance(mixer, Mamba2) else 0))


def reshape_conv(name: str, channels: Callable[[Settings], int] = _count_channels) -> Template:
    """Return a template for the convolution weight `name` [channels, width], stored [channels, 1, width]."""
    return lambda fetch, part, settings: Reshape(fetch(name), (channels(settings), -1))


def _map_names(at: str) -> Names:
    return {
        **{f"layers.{{i}}.attn.{n}": f"{at}.{n}_proj" for n in ("in", "x", "dt", "out")},
        "layers.{i}.attn.conv.weight": reshape_conv(f"{at}.conv1d.weight"),
        "layers.{i}.attn.conv.bias": f"{at}.conv1d.bias",
        "layers.{i}.attn.a_log": f"{at}.A_log",
        "layers.{i}.attn.d": f"{at}.D",
    }


def map_mamba2_names(at: str) -> Names:
    """Return the names of the parameters of Mamba-2 layers; `at` is the name of the layer's module in checkpoints."""
    return {**_map_names(at), "layers.{i}.attn.dt.bias": f"{at}.dt_bias", "layers.{i}.attn.norm": f"{at}.norm"}


def _read_dt_rank(config: Config, name: str) -> int | None:
    rank = config.get(name, "auto")
    return None if rank == "auto" else int(rank)


def _build_mamba(config: Config) -> Mamba:
    inner = config.get("intermediate_size") or int(config.get("expand", 2) * key("hidden_size")(config))
    return Mamba(
        inner,
        key("state_size", default=16)(config),
        key("conv_kernel", default=4)(config),
        _read_dt_rank(config, "time_step_rank"),
        config.get("use_conv_bias", True),
        config.get("use_bias", False),
    )


def _build_falcon_mamba(config: Config) -> Mamba:
    return replace(_build_mamba(config), norms=RMSNorm(config.get("mixer_rms_eps", 1e-6), weight=False))


def _build_mamba2(config: Config) -> Mamba2:
    groups = key("n_groups", default=8)(config)
    return Mamba2(
        int(config.get("expand", 2) * key("hidden_size")(config)),
        key("num_heads", default=128)(config),
        key("state_size", default=128)(config),
        groups,
        key("conv_kernel", default=4)(config),
        config.get("use_conv_bias", True),
        config.get("use_bias", False),
        RMSNorm(key("layer_norm_epsilon", default=1e-5)(config)),
        groups,
    )


@template
def convert_rates(fetch: Fetch, part: str, settings: Settings, *dims: int) -> Recipe:
    """Return a_log, reshaped to `dims` if given, from A = −e^a_log, which GGUF files store."""
    stored = fetch("blk.{i}.ssm_a")
    return Map(Map(Reshape(stored, dims) if dims else stored, "neg"), "log")


_STATES: Names = {
    **{f"layers.{{i}}.attn.{n}": f"blk.{{i}}.ssm_{n}" for n in ("in", "x", "dt", "out", "d")},
    **{f"layers.{{i}}.attn.{n}_norm": f"blk.{{i}}.ssm_{n}_norm" for n in ("dt", "b", "c")},
    "layers.{i}.attn.a_log": convert_rates(),
    "layers.{i}.attn.conv": "blk.{i}.ssm_conv1d",
}
HEADED_STATES: Names = {
    **_STATES,
    "layers.{i}.attn.dt.bias": "blk.{i}.ssm_dt.bias",
    "layers.{i}.attn.a_log": convert_rates(-1),
    "layers.{i}.attn.d": reshape_tensor("blk.{i}.ssm_d", -1),
    "layers.{i}.attn.norm.weight": reshape_tensor("blk.{i}.ssm_norm.weight", -1),
}


def _make_gguf_mamba_rule(normed: bool = False) -> Rule:
    """Return the rule for `mixer` of Mamba; step, B and C are normalized if `normed` or ssm.dt_b_c_rms is true."""

    def make(config: Config) -> Mamba:
        norm = RMSNorm(key("attention.layer_norm_rms_epsilon")(config), weight=normed)
        names = ("ssm.inner_size", "ssm.state_size", "ssm.conv_kernel", "ssm.time_step_rank")
        inner, state, conv, rank = read_required(config, *names)
        return Mamba(inner, state, conv, rank, norms=norm if normed or config.get("ssm.dt_b_c_rms") else None)

    return gguf.mask_unlisted(make, gguf.RECURRENT)


def build_gguf_mamba2(config: Config) -> Mamba2:
    """Return the state space that a file states."""
    names = (f"ssm.{n}" for n in ("inner_size", "time_step_rank", "state_size", "group_count", "conv_kernel"))
    inner, heads, state, groups, conv = read_required(config, *names)
    norm = RMSNorm(key("attention.layer_norm_rms_epsilon")(config))
    return Mamba2(inner, heads, state, groups, conv, norm=norm, norm_groups=groups)


MAMBA_GGUF = gguf.BASE.derive(
    "mamba",
    inert=("feed_forward_length", "attention.head_count", "attention.head_count_kv", "context_length"),
    names=_STATES,
    **set_all(None, "heads", "kv_heads", "ffn", "rope"),
    context=None,  # the file's value is arbitrary
    mixer=_make_gguf_mamba_rule(),
)
MAMBA = Family(
    model_types=("mamba",),
    inert=("d_inner", "d_model", "n_layer", "ssm_cfg", "rms_norm", "fused_add_norm"),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("hidden_size"),
        "layers": key("num_hidden_layers", "n_layer"),
        "eps": key("layer_norm_epsilon", default=1e-5),
        "mixer": _build_mamba,
        "tie": key("tie_word_embeddings", default=True),
    },
    names={
        "embed": "embeddings",
        "layers.{i}.attn_norm": "layers.{i}.norm",
        **_map_names("layers.{i}.mixer"),
        "final_norm": "norm_f",
        "lm_head": "lm_head",
    },
    prefix="backbone.",
    unused=("lm_head.weight",),
    refuse=_PLAIN,
    aliases={"embeddings.weight": "embedding.weight"},
    gguf=MAMBA_GGUF,
)
FALCON_MAMBA = MAMBA.derive("falcon_mamba", mixer=_build_falcon_mamba, gguf=MAMBA_GGUF)
MAMBA2 = MAMBA.derive(
    "mamba2",
    inert=("head_dim", "time_step_rank", "d_inner", "d_model"),
    names=map_mamba2_names("layers.{i}.mixer"),
    mixer=_build_mamba2,
    defaults={"tie_word_embeddings": False},
    gguf=MAMBA_GGUF.derive("mamba2", names=HEADED_STATES, mixer=gguf.mask_unlisted(build_gguf_mamba2, gguf.RECURRENT)),
)


def _build_jamba_mamba(config: Config) -> Mamba:
    return Mamba(
        int(config.get("mamba_expand", 2) * key("hidden_size")(config)),
        key("mamba_d_state", default=16)(config),
        key("mamba_d_conv", default=4)(config),
        _read_dt_rank(config, "mamba_dt_rank"),
        config.get("mamba_conv_bias", True),
        config.get("mamba_proj_bias", False),
        RMSNorm(key("rms_norm_eps", default=1e-6)(config)),
    )


def _build_hybrid_mamba2(config: Config, eps: float) -> Mamba2:
    groups = key("mamba_n_groups", default=1)(config)
    return Mamba2(
        int(config.get("mamba_expand", 2) * key("hidden_size")(config)),
        key("mamba_n_heads")(config),
        key("mamba_d_state", default=256)(config),
        groups,
        key("mamba_d_conv", default=4)(config),
        config.get("mamba_conv_bias", True),
        config.get("mamba_proj_bias", False),
        RMSNorm(key("rms_norm_eps", default=eps)(config)),
        groups,
    )


@rule
def _select_periodic(config: Config, kind: str, period: int, offset: int) -> tuple[bool, ...]:
    """Return for each layer i whether it is of `kind`: i mod period = offset. The config keys {kind}_layer_period and
    {kind}_layer_offset override `period` and `offset`."""
    step, first = config.get(f"{kind}_layer_period", period), config.get(f"{kind}_layer_offset", offset)
    return tuple(i % step == first for i in range(key("num_hidden_layers")(config)))


def _build_jamba_experts(config: Config) -> MoE | None:
    experts, hidden, k = read_required(config, "num_experts", "intermediate_size", "num_experts_per_tok")
    return MoE(experts, hidden, k, read_activation(config), router=Router(renormalize=False)) if experts > 1 else None


def _find_bamba_mamba_layers(config: Config) -> Iterator[bool]:
    attention = config.get("attn_layer_indices") or ()
    return (i not in attention for i in range(key("num_hidden_layers")(config)))


_HYBRID = {
    "layers.{i}.ffn_norm": "layers.{i}.pre_ff_layernorm",
    **name_gated_mlp("layers.{i}.ffn", "layers.{i}.feed_forward"),
    "final_norm": "final_layernorm",
}
JAMBA = LLAMA.derive(
    "jamba",
    names={
        **_HYBRID,
        **_map_names("layers.{i}.mamba"),
        **{f"layers.{{i}}.attn.{n}_norm": f"layers.{{i}}.mamba.{n}_layernorm" for n in ("dt", "b", "c")},
        "layers.{i}.ffn.router": "layers.{i}.feed_forward.router",
        **map_expert_names("layers.{i}.feed_forward.experts", "gate_proj", "up_proj", "down_proj"),
    },
    **set_all(False, *BIASES),
    refuse=_PLAIN,
    rope=None,
    mixer=mask_layers(_build_jamba_mamba, lambda c: (not attention for attention in _select_periodic("attn", 8, 4)(c))),
    moe=mask_layers(_build_jamba_experts, _select_periodic("expert", 2, 1)),
    gguf=gguf.SPARSE_BASE.derive(
        "jamba",
        names=_STATES,
        kv_heads=gguf.find_max_kv_heads,
        rope=None,
        mixer=_make_gguf_mamba_rule(normed=True),
        moe=gguf.build_experts(Router(renormalize=False)),
    ),
)
BAMBA = LLAMA.derive(
    "bamba",
    inert=("mamba_d_head", "attn_rotary_emb"),
    names={**_HYBRID, **map_mamba2_names("layers.{i}.mamba")},
    refuse=_PLAIN,
    defaults={"rms_norm_eps": 1e-5},
    rope=rope_with(partial_rotary_factor=0.5),
    mixer=mask_layers(lambda c: _build_hybrid_mamba2(c, eps=1e-5), _find_bamba_mamba_layers),
)


def _find_granite_mamba_layers(config: Config) -> Iterator[bool]:
    types = config.get("layer_types") or ["mamba"] * key("num_hidden_layers")(config)
    return (kind in ("mamba", "linear_attention") for kind in types)


def _map_shared_expert(at: str) -> Names:
    gate_up = split_gate_up(at, "layers.{i}.shared_mlp.input_linear")
    return {**gate_up, f"{at}.down": "layers.{i}.shared_mlp.output_linear"}


GRANITE_HYBRID = GRANITE_MOE.derive(
    "granitemoehybrid",
    inert=("mamba_d_head", "num_experts_per_tok", "num_local_experts", "intermediate_size"),
    names={
        **map_mamba2_names("layers.{i}.mamba"),
        **_map_shared_expert("layers.{i}.ffn"),
        **_map_shared_expert("layers.{i}.ffn.shared"),
    },
    refuse=_PLAIN,
    ffn=key("shared_intermediate_size"),
    rope=lambda c: read_rope(c) if c.get("position_embedding_type") == "rope" else None,
    mixer=mask_layers(lambda c: _build_hybrid_mamba2(c, eps=1e-6), _find_granite_mamba_layers),
    moe=build_granite_experts,
    gguf=GRANITE_GGUF.derive(
        "granitehybrid",
        names=HEADED_STATES,
        kv_heads=gguf.find_max_kv_heads,
        defaults={"logit_scale": 1.0},
        rope=lambda c: read_gguf_rope(c) if c.get("rope.scaling.finetuned", True) else None,
        mixer=gguf.mask_unlisted(build_gguf_mamba2, gguf.RECURRENT),
    ),
)
