"""Configs of Hugging Face families, proposed from what a graph says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError

from ...models.config_keys import Recorded, normalized
from ...models.families import FAMILIES, Family, Settings
from ...models.tables.rope_config import rope_parameters
from ...models.tables.settings import ACTIVATIONS

# Of all families that express a graph the first is proposed: these in this order, the plainest first, then others.
_FIRST = (
    *("llama", "mistral", "qwen3", "qwen2", "gpt2", "gpt_neox", "phi", "gemma", "gemma2", "gemma3_text", "olmo2"),
    *("olmo", "granite", "smollm3", "starcoder2", "stablelm", "cohere", "gptj", "gpt_neo", "gpt_bigcode", "phi3"),
    *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe"),
)
# Reversed: of several names of one activation the first is written last and stays.
_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())} | {"gelu_tanh": "gelu_pytorch_tanh"}
_SYNONYMS = {
    key: keys for keys in (("num_experts", "num_local_experts"),) for key in keys
}  # some classes know one only
_TWICE = ("original_max_position_embeddings",)  # also in rope_parameters, which Phi-3 overrides
_MANY = 131_072  # positions, where the model does not say


def exported() -> list[str]:
    """Return the families that transformers loads, the plainest first."""
    return [name for name in dict.fromkeys((*_FIRST, *FAMILIES)) if FAMILIES[name].transformers]


def propose(name: str, s: Settings) -> dict[str, Any]:
    """The config of the family `name` that says what `s` does, as far as the family asks for it.

    Raises:
        WeftError: if something in `s` is in no config.
    """
    family = FAMILIES[name]
    activation = _NAMES.get(ACTIVATIONS.get(s.activation, s.activation))
    if activation is None:
        raise WeftError(f"no config has a name for the activation {s.activation}")
    positions = s.learned_positions or s.context or _MANY
    s = replace(s, activation=activation, context=positions, learned_positions=positions)
    said = {**family.says(s), **_said(s, partial=False)}
    read = _outcome(family, said)
    if read is not None and _rotated(read) != _rotated(s):  # its heads rotate in part unless a config says otherwise
        said |= _ropes(s, partial=True)
    config = {key: value for key, value in said.items() if key in _TWICE or _asked(family, said, key)}
    return {"architectures": [family.transformers], "model_type": name, **config}


def _rotated(s: Settings) -> set[int]:
    """Return how many numbers of a head the RoPE of some layer rotates."""
    return {r.dim or int(r.fraction * s.head_size) for r in s.each("rope") if r is not None}


def _asked(family: Family, config: Mapping[str, Any], key: str) -> bool:
    """Return whether the family's table reads `key`, or would if no other key said the same.

    Without the key, or with nonsense as its value, the settings then differ.
    """
    rest = {k: v for k, v in config.items() if k not in _SYNONYMS.get(key, (key,))}
    recorded = Recorded(normalized({**rest, key: config[key]}, family.model_types[0]))
    usual = _outcome(family, recorded)
    if key in recorded and key not in recorded.read:  # as most keys are: three readings less
        return False
    return any(_outcome(family, other) != usual for other in (rest, {**rest, key: object()}, {**rest, key: None}))


def _outcome(family: Family, config: Mapping[str, Any]) -> Settings | None:
    try:
        return family.read(config, frozenset(), "config.json")
    except WeftError:
        return None


def _said(s: Settings, partial: bool) -> dict[str, Any]:
    """The keys of any family that stand for more or less than one setting, with what they say of `s`."""
    return {
        "multi_query": s.groups == 1,
        **_same("intermediate_size n_inner", s.ffn),
        "hidden_activation": s.activation,
        "max_position_embeddings": s.context,
        "use_parallel_residual": s.first("arrangement").startswith("parallel"),
        **_same("qk_layernorm use_qk_norm", s.qk_norm != "none"),
        "attn_logit_softcapping": s.softcap,
        "final_logit_softcapping": s.logit_softcap,
        **_scales(s),
        **_windows(s),
        **_ropes(s, partial),
        **_experts(s),
    }


def _same(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


def _scales(s: Settings) -> dict[str, Any]:
    """The scale of attention scores."""
    plain = s.head_size**-0.5
    scales = [plain if scale is None else scale for scale in s.each("scale")]
    by_layer = s.layers > 1 and abs(scales[0] / scales[1] - 2) < 1e-6
    return {
        "attention_multiplier": scales[0],
        "query_pre_attn_scalar": _whole(scales[0] ** -2) if scales[0] > 0 else None,
        "scale_attn_weights": abs(scales[0] - plain) < 1e-6 * plain,
        "scale_attn_by_inverse_layer_idx": by_layer,
    }


def _whole(number: float) -> float:
    """`number`, or the whole number that it is but for rounding."""
    return round(number) if abs(number - round(number)) < 1e-6 * number else number


def _windows(s: Settings) -> dict[str, Any]:
    """Sliding windows: their size, and in which layers they are."""
    windows = s.each("window")
    size = next((w for w in windows if w is not None), None)
    return {
        "sliding_window": size,
        "use_sliding_window": size is not None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "window_size": size,
        "attention_types": [[["global" if w is None else "local" for w in windows], 1]],
    }


def _ropes(s: Settings, partial: bool) -> dict[str, Any]:
    ropes, windows = s.each("rope"), s.each("window")
    known = [rope for rope in ropes if rope is not None]
    if not known:
        return {"no_rope_layers": [0] * s.layers}
    by_kind = {
        kind: next((r for r, w in zip(ropes, windows, strict=True) if r is not None and (w is None) == full), None)
        for kind, full in (("full_attention", True), ("sliding_attention", False))
    }
    both = all(by_kind.values()) and by_kind["full_attention"] != by_kind["sliding_attention"]
    said = {kind: rope_parameters(rope, s.head_size, partial) for kind, rope in by_kind.items() if rope is not None}
    longrope = {_TWICE[0]: known[0].original} if known[0].scaling == "longrope" else {}
    return {
        **longrope,
        "rope_parameters": said if both else rope_parameters(known[0], s.head_size, partial),
        "rotary_dim": known[0].dim or s.head_size,
        "no_rope_layers": [int(rope is not None) for rope in ropes],
    }


def _experts(s: Settings) -> dict[str, Any]:
    """Mixtures; those of the layers that have one are alike."""
    if s.moe is None:
        return {}
    moe = s.first("moe")
    return {
        **_same("num_experts num_local_experts", moe.experts),
        "num_experts_per_tok": moe.k,
        "mlp_only_layers": [i for i, layer in enumerate(s.each("moe")) if layer is None],
        "norm_topk_prob": moe.renormalize,
        "moe_intermediate_size": moe.hidden,
        "intermediate_size": s.ffn or moe.hidden,
        "shared_expert_intermediate_size": moe.shared.hidden if moe.shared is not None else None,
    }
