"""Zamba2: Mamba-2 layers, some of them fed by a few transformer blocks that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Add, Recipe, Slice
from weft.ir.recipes.matrices import MatMul

from ....dsl import Attention, GatedMLP, Mamba2, MemoryBlock, RMSNorm
from ...tables.family import Config, Fetch, Names, Template, key, required
from ...tables.rope_config import rope_of
from ...tables.settings import ACTIVATIONS, Settings
from ..dense.llama import LLAMA
from .mamba import mamba2_names, taps


def _kinds(config: Config) -> list[bool]:
    """Return for each layer if a transformer block feeds it."""
    plain = ["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7
    plain += ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
    kinds = [kind == "hybrid" for kind in config.get("layers_block_type") or plain]
    given = config.get("hybrid_layer_ids")
    if given is not None and given != [i for i, fed in enumerate(kinds) if fed]:
        raise WeftError(f"hybrid_layer_ids={given} is not supported: layers_block_type says others, or another order")
    return kinds


def _blocks(config: Config) -> tuple[MemoryBlock, ...]:
    dim, heads = required(config, "hidden_size", "num_attention_heads")
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
        rope_of(config) if config.get("use_mem_rope") else None,
        scale=(head / 2) ** -0.5,
        out_dim=dim,
    )
    ffn = GatedMLP(config.get("intermediate_size") or 4 * dim, ACTIVATIONS[config.get("hidden_act", "gelu")], bias)
    norm = RMSNorm(config.get("rms_norm_eps", 1e-5))
    fed, alone = MemoryBlock(mamba, attention, ffn, norm), MemoryBlock(mamba, norm=norm)
    return tuple(fed if hybrid else alone for hybrid in _kinds(config))


def _fed(settings: Settings) -> list[int]:
    """The layers that a transformer block feeds."""
    return [i for i, block in enumerate(settings.block) if block.attn is not None]


def _shared(name: str, adapter: str = "", half: int | None = None) -> Template:
    """A weight of the block whose turn it is, with the layer's own low-rank `adapter`; `half` of its rows."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        layers = _fed(settings)
        turn = layers.index(int(fetch.layer))
        # Without tied embeddings transformers ties no blocks either: every layer has its own.
        own = fetch.has("layers.{i}.shared_transformer.self_attn.q_proj.weight")
        first = "{i}" if own else layers[turn % settings.multipliers["blocks"]]
        at = f"layers.{first}.shared_transformer"
        found, low = fetch(f"{at}.{name}.{part}"), f"{at}.{adapter}.{turn}"
        if adapter and part == "weight" and fetch.has(f"{low}.0.weight"):
            found = Add((found, MatMul(fetch(f"{low}.1.weight"), fetch(f"{low}.0.weight"))))
        if half is None:
            return found
        rows = settings.block[layers[0]].ffn.hidden
        return Slice(found, 0, half * rows, (half + 1) * rows)

    return template


def _either(alone: str | Template, fed: str | Template) -> Template:
    """Choose the name of a layer without a transformer block, or of one with it."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        found = fed if settings.block[int(fetch.layer)].attn is not None else alone
        return fetch(f"{found}.{part}") if isinstance(found, str) else found(fetch, part, settings)

    return template


def _whole(name: str) -> Template:
    return lambda fetch, part, settings: fetch(name)


def _channels(settings: Settings) -> int:
    mamba = settings.block[0].mamba
    return int(mamba.inner + 2 * mamba.groups * mamba.state)


def _states() -> Names:
    """The names of the state spaces, which stand deeper in the layers that are fed."""
    found: Names = {}
    for name, alone in mamba2_names("layers.{i}.mamba").items():
        fed = mamba2_names("layers.{i}.mamba_decoder.mamba")[name]
        if isinstance(alone, str) and isinstance(fed, str) and name.endswith((".bias", ".a_log", ".d")):
            pair: tuple[Any, Any] = _whole(alone), _whole(fed)
        else:
            pair = alone, fed
        found[name.replace(".attn.", ".mamba.")] = _either(*pair)
    convolutions: list[Callable[..., Recipe]] = [
        taps(f"layers.{{i}}.{at}.conv1d.weight", _channels) for at in ("mamba", "mamba_decoder.mamba")
    ]
    return {**found, "layers.{i}.mamba.conv.weight": _either(*convolutions)}


ZAMBA2 = LLAMA.but(
    "zamba2",
    names={
        **_states(),
        "layers.{i}.norm": _either("layers.{i}.input_layernorm", "layers.{i}.mamba_decoder.input_layernorm"),
        "layers.{i}.link": "layers.{i}.linear",
        "layers.{i}.attn_norm": _shared("input_layernorm"),
        "layers.{i}.ffn_norm": _shared("pre_ff_layernorm"),
        **{
            f"layers.{{i}}.attn.{x}": _shared(f"self_attn.{x}_proj", f"self_attn.linear_{x}_adapter_list")
            for x in "qkv"
        },
        "layers.{i}.attn.o": _shared("self_attn.o_proj"),
        **{
            f"layers.{{i}}.ffn.{x}": _shared("feed_forward.gate_up_proj", "feed_forward.gate_up_proj_adapter_list", i)
            for i, x in enumerate(("gate", "up"))
        },
        "layers.{i}.ffn.down": _shared("feed_forward.down_proj"),
        "final_norm": "final_layernorm",
    },
    idle=("*_adapter_list.*",),  # of a block's copy: those of the other layers
    layers=lambda c: len(_kinds(c)),
    heads=None,
    kv_heads=None,
    head_dim=None,
    ffn=None,
    rope=None,
    activation="gelu",
    eps=key("rms_norm_eps", default=1e-5),
    tie=key("tie_word_embeddings", default=True),
    block=_blocks,
    multipliers=lambda c: {"blocks": c.get("num_mem_blocks", 1)},
)
