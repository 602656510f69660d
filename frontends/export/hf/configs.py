"""Configs of Hugging Face families, proposed for the settings of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError

from ...models.config_keys import RecordingConfig, normalize_config
from ...models.families import FAMILIES, Family, Settings
from ...models.tables.rope_config import write_rope
from ...models.tables.settings import ACTIVATIONS

# The first family that expresses a graph is chosen: these in this order, the plainest first, then others.
_FIRST = (
    *("llama", "mistral", "qwen3", "qwen2", "gpt2", "gpt_neox", "phi", "gemma", "gemma2", "gemma3_text", "olmo2"),
    *("olmo", "granite", "smollm3", "starcoder2", "stablelm", "cohere", "gptj", "gpt_neo", "gpt_bigcode", "phi3"),
    *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe"),
)
# Reversed: of several names of an activation, the first is written last and stays.
_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())} | {"gelu_tanh": "gelu_pytorch_tanh"}
_EXPERT_COUNT = ("num_experts", "num_local_experts")  # synonyms: some classes know one only
_TWICE = ("original_max_position_embeddings",)  # also in rope_parameters, which Phi-3 overrides
_MANY = 131_072  # positions, if the model does not state them


def list_families() -> list[str]:
    """Return the families that transformers loads, the plainest first."""
    return [name for name in dict.fromkeys((*_FIRST, *FAMILIES)) if FAMILIES[name].transformers]


def propose_config(name: str, s: Settings) -> dict[str, Any]:
    """Return a config of the family `name` for the settings `s`, with the keys that the family reads.

    Raises:
        WeftError: if the activation of `s` has no name in configs.
    """
    family = FAMILIES[name]
    activation = _NAMES.get(ACTIVATIONS.get(s.activation, s.activation))
    if activation is None:
        raise WeftError(f"activation {s.activation!r} has no name in Hugging Face configs")
    positions = s.learned_positions or s.context or _MANY
    s = replace(s, activation=activation, context=positions, learned_positions=positions)
    candidates = {**family.to_config(s), **_list_shared_keys(s)}
    settings = _try_read(family, candidates)
    # partial unless the config states it
    if settings is not None and _list_rotated_widths(settings) != _list_rotated_widths(s):
        candidates |= _list_rope_keys(s, partial=True)
    config = {key: value for key, value in candidates.items() if key in _TWICE or _is_read(family, candidates, key)}
    return {"architectures": [family.transformers], "model_type": name, **config}


def _list_rotated_widths(s: Settings) -> set[int]:
    return {r.dim or int(r.fraction * s.head_size) for r in s.expand("rope") if r is not None}


def _is_read(family: Family, config: Mapping[str, Any], key: str) -> bool:
    """Return whether the family's table reads `key`: whether settings change if it is absent, null or invalid. If `key`
    is in `_EXPERT_COUNT`, the other keys there are left out of `config` first."""
    rest = {k: v for k, v in config.items() if k not in (_EXPERT_COUNT if key in _EXPERT_COUNT else (key,))}
    recorded = RecordingConfig(normalize_config({**rest, key: config[key]}, family.model_types[0]))
    usual = _try_read(family, recorded)
    if key in recorded and key not in recorded.read:  # true for most keys: this saves three readings
        return False
    return any(_try_read(family, variant) != usual for variant in (rest, {**rest, key: object()}, {**rest, key: None}))


def _try_read(family: Family, config: Mapping[str, Any]) -> Settings | None:
    try:
        return family.read(config, frozenset(), "config.json")
    except WeftError:
        return None


def _list_shared_keys(s: Settings) -> dict[str, Any]:
    """Return config keys of several families, with values for `s`, that `Family.to_config` does not derive."""
    return {
        "multi_query": s.groups == 1,
        **dict.fromkeys(("intermediate_size", "n_inner"), s.ffn),
        "hidden_activation": s.activation,
        "max_position_embeddings": s.context,
        "use_parallel_residual": s.find_first("arrangement").startswith("parallel"),
        **dict.fromkeys(("qk_layernorm", "use_qk_norm"), s.qk_norm != "none"),
        "attn_logit_softcapping": s.softcap,
        "final_logit_softcapping": s.logit_softcap,
        **_list_scale_keys(s),
        **_list_window_keys(s),
        **_list_rope_keys(s, partial=False),
        **_list_expert_keys(s),
    }


def _list_scale_keys(s: Settings) -> dict[str, Any]:
    default_scale = s.head_size**-0.5
    scales = [default_scale if scale is None else scale for scale in s.expand("scale")]
    by_layer = s.layers > 1 and abs(scales[0] / scales[1] - 2) < 1e-6
    return {
        "attention_multiplier": scales[0],
        "query_pre_attn_scalar": _round_if_close(scales[0] ** -2) if scales[0] > 0 else None,
        "scale_attn_weights": abs(scales[0] - default_scale) < 1e-6 * default_scale,
        "scale_attn_by_inverse_layer_idx": by_layer,
    }


def _round_if_close(number: float) -> float:
    return round(number) if abs(number - round(number)) < 1e-6 * number else number


def _list_window_keys(s: Settings) -> dict[str, Any]:
    windows = s.expand("window")
    size = next((w for w in windows if w is not None), None)
    return {
        "sliding_window": size,
        "use_sliding_window": size is not None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "window_size": size,
        "attention_types": [[["global" if w is None else "local" for w in windows], 1]],
    }


def _list_rope_keys(s: Settings, partial: bool) -> dict[str, Any]:
    ropes, windows = s.expand("rope"), s.expand("window")
    present = [rope for rope in ropes if rope is not None]
    if not present:
        return {"no_rope_layers": [0] * s.layers}
    by_kind = {
        kind: next((r for r, w in zip(ropes, windows, strict=True) if r is not None and (w is None) == full), None)
        for kind, full in (("full_attention", True), ("sliding_attention", False))
    }
    differ = all(by_kind.values()) and by_kind["full_attention"] != by_kind["sliding_attention"]
    by_layer_kind = {kind: write_rope(rope, s.head_size, partial) for kind, rope in by_kind.items() if rope is not None}
    longrope = {_TWICE[0]: present[0].original} if present[0].scaling == "longrope" else {}
    return {
        **longrope,
        "rope_parameters": by_layer_kind if differ else write_rope(present[0], s.head_size, partial),
        "rotary_dim": present[0].dim or s.head_size,
        "no_rope_layers": [int(rope is not None) for rope in ropes],
    }


def _list_expert_keys(s: Settings) -> dict[str, Any]:
    if s.moe is None:
        return {}
    moe = s.find_first("moe")
    return {
        **dict.fromkeys(_EXPERT_COUNT, moe.experts),
        "num_experts_per_tok": moe.k,
        "mlp_only_layers": [i for i, layer in enumerate(s.expand("moe")) if layer is None],
        "norm_topk_prob": moe.router.renormalize,
        "moe_intermediate_size": moe.hidden,
        "intermediate_size": s.ffn or moe.hidden,
        "shared_expert_intermediate_size": moe.shared.hidden if moe.shared is not None else None,
    }
