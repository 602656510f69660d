"""Hybrids of attention with the gated delta rule: Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Concat, Permute, Recipe, Reshape, Slice

from ....dsl import GatedDeltaNet, RMSNorm, Router
from ...tables import gguf
from ...tables.family import Config, Fetch, Template, key, mask_layers, read_required, template
from ...tables.rope_config import rope_with
from ...tables.settings import Settings
from ...tables.templates import add_one
from ..dense.llama import LLAMA
from ..experts.mixtral import QWEN2_MOE
from .delta_hybrids import GDN, RECURRENT, build_delta_rule, find_delta_rule, read_layer_kinds
from .mamba import convert_rates


def _build_qwen_mixers(config: Config) -> tuple[GatedDeltaNet | None, ...]:
    delta = build_delta_rule(config, norm=RMSNorm(config.get("rms_norm_eps", 1e-6)))
    every = config.get("full_attention_interval") or 4
    return tuple(delta if kind == RECURRENT else None for kind in read_layer_kinds(config, every))


@template
def _slice_per_head(fetch: Fetch, part: str, s: Settings, name: str, index: int) -> Recipe:
    """Return q (`index` 0) or the gate (1) of linear layer `name`, which has both per head, q first."""
    by_head = Reshape(fetch(f"{name}.{part}"), (s.head_count, 2, s.head_size, -1))
    return Reshape(Slice(by_head, 1, index, index + 1), (s.head_count * s.head_size, -1))


@template
def _slice_per_group(fetch: Fetch, part: str, settings: Settings, name: str, *which: int, of: int) -> Recipe:
    """Return the parts `which` of linear layer `name`, concatenated; its rows are all parts of group 0, then of group
    1, …. The parts, by index, are q, k, v and gate if `of` is 4, or β and step if `of` is 2."""
    delta = find_delta_rule(settings)
    groups = delta.groups or delta.heads
    keys, values = (width // groups for width in delta.widths)
    sizes = [keys, keys, values, values] if of == 4 else [delta.heads // groups] * 2
    starts = [sum(sizes[:i]) for i in range(of)]
    by_group = Reshape(fetch(f"{name}.{part}"), (groups, sum(sizes), -1))
    rows = (Slice(by_group, 1, starts[i], starts[i] + sizes[i]) for i in which)
    return Concat(tuple(Reshape(r, (groups * sizes[i], -1)) for i, r in zip(which, rows, strict=True)))


def _build_qwen_experts(config: Config) -> Any:
    if not config.get("num_experts", 512):
        return None
    return QWEN2_MOE.settings["moe"]({"norm_topk_prob": True, **config})


_QWEN = QWEN2_MOE.derive(
    names={
        "layers.{i}.attn_norm": add_one("layers.{i}.input_layernorm"),
        "layers.{i}.ffn_norm": add_one("layers.{i}.post_attention_layernorm"),
        "final_norm": add_one("norm"),
        **{f"layers.{{i}}.attn.{x}_norm": add_one(f"layers.{{i}}.self_attn.{x}_norm") for x in "qk"},
        "layers.{i}.attn.q": _slice_per_head("layers.{i}.self_attn.q_proj", 0),
        "layers.{i}.attn.gate": _slice_per_head("layers.{i}.self_attn.q_proj", 1),
        **GDN,
    },
    refuse={"attention_bias": (False, None), "hidden_act": ("silu", "swish", None)},
    unused=(*LLAMA.unused, "mtp.*"),
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    rope=rope_with(partial_rotary_factor=0.25),
    window=None,
    qk_norm="head",
    qkv_bias=False,
    gate=True,
    mixer=_build_qwen_mixers,
)


def _find_gguf_delta_layers(config: Config) -> list[bool]:
    stated, layers = config.get("attention.recurrent_layers"), range(config["block_count"])
    every = config.get("full_attention_interval", 4)
    return stated[: len(layers)] if isinstance(stated, list) else [(i + 1) % every != 0 for i in layers]


def _build_gguf_delta(config: Config) -> GatedDeltaNet:
    names = (f"ssm.{n}" for n in ("time_step_rank", "state_size", "inner_size", "group_count", "conv_kernel"))
    heads, size, inner, groups, conv = read_required(config, *names)
    norm = RMSNorm(key("attention.layer_norm_rms_epsilon")(config))
    return GatedDeltaNet(heads, size, inner // heads, groups, conv, norm=norm)


def _reorder_by_group(stored: Recipe, settings: Settings, rows: int) -> Recipe:
    """Return `stored`, with head 0 of all groups, then head 1, …, as [rows, -1] with all heads of group 0 first."""
    delta = find_delta_rule(settings)
    groups = delta.groups or delta.heads
    by_group = Permute(Reshape(stored, (delta.heads // groups, groups, -1)), (1, 0, 2))
    return Reshape(by_group, (rows, -1))


@template
def _reorder_rows(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return linear layer `name`, whose rows belong to value heads, with the heads ordered by group."""
    delta, stored = find_delta_rule(settings), fetch(f"{name}.{part}")
    rows = delta.widths[1] if name.endswith("gate") else delta.heads
    return _reorder_by_group(stored, settings, rows)


