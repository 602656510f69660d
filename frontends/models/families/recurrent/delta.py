"""Hybrids of attention with the gated delta rule: Qwen3-Next, Qwen 3.5, OLMo Hybrid, Kimi Linear."""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Concat, Recipe, Reshape, Slice

from ....dsl import MLA, GatedDeltaNet, MoE, RMSNorm
from ...tables.family import Config, Fetch, Names, Template, key, required
from ...tables.rope_config import rope_of, rope_with
from ...tables.settings import Settings
from ...tables.templates import gated, shifted
from ..dense.llama import LLAMA
from ..experts.deepseek import corrected, experts_after, rows_of_heads
from ..experts.mixtral import QWEN2_MOE, per_expert
from .mamba import taps

_RECURRENT = "linear_attention"


def _delta_of(settings: Settings) -> GatedDeltaNet:
    """The delta rule of the layers that have one, all alike."""
    return next(mixer for mixer in settings.mixer if isinstance(mixer, GatedDeltaNet))


def _channels(settings: Settings) -> int:
    """Count the channels of the convolution: q, k and v."""
    keys, values = _delta_of(settings).widths
    return 2 * keys + values


def _delta(config: Config, groups: int = 16, heads: int = 32, **options: Any) -> GatedDeltaNet:
    return GatedDeltaNet(
        config.get("linear_num_value_heads") or heads,
        config.get("linear_key_head_dim") or 128,
        config.get("linear_value_head_dim") or 128,
        config.get("linear_num_key_heads") or groups,
        config.get("linear_conv_kernel_dim", 4),
        **options,
    )


def _kinds(config: Config, every: int = 4) -> list[str]:
    """The types of the layers, by default attention in each `every`-th."""
    layers = range(key("num_hidden_layers")(config))
    plain = [_RECURRENT if (i + 1) % every else "full_attention" for i in layers]
    types: list[str] = config.get("layer_types") or plain
    return types


# -- Qwen


def _qwen_mixers(config: Config) -> tuple[GatedDeltaNet | None, ...]:
    delta = _delta(config, norm=RMSNorm(config.get("rms_norm_eps", 1e-6)))
    every = config.get("full_attention_interval") or 4
    return tuple(delta if kind == _RECURRENT else None for kind in _kinds(config, every))


def _of_each_head(name: str, index: int) -> Template:
    """Part `index` of a linear map whose rows are those of the queries and of the gate, head by head."""

    def template(fetch: Fetch, part: str, s: Settings) -> Recipe:
        apart = Reshape(fetch(f"{name}.{part}"), (s.head_count, 2, s.head_size, -1))
        return Reshape(Slice(apart, 1, index, index + 1), (s.head_count * s.head_size, -1))

    return template


