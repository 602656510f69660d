"""Zamba and Zamba2: Mamba layers, some with input from a few alternating transformer blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Add, Concat, Recipe, Reshape, Slice
from weft.ir.recipes.matrices import MatMul

from ....dsl import Attention, GatedMLP, Mamba, Mamba2, MemoryBlock, RMSNorm
from ...tables.family import Config, Fetch, Names, Template, key, read_required, set_all, template
from ...tables.rope_config import read_rope
from ...tables.settings import ACTIVATIONS, Settings
from ..dense.llama import LLAMA
from .mamba import map_mamba2_names, reshape_conv


def _find_hybrid_layers(config: Config) -> list[bool]:
    """Return for each layer whether it is a hybrid layer: a transformer block feeds its state space."""
    plain = ["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7
    plain += ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
    kinds = [kind == "hybrid" for kind in config.get("layers_block_type") or plain]
    hybrid_ids = config.get("hybrid_layer_ids")
    if hybrid_ids is not None and hybrid_ids != [i for i, fed in enumerate(kinds) if fed]:
        raise WeftError(
            f"hybrid_layer_ids={hybrid_ids} must be the layers of type hybrid in layers_block_type, in ascending order"
        )
    return kinds


def _build_blocks(config: Config) -> tuple[MemoryBlock, ...]:
    dim, heads = read_required(config, "hidden_size", "num_attention_heads")
    bias, groups = config.get("add_bias_linear", False), config.get("mamba_ngroups", 1)
    mamba = Mamba2(
        int(config.get("mamba_expand", 2) * dim),
        config.get("n_mamba_heads", 8),
        config.get("mamba_d_state", 64),
        groups,
        config.get("mamba_d_conv", 4),
        bias=bias,
        norm=RMSNorm(1e-5),
        norm_groups=groups,
        least_step=config.get("time_step_min", 0.001),
    )
    attention = Attention(
        heads,
        config.get("num_key_value_heads") or heads,
        head := key("attention_head_dim", default=2 * dim // heads)(config),
        read_rope(config) if config.get("use_mem_rope") else None,
        scale=(head / 2) ** -0.5,
        out_dim=dim,
    )
    ffn = GatedMLP(config.get("intermediate_size") or 4 * dim, ACTIVATIONS[config.get("hidden_act", "gelu")], bias)
    norm = RMSNorm(config.get("rms_norm_eps", 1e-5))
    fed, alone = MemoryBlock(mamba, attention, ffn, norm), MemoryBlock(mamba, norm=norm)
    return tuple(fed if hybrid else alone for hybrid in _find_hybrid_layers(config))


@template
def _adapt(
    fetch: Fetch,
    part: str,
    settings: Settings,
    name: str,
    adapter: str = "",
    half: int | None = None,
    block: str = "shared_transformer",
) -> Recipe:
    """Return the weight `name` of the hybrid layer's `block`, which several layers share.
    The layer's low-rank `adapter` is added if stored. `half` 0 (gate) or 1 (up) selects one half of the rows."""
    layers = [i for i, memory in enumerate(settings.block) if memory.attn is not None]
    turn = layers.index(int(fetch.layer))
    # Without tied embeddings transformers does not share blocks either: every layer has one.
    is_separate = fetch.has(f"layers.{{i}}.{block}.self_attn.q_proj.weight")
    first = "{i}" if is_separate else layers[turn % settings.multipliers["blocks"]]
    at = f"layers.{first}.{block}"
    weight, low = fetch(f"{at}.{name}.{part}"), f"{at}.{adapter}.{turn}"
    if adapter and part == "weight" and fetch.has(f"{low}.0.weight"):
        weight = Add((weight, MatMul(fetch(f"{low}.1.weight"), fetch(f"{low}.0.weight"))))
    if half is None:
        return weight
    rows = settings.block[layers[0]].ffn.hidden
    return Slice(weight, 0, half * rows, (half + 1) * rows)


@template
def _choose_by_layer(
    fetch: Fetch, part: str, settings: Settings, plain: str | Template, hybrid: str | Template
) -> Recipe:
    """Return `hybrid` in hybrid layers and `plain` in all other layers; each is a name or a template."""
    entry = hybrid if settings.block[int(fetch.layer)].attn is not None else plain
    return fetch(f"{entry}.{part}") if isinstance(entry, str) else entry(fetch, part, settings)