@template
def _reorder_value_rows(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return layer `name`, whose rows are q and k, then value heads, with the value heads ordered by group."""
    (keys, values), stored = find_delta_rule(settings).widths, fetch(f"{name}.{part}")
    mine = _reorder_by_group(Slice(stored, 0, 2 * keys, 2 * keys + values), settings, values)
    return Concat((Slice(stored, 0, 0, 2 * keys), mine))


@template
def _reorder_columns(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return linear layer `name`, whose columns belong to value heads, with the heads ordered by group."""
    delta = find_delta_rule(settings)
    groups = delta.groups or delta.heads
    by_group = Reshape(fetch(f"{name}.{part}"), (settings.dim, delta.heads // groups, groups, -1))
    return Reshape(Permute(by_group, (0, 2, 1, 3)), (settings.dim, -1))


def _reorder_vector(template: Template) -> Template:
    """Return a template for the vector of `template`, an element per value head, with the heads ordered by group."""
    return lambda fetch, part, settings: Reshape(_reorder_by_group(template(fetch, part, settings), settings, 1), (-1,))


_GGUF_Q = "blk.{i}.attn_q"
_QWEN_GGUF = gguf.SPARSE_BASE.derive(
    names={
        **gguf.NORM_AFTER,
        "layers.{i}.attn.q": _slice_per_head(_GGUF_Q, 0),
        "layers.{i}.attn.conv": "blk.{i}.ssm_conv1d",
        "layers.{i}.attn.dt.bias": "blk.{i}.ssm_dt.bias",
        "layers.{i}.attn.a_log": convert_rates(-1),
        "layers.{i}.attn.norm": "blk.{i}.ssm_norm",
        "layers.{i}.attn.out": "blk.{i}.ssm_out",
    },
    from_keys={"qk_norm": lambda keys: "head"},
    gate=True,
    mixer=mask_layers(_build_gguf_delta, _find_gguf_delta_layers),
    moe=gguf.build_experts(Router(), shared_gate=True),
)
_QKVZ, _BA = "layers.{i}.linear_attn.in_proj_qkvz", "layers.{i}.linear_attn.in_proj_ba"
_GATE = "layers.{i}.attn.gate"


@template
def _pick_gate(
    fetch: Fetch, part: str, settings: Settings, of_delta: Template, queries: str = "layers.{i}.self_attn.q_proj"
) -> Recipe:
    """Return a layer's gate: `of_delta` in a layer with the delta rule, else half of the projection `queries`."""
    of_heads = _slice_per_head(queries, 1)
    mine = of_heads if settings.mixer[int(fetch.layer)] is None else of_delta
    return mine(fetch, part, settings)


QWEN3_NEXT = _QWEN.derive(
    "qwen3_next",
    names={
        "layers.{i}.attn.qkv": _slice_per_group(_QKVZ, 0, 1, 2, of=4),
        "layers.{i}.attn.gate": _pick_gate(_slice_per_group(_QKVZ, 3, of=4)),
        "layers.{i}.attn.beta": _slice_per_group(_BA, 0, of=2),
        "layers.{i}.attn.dt.weight": _slice_per_group(_BA, 1, of=2),
    },
    moe=_build_qwen_experts,
    gguf=_QWEN_GGUF.derive(
        "qwen3next",
        names={
            "layers.{i}.attn.qkv": gguf.read_or("blk.{i}.attn_qkv", _slice_per_group("blk.{i}.ssm_in", 0, 1, 2, of=4)),
            "layers.{i}.attn.gate": _pick_gate(
                gguf.read_or("blk.{i}.attn_gate", _slice_per_group("blk.{i}.ssm_in", 3, of=4)), _GGUF_Q
            ),
            "layers.{i}.attn.beta": _slice_per_group("blk.{i}.ssm_ba", 0, of=2),
            "layers.{i}.attn.dt.weight": _slice_per_group("blk.{i}.ssm_ba", 1, of=2),
        },
    ),
)
_QWEN3_5_GGUF = _QWEN_GGUF.derive(
    "qwen35moe",
    names={
        "layers.{i}.attn.qkv": _reorder_value_rows("blk.{i}.attn_qkv"),
        "layers.{i}.attn.gate": _pick_gate(_reorder_rows("blk.{i}.attn_gate"), _GGUF_Q),
        "layers.{i}.attn.conv": _reorder_value_rows("blk.{i}.ssm_conv1d"),
        "layers.{i}.attn.beta": _reorder_rows("blk.{i}.ssm_beta"),
        "layers.{i}.attn.dt.weight": _reorder_rows("blk.{i}.ssm_alpha"),
        "layers.{i}.attn.dt.bias": _reorder_vector(lambda fetch, part, s: fetch("blk.{i}.ssm_dt.bias")),
        "layers.{i}.attn.a_log": _reorder_vector(convert_rates()),
        "layers.{i}.attn.out": _reorder_columns("blk.{i}.ssm_out"),
    },
)
QWEN3_5 = _QWEN.derive(
    "qwen3_5_text",
    names={
        "layers.{i}.attn.qkv": "layers.{i}.linear_attn.in_proj_qkv",
        "layers.{i}.attn.gate": _pick_gate(lambda fetch, part, s: fetch(f"layers.{{i}}.linear_attn.in_proj_z.{part}")),
        "layers.{i}.attn.beta": "layers.{i}.linear_attn.in_proj_b",
        "layers.{i}.attn.dt.weight": "layers.{i}.linear_attn.in_proj_a.weight",
    },
    defaults={"num_key_value_heads": 4},
    moe=None,
    gguf=_QWEN3_5_GGUF.derive("qwen35", moe=None),
)
QWEN3_5_MOE = QWEN3_5.derive(
    "qwen3_5_moe_text", kv_heads=_QWEN.settings["kv_heads"], moe=_build_qwen_experts, gguf=_QWEN3_5_GGUF
)
