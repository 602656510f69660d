"""Families whose feed-forwards are mixtures of experts: Mixtral, Qwen MoE, OLMoE, Granite MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Concat, Recipe, Reshape

from ....dsl import GatedMLP, MoE, Router
from ...tables import gguf
from ...tables.family import Config, Fetch, Loader, Names, Template, key, mask_layers, rule, template
from ...tables.rope_config import rope_with
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import find_experts, name_gated_mlp, slice_expert_half
from ..dense.llama import GRANITE, GRANITE_GGUF, LLAMA, LLAMA_GGUF, MISTRAL, QWEN2, QWEN3, pick_windows


@template
def stack_experts(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return a weight [experts, out, in], stored as one tensor per expert: `name`.weight, where {e} is its number."""
    moe = find_experts(settings)
    rows = (moe.latent or settings.dim) if part == "down" else moe.hidden
    weights = (fetch(f"{name.replace('{e}', str(e))}.weight") for e in range(moe.experts))
    return Concat(tuple(Reshape(expert, (1, rows, -1)) for expert in weights))


def map_expert_names(prefix: str, gate: str, up: str, down: str, at: str = "layers.{i}.ffn") -> Names:
    """Return the names of the experts' weights under `at`, the path of the mixture in the model.

    Below `prefix`, checkpoints have tensors `gate`, `up` and `down` per expert, or gate_up_proj and down_proj for all.
    """
    above, below = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"

    def either(fused: Template, name: str) -> Template:
        separate = stack_experts(f"{prefix}.{{e}}.{name}")
        return lambda fetch, part, settings: (fused if fetch.has(above) else separate)(fetch, part, settings)

    return {
        f"{at}.experts.gate": either(slice_expert_half(above, 0), gate),
        f"{at}.experts.up": either(slice_expert_half(above, 1), up),
        f"{at}.experts.down": either(lambda fetch, part, settings: fetch(below), down),
    }


def read_activation(config: Config) -> str:
    """Return weft's name of the config's activation `hidden_act`; raise WeftError for an unknown one."""
    name = config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise WeftError(f"hidden_act={name!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@rule
def _make_moe_rule(config: Config, /, *hidden: str, renormalize: bool | None = None, **options: Any) -> MoE:
    """Return experts whose width is the first present config key of `hidden`; `options` are arguments of `MoE`.
    `renormalize` None means the key norm_topk_prob, by default False."""
    count, k = key("num_experts", "num_local_experts")(config), key("num_experts_per_tok")(config)
    norm = config.get("norm_topk_prob", False) if renormalize is None else renormalize
    return MoE(count, key(*hidden)(config), k, read_activation(config), **options, router=Router(renormalize=norm))


@rule
def find_stepped_layers(config: Config, *dense: int) -> list[bool]:
    """Return for each layer whether it has experts: every decoder_sparse_step-th layer has, except those listed in
    mlp_only_layers (by default `dense`)."""
    step, stated = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
    excluded = dense if stated is None else stated
    return [i not in excluded and (i + 1) % step == 0 for i in range(key("num_hidden_layers")(config))]


def _build_shared_moe(config: Config) -> MoE:
    shared = GatedMLP(key("shared_expert_intermediate_size")(config), read_activation(config))
    return _make_moe_rule("moe_intermediate_size", shared=shared, shared_gate=True)(config)


def _read_qwen2_moe_windows(config: Config) -> Any:
    if not config.get("use_sliding_window"):
        return None
    layers, last = key("num_hidden_layers")(config), config.get("max_window_layers", 28)
    types = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(layers)]
    return pick_windows(config, config.get("sliding_window", 4096), types)