def _of_each_group(name: str, *which: int, of: int) -> Template:
    """Parts `which` of a linear map whose rows are q, k, v and the gate (`of` 4) or β and steps (`of` 2) of a group of
    heads, group by group."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        delta = _delta_of(settings)
        groups = delta.groups or delta.heads
        keys, values = (width // groups for width in delta.widths)
        sizes = [keys, keys, values, values] if of == 4 else [delta.heads // groups] * 2
        starts = [sum(sizes[:i]) for i in range(of)]
        apart = Reshape(fetch(f"{name}.{part}"), (groups, sum(sizes), -1))
        rows = (Slice(apart, 1, starts[i], starts[i] + sizes[i]) for i in which)
        return Concat(tuple(Reshape(r, (groups * sizes[i], -1)) for i, r in zip(which, rows, strict=True)))

    return template


def _qwen_experts(config: Config) -> Any:
    if not config.get("num_experts", 512):
        return None
    return QWEN2_MOE.settings["moe"]({"norm_topk_prob": True, **config})


_GDN: Names = {
    "layers.{i}.attn.conv.weight": taps("layers.{i}.linear_attn.conv1d.weight", _channels),
    "layers.{i}.attn.dt.bias": "layers.{i}.linear_attn.dt_bias",
    "layers.{i}.attn.a_log": "layers.{i}.linear_attn.A_log",
    "layers.{i}.attn.norm": "layers.{i}.linear_attn.norm",
    "layers.{i}.attn.out": "layers.{i}.linear_attn.out_proj",
}
_QWEN = QWEN2_MOE.but(
    names={
        "layers.{i}.attn_norm": shifted("layers.{i}.input_layernorm"),
        "layers.{i}.ffn_norm": shifted("layers.{i}.post_attention_layernorm"),
        "final_norm": shifted("norm"),
        **{f"layers.{{i}}.attn.{x}_norm": shifted(f"layers.{{i}}.self_attn.{x}_norm") for x in "qk"},
        "layers.{i}.attn.q": _of_each_head("layers.{i}.self_attn.q_proj", 0),
        "layers.{i}.attn.gate": _of_each_head("layers.{i}.self_attn.q_proj", 1),
        **_GDN,
    },
    refuse={"attention_bias": (False, None), "hidden_act": ("silu", "swish", None)},
    unused=(*LLAMA.unused, "mtp.*"),
    kv_heads=key("num_key_value_heads", default=2),
    head_dim=key("head_dim", default=256),
    rope=rope_with(partial_rotary_factor=0.25),
    window=None,
    qk_norm="head",
    qkv_bias=False,
    gate=True,
    mixer=_qwen_mixers,
)
_QKVZ, _BA = "layers.{i}.linear_attn.in_proj_qkvz", "layers.{i}.linear_attn.in_proj_ba"
_GATE = "layers.{i}.attn.gate"


def _gate(of_delta: Template) -> Template:
    """The gate behind the delta rule, or behind attention, whichever the layer has."""
    of_heads = _of_each_head("layers.{i}.self_attn.q_proj", 1)

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        mine = of_heads if settings.mixer[int(fetch.layer)] is None else of_delta
        return mine(fetch, part, settings)

    return template


QWEN3_NEXT = _QWEN.but(
    "qwen3_next",
    names={
        "layers.{i}.attn.qkv": _of_each_group(_QKVZ, 0, 1, 2, of=4),
        "layers.{i}.attn.gate": _gate(_of_each_group(_QKVZ, 3, of=4)),
        "layers.{i}.attn.beta": _of_each_group(_BA, 0, of=2),
        "layers.{i}.attn.dt.weight": _of_each_group(_BA, 1, of=2),
    },
    moe=_qwen_experts,
)
QWEN3_5 = _QWEN.but(
    "qwen3_5_text",
    names={
        "layers.{i}.attn.qkv": "layers.{i}.linear_attn.in_proj_qkv",
        "layers.{i}.attn.gate": _gate(lambda fetch, part, s: fetch(f"layers.{{i}}.linear_attn.in_proj_z.{part}")),
        "layers.{i}.attn.beta": "layers.{i}.linear_attn.in_proj_b",
        "layers.{i}.attn.dt.weight": "layers.{i}.linear_attn.in_proj_a.weight",
    },
    kv_heads=key("num_key_value_heads", default=4),
    moe=None,
)
QWEN3_5_MOE = QWEN3_5.but("qwen3_5_moe_text", kv_heads=_QWEN.settings["kv_heads"], moe=_qwen_experts)


# -- separate projections of q, k and v


def _joined(name: str) -> Template:
    """One linear map, or the taps of one convolution, stored as those of q, k and v."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        return Concat(tuple(fetch(f"{name.replace('{x}', x)}.{part}") for x in "qkv"))

    return template


def _joined_taps(name: str) -> Template:
    """The weight [channels, width] of a convolution, stored as those of q, k and v [channels, 1, width], or as one."""
    each = _joined(name)

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        whole = name.replace("{x}_", "")
        stored = fetch(f"{whole}.{part}") if fetch.has(f"{whole}.{part}") else each(fetch, part, settings)
        return Reshape(stored, (_channels(settings), -1))

    return template