def _fetch_name(name: str) -> Template:
    return lambda fetch, part, settings: fetch(name)


def _count_channels(settings: Settings) -> int:
    mamba = settings.block[0].mamba
    return int(mamba.inner + (2 * mamba.groups * mamba.state if isinstance(mamba, Mamba2) else 0))


def _map_state_names() -> Names:
    """Return the names of the state spaces' parameters, whose modules are nested deeper in hybrid layers."""
    names: Names = {}
    for name, alone in map_mamba2_names("layers.{i}.mamba").items():
        fed = map_mamba2_names("layers.{i}.mamba_decoder.mamba")[name]
        if isinstance(alone, str) and isinstance(fed, str) and name.endswith((".bias", ".a_log", ".d")):
            pair: tuple[Any, Any] = _fetch_name(alone), _fetch_name(fed)
        else:
            pair = alone, fed
        names[name.replace(".attn.", ".mamba.")] = _choose_by_layer(*pair)
    convolutions: list[Callable[..., Recipe]] = [
        reshape_conv(f"layers.{{i}}.{at}.conv1d.weight", _count_channels) for at in ("mamba", "mamba_decoder.mamba")
    ]
    return {**names, "layers.{i}.mamba.conv.weight": _choose_by_layer(*convolutions)}


ZAMBA2 = LLAMA.derive(
    "zamba2",
    inert=(
        *("adapter_rank", "attention_hidden_size", "num_query_groups", "mamba_headdim", "num_hidden_layers"),
        "use_shared_attention_adapter",
    ),
    names={
        **_map_state_names(),
        "layers.{i}.norm": _choose_by_layer("layers.{i}.input_layernorm", "layers.{i}.mamba_decoder.input_layernorm"),
        "layers.{i}.link": "layers.{i}.linear",
        "layers.{i}.attn_norm": _adapt("input_layernorm"),
        "layers.{i}.ffn_norm": _adapt("pre_ff_layernorm"),
        **{
            f"layers.{{i}}.attn.{x}": _adapt(f"self_attn.{x}_proj", f"self_attn.linear_{x}_adapter_list") for x in "qkv"
        },
        "layers.{i}.attn.o": _adapt("self_attn.o_proj"),
        **{
            f"layers.{{i}}.ffn.{x}": _adapt("feed_forward.gate_up_proj", "feed_forward.gate_up_proj_adapter_list", i)
            for i, x in enumerate(("gate", "up"))
        },
        "layers.{i}.ffn.down": _adapt("feed_forward.down_proj"),
        "final_norm": "final_layernorm",
    },
    idle=("*_adapter_list.*",),  # the adapters of other layers in a block's copy
    layers=lambda c: len(_find_hybrid_layers(c)),
    **set_all(None, "heads", "kv_heads", "head_dim", "ffn", "rope"),
    activation="gelu",
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    block=_build_blocks,
    multipliers=lambda c: {"blocks": c.get("num_mem_blocks", 1)},
)


# -- Zamba: a single block, and Mamba states in heads

_MOST_HEADS = 8  # the number of heads with names


def _find_zamba_hybrid_layers(config: Config) -> list[bool]:
    period, offset = config.get("attn_layer_period", 6), config.get("attn_layer_offset", 4)
    plain = ["mamba", "mamba", "hybrid"]
    plain += ["hybrid" if i % period == offset else "mamba" for i in range(key("num_hidden_layers")(config) - 3)]
    return [kind == "hybrid" for kind in config.get("layers_block_type") or config.get("layer_types") or plain]