MIXTRAL = MISTRAL.derive(
    "mixtral",
    names={
        "layers.{i}.ffn.router": "layers.{i}.block_sparse_moe.gate",
        **map_expert_names("layers.{i}.block_sparse_moe.experts", "w1", "w3", "w2"),
    },
    aliases={"block_sparse_moe": "mlp"},
    defaults={"rms_norm_eps": 1e-5},
    rope=rope_with(rope_theta=1e6),
    window=lambda config: config.get("sliding_window"),
    moe=_make_moe_rule("intermediate_size", renormalize=True),
    transformers="MixtralForCausalLM",
    gguf=LLAMA_GGUF,
)
SPARSE = {
    "layers.{i}.ffn.router": "layers.{i}.mlp.gate",
    **map_expert_names("layers.{i}.mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
QWEN2_MOE = QWEN2.derive(
    "qwen2_moe",
    names={
        **SPARSE,
        "layers.{i}.ffn.shared_gate": "layers.{i}.mlp.shared_expert_gate",
        **name_gated_mlp("layers.{i}.ffn.shared", "layers.{i}.mlp.shared_expert"),
    },
    qkv_bias=key("qkv_bias", default=True),
    window=_read_qwen2_moe_windows,
    moe=mask_layers(_build_shared_moe, find_stepped_layers()),
    transformers="Qwen2MoeForCausalLM",
    gguf=gguf.SPARSE_BASE.derive(
        "qwen2moe",
        moe=gguf.build_experts(Router(renormalize=False), shared_gate=True),
        loader=Loader(biases="q", experts="required"),
    ),
)
QWEN3_MOE = QWEN3.derive(
    "qwen3_moe",
    inert=("shared_expert_intermediate_size", "max_window_layers", "layer_types"),
    names=SPARSE,
    head_dim=key("head_dim", default=None),
    window=lambda config: config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,
    moe=mask_layers(_make_moe_rule("moe_intermediate_size"), find_stepped_layers()),
    transformers="Qwen3MoeForCausalLM",
    gguf=gguf.SPARSE_BASE.derive(
        "qwen3moe",
        "qwen3vlmoe",
        moe=gguf.build_experts(Router()),
        loader=Loader(experts="required", free_heads=True, qk_norm=True),
    ),
)
OLMOE = LLAMA.derive(
    "olmoe",
    names=SPARSE,
    refuse={"clip_qkv": (None,)},
    defaults={"rms_norm_eps": 1e-5},
    qk_norm="full",
    moe=_make_moe_rule("intermediate_size"),
    transformers="OlmoeForCausalLM",
    gguf=gguf.SPARSE_BASE.derive(
        "olmoe",
        from_keys={"qk_norm": lambda keys: "full"},
        moe=gguf.build_experts(Router(renormalize=False)),
        loader=Loader(experts="required", qk_norm=True),
    ),
)
GRANITE_MOE = GRANITE.derive(
    "granitemoe",
    names={
        "layers.{i}.ffn.router": "layers.{i}.block_sparse_moe.router.layer",
        "layers.{i}.ffn.experts.gate": slice_expert_half("layers.{i}.block_sparse_moe.input_linear.weight", 0),
        "layers.{i}.ffn.experts.up": slice_expert_half("layers.{i}.block_sparse_moe.input_linear.weight", 1),
        "layers.{i}.ffn.experts.down": "layers.{i}.block_sparse_moe.output_linear.weight",
    },
    aliases={
        "router.layer": "router",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    },
    moe=_make_moe_rule("intermediate_size", renormalize=True),
    transformers="GraniteMoeForCausalLM",
    gguf=GRANITE_GGUF.derive("granitemoe", loader=Loader(optional_biases="qof", experts="required", free_heads=True)),
)


def build_granite_experts(config: Config) -> MoE | None:
    """Return the experts with the shared feed-forward; None for dense models, which have only that feed-forward."""
    if not config.get("num_local_experts", 8):
        return None
    moe: MoE = GRANITE_MOE.settings["moe"](config)
    return replace(moe, shared=GatedMLP(key("shared_intermediate_size")(config), read_activation(config)))