def _olmo_mixers(config: Config) -> tuple[GatedDeltaNet | None, ...]:
    heads = key("num_attention_heads")(config)
    groups = config.get("linear_num_key_heads") or heads
    keys = config.get("linear_key_head_dim") or int(0.75 * key("hidden_size")(config) / groups)
    sizes = {"linear_key_head_dim": keys, "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * keys}
    options = {"norm": RMSNorm(1e-5), "negative": config.get("linear_allow_neg_eigval", True)}
    delta = _delta({**config, **sizes}, groups, heads, **options)
    return tuple(delta if kind == _RECURRENT else None for kind in _olmo_kinds(config))


def _olmo_kinds(config: Config) -> list[str]:
    kinds = _kinds(config)
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def _olmo_rope(config: Config) -> Any:
    said = config.get("rope_parameters") or {}
    return None if said.get("rope_theta", 0.0) is None else rope_of(config)


OLMO_HYBRID = LLAMA.but(
    "olmo_hybrid",
    names={
        "layers.{i}.attn_norm": "layers.{i}.attention_layer_norm",
        "layers.{i}.ffn_norm": "layers.{i}.feedforward_layer_norm",
        "layers.{i}.attn_post_norm": "layers.{i}.feedforward_layer_norm",
        "layers.{i}.ffn_post_norm": "layers.{i}.post_feedforward_layernorm",
        **_GDN,
        "layers.{i}.attn.qkv": _joined("layers.{i}.linear_attn.{x}_proj"),
        "layers.{i}.attn.conv": _joined_taps("layers.{i}.linear_attn.{x}_conv1d"),
        "layers.{i}.attn.conv.weight": None,
        "layers.{i}.attn.beta": "layers.{i}.linear_attn.b_proj",
        "layers.{i}.attn.dt.weight": "layers.{i}.linear_attn.a_proj.weight",
        "layers.{i}.attn.gate": "layers.{i}.linear_attn.g_proj",
        "layers.{i}.attn.norm": "layers.{i}.linear_attn.o_norm",
        "layers.{i}.attn.out": "layers.{i}.linear_attn.o_proj",
    },
    aliases={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
    refuse={"hidden_act": ("silu", "swish", None)},
    head_dim=key("head_dim", default=None),
    arrangement=lambda c: tuple("pre" if kind == _RECURRENT else "post_sublayer" for kind in _olmo_kinds(c)),
    qk_norm="full",
    ffn_bias=False,
    rope=_olmo_rope,
    mixer=_olmo_mixers,
)


def _kimi_kinds(config: Config) -> list[bool]:
    """Return for each layer if it has the delta rule; the lists of layers count from 1."""
    layers, said = range(key("num_hidden_layers")(config)), config.get("linear_attn_config") or {}
    if config.get("layer_types"):
        return [kind == _RECURRENT for kind in config["layer_types"]]
    if "full_attn_layers" in said and "kda_layers" in said:
        return [i + 1 in said["kda_layers"] for i in layers]
    return [i == 0 or i % 4 != 0 for i in layers]


def _kimi_mixers(config: Config) -> tuple[GatedDeltaNet | MLA, ...]:
    said, eps = config.get("linear_attn_config") or {}, config.get("rms_norm_eps", 1e-5)
    size = said.get("head_dim") or config.get("linear_head_dim", 128)
    delta = GatedDeltaNet(
        said.get("num_heads") or config.get("linear_num_heads", 32),
        size,
        conv=said.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4),
        gate="sigmoid",
        norm=RMSNorm(eps),
        per_key=True,
        rank=size,
    )
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, plain, shared, value = required(config, *names)
    latent = MLA(heads, rank, plain, shared, value, None, config.get("q_lora_rank"), RMSNorm(1e-6))
    return tuple(delta if recurrent else latent for recurrent in _kimi_kinds(config))


def _kimi_config(config: Config) -> Config:
    """The config with the names of DeepSeek-V3."""
    others = {
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
    return {
        "n_shared_experts": 1,
        **{name: config[other] for name, other in others.items() if other in config},
        **config,
    }


def _kimi_experts(config: Config) -> tuple[MoE | None, ...]:
    routing = corrected(scale=2.446, groups=1, top_groups=1)
    experts: tuple[MoE | None, ...] = experts_after(routing, first_dense=1)(_kimi_config(config))
    return experts


_KIMI = "layers.{i}.block_sparse_moe"
KIMI_LINEAR = LLAMA.but(
    "kimi_linear",
    names={
        "layers.{i}.attn.qkv": _joined("layers.{i}.self_attn.{x}_proj"),
        "layers.{i}.attn.conv": _joined_taps("layers.{i}.self_attn.{x}_conv1d"),
        "layers.{i}.attn.beta": "layers.{i}.self_attn.b_proj",
        "layers.{i}.attn.dt_down": "layers.{i}.self_attn.f_a_proj",
        "layers.{i}.attn.dt.weight": "layers.{i}.self_attn.f_b_proj.weight",
        "layers.{i}.attn.dt.bias": "layers.{i}.self_attn.dt_bias",
        "layers.{i}.attn.a_log": lambda fetch, part, s: Reshape(fetch("layers.{i}.self_attn.A_log"), (-1,)),
        "layers.{i}.attn.gate_down": "layers.{i}.self_attn.g_a_proj",
        "layers.{i}.attn.gate": "layers.{i}.self_attn.g_b_proj",
        "layers.{i}.attn.norm": "layers.{i}.self_attn.o_norm",
        "layers.{i}.attn.out": "layers.{i}.self_attn.o_proj",
        "layers.{i}.attn.q_down": "layers.{i}.self_attn.q_a_proj",
        "layers.{i}.attn.q_norm": "layers.{i}.self_attn.q_a_layernorm",
        "layers.{i}.attn.q_up": "layers.{i}.self_attn.q_b_proj",
        "layers.{i}.attn.kv_down": "layers.{i}.self_attn.kv_a_proj_with_mqa",
        "layers.{i}.attn.kv_norm": "layers.{i}.self_attn.kv_a_layernorm",
        "layers.{i}.attn.k_up.weight": rows_of_heads("layers.{i}.self_attn.kv_b_proj.weight", "k"),
        "layers.{i}.attn.v_up.weight": rows_of_heads("layers.{i}.self_attn.kv_b_proj.weight", "v"),
        **gated("layers.{i}.ffn", _KIMI),
        "layers.{i}.ffn.router": f"{_KIMI}.gate",
        "layers.{i}.ffn.router.correction": f"{_KIMI}.gate.e_score_correction_bias",
        **per_expert(f"{_KIMI}.experts", "w1", "w3", "w2"),
        **gated("layers.{i}.ffn.shared", f"{_KIMI}.shared_experts"),
    },
    aliases={"block_sparse_moe": "mlp"},
    refuse={"attention_bias": (False, None), "hidden_act": ("silu", "swish", None)},  # the act of convolutions, too
    ffn_bias=False,
    kv_heads=None,
    head_dim=None,
    rope=None,
    qkv_bias=False,
    out_bias=False,
    eps=key("rms_norm_eps", default=1e-5),
    tie=False,  # whatever the config says
    context=key("model_max_length", "max_position_embeddings", default=None),
    mixer=_kimi_mixers,
    moe=_kimi_experts,
)