def _build_zamba_blocks(config: Config) -> tuple[MemoryBlock, ...]:
    dim, heads = read_required(config, "hidden_size", "num_attention_heads")
    states, rank = config.get("n_mamba_heads", 2), config.get("mamba_dt_rank", "auto")
    if states > _MOST_HEADS:
        raise WeftError(f"n_mamba_heads={states} exceeds the limit {_MOST_HEADS}")
    if config.get("attention_hidden_size") not in (None, 2 * dim):
        raise WeftError(f"attention_hidden_size={config['attention_hidden_size']} must be 2 · hidden_size = {2 * dim}")
    mamba = Mamba(
        config.get("mamba_expand", 2) * dim,
        config.get("mamba_d_state", 16),
        config.get("mamba_d_conv", 4),
        None if rank == "auto" else rank,
        config.get("mamba_conv_bias", True),
        config.get("mamba_proj_bias", False),
        heads=states,
    )
    d = key("attention_head_dim", "head_dim", default=2 * dim // heads)(config)
    groups = config.get("num_key_value_heads", 16)
    attention = Attention(heads, groups, d, scale=(d / 2) ** -0.5, out_dim=dim)
    ffn = GatedMLP(key("intermediate_size")(config), ACTIVATIONS[config.get("hidden_act", "gelu")])
    norm = RMSNorm(config.get("rms_norm_eps", 1e-5))
    fed, alone = MemoryBlock(mamba, attention, ffn, norm), MemoryBlock(mamba, norm=norm)
    return tuple(fed if hybrid else alone for hybrid in _find_zamba_hybrid_layers(config))


def _fetch_state(name: str) -> Template:
    """Return a template for tensor `name` of a state space, whose module is nested deeper in hybrid layers."""
    return _choose_by_layer(f"layers.{{i}}.mamba.{name}", f"layers.{{i}}.mamba_decoder.mamba.{name}")


def _split_alternating_rows(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the input projection with all rows of x, then all rows of the gate; the checkpoint alternates them."""
    stored, rows = _fetch_state("in_proj")(fetch, part, settings), 2 * settings.block[0].mamba.inner
    return Concat((Slice(stored, 0, 0, rows, 2), Slice(stored, 0, 1, rows, 2)))


@template
def _slice_head(fetch: Fetch, part: str, settings: Settings, name: str, head: int) -> Recipe:
    """Return the part of head `head` in tensor `name` [heads, ...], in the shape that `Mamba` needs."""
    mamba = settings.block[0].mamba
    at = "mamba_decoder.mamba" if settings.block[int(fetch.layer)].attn is not None else "mamba"
    part_of_head, channels = Slice(fetch(f"layers.{{i}}.{at}.{name}"), 0, head, head + 1), mamba.inner // mamba.heads
    rank = mamba.dt_rank or -(-settings.dim // 16)
    shapes: dict[str, tuple[int, ...]] = {"x": (rank + 2 * mamba.state, channels), "A": (channels, mamba.state)}
    shapes["dt"] = (channels, rank) if "weight" in name else (channels,)
    return Reshape(part_of_head, shapes.get(name.partition("_")[0], (channels,)))


def _map_head_names(prefix: str, head: int) -> Names:
    return {
        f"{prefix}.x.weight": _slice_head("x_proj_weight", head),
        f"{prefix}.dt.weight": _slice_head("dt_proj_weight", head),
        f"{prefix}.dt.bias": _slice_head("dt_proj_bias", head),
        f"{prefix}.a_log": _slice_head("A_log", head),
        f"{prefix}.d": _slice_head("D", head),
    }


ZAMBA = ZAMBA2.derive(
    "zamba",
    names={
        **{name: None for name in ZAMBA2.names if name.startswith("layers.{i}.mamba.") and ".conv." not in name},
        "layers.{i}.mamba.in": _split_alternating_rows,
        "layers.{i}.mamba.out": _fetch_state("out_proj"),
        **_map_head_names("layers.{i}.mamba", 0),
        **{
            name: template
            for head in range(_MOST_HEADS)
            for name, template in _map_head_names(f"layers.{{i}}.mamba.head{head}", head).items()
        },
        "layers.{i}.attn_norm": _adapt("input_layernorm", block="shared_transf"),
        "layers.{i}.ffn_norm": _adapt("pre_ff_layernorm", block="shared_transf"),
        **{f"layers.{{i}}.attn.{x}": _adapt(f"self_attn.{x}_proj", block="shared_transf") for x in "qkvo"},
        **{
            f"layers.{{i}}.ffn.{x}": _adapt(f"feed_forward.{x}_proj", block="shared_transf")
            for x in ("gate", "up", "down")
        },
    },
    refuse={"hidden_mamba_act": ("silu", "swish", None)},
    layers=lambda c: len(_find_zamba_hybrid_layers(c)),
    block=_build_zamba_blocks,
)
