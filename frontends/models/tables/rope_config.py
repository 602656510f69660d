"""RoPE settings in configs: read and write Hugging Face's rope_parameters (or older keys) and llama.cpp's keys.

`_NAMES` and `_GGUF` map fields of `RopeScaling` to the keys of the two formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes.frequencies import RopeScaling

from ...dsl import RoPE
from .family import Rule, rule

_KINDS = {"default": "none"} | {kind: kind for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")}
_NAMES = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "low_freq": "low_freq_factor",
    "high_freq": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "factors": "short_factor",
    "long_factors": "long_factor",
}
_NEEDED = ("factor", "low_freq", "high_freq", "factors", "long_factors")  # fields without a default
_TEMPERED = ("yarn", "longrope")  # scale cos and sin by an amplitude; their factor defaults to context / original

FREQUENCIES = "rope_freqs.weight"  # tensors of GGUF files: divisors of all frequencies, and LongRoPE's
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_GGUF = {
    "factor": "rope.scaling.factor",
    "original": "rope.scaling.original_context_length",
    "factors": SHORT,
    "long_factors": LONG,
}
_ATTENTION = "rope.scaling.attn_factor"
# Never written: llama.cpp ignores them in most architectures.
_BETAS = {f"beta_{x}": f"rope.scaling.yarn_beta_{x}" for x in ("fast", "slow")}


# -- Hugging Face


def read_rope(config: Mapping[str, Any], partial: bool = False) -> RoPE:
    """Return the `RoPE` that `config` states, of any type that transformers supports for text models.

    `partial`: the family applies partial_rotary_factor; transformers ignores that key in all other families.
    The types dynamic and longrope get the frequencies for sequences up to the original context; the pass rope-length
    changes them for longer ones.

    Raises:
        WeftError: if the type is unknown or one of its settings is missing, or if RoPE is scaled and
            partial_rotary_factor is not 1, but `partial` is false.
    """
    rope = find_rope(config)
    kind = _read_kind(rope)
    fraction = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if fraction != 1 and kind != "default" and not partial:
        raise WeftError(f"partial_rotary_factor={fraction} is not supported with rope_scaling of type {kind}")
    if kind not in _KINDS:
        raise WeftError(f"rope_type={kind!r} is unknown; known are {', '.join(_KINDS)}")
    plain = RopeScaling(scaling=_KINDS[kind])
    # Null and 0 count as missing; `truncate` may be false.
    settings = {name: rope[key] for name, key in _NAMES.items() if rope.get(key) or rope.get(key) is False}
    if "original" in plain.used_settings:
        settings["original"] = config["max_position_embeddings"] if kind == "dynamic" else _read_original(config, rope)
    if kind == "llama3" and settings.get("high_freq", 4.0) <= settings.get("low_freq", 1.0):
        low, high = settings.get("low_freq", 1.0), settings.get("high_freq", 4.0)
        raise WeftError(f"high_freq_factor={high} must exceed low_freq_factor={low}")
    if kind in _TEMPERED and "factor" not in settings:
        settings["factor"] = config["max_position_embeddings"] / settings["original"]
    for name in plain.used_settings:
        if name in _NEEDED and name not in settings:
            raise WeftError(f"rope_type={kind!r} needs the config key {_NAMES[name]!r}")
    scaling = replace(
        plain,
        **{name: _cast_like(getattr(plain, name), settings[name]) for name in plain.used_settings if name in settings},
    )
    amplitude = rope.get("attention_factor") if kind in _TEMPERED else 1.0
    if amplitude is None:
        mscales = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
        amplitude = replace(scaling, factor=float(settings["factor"])).attention_factor(*mscales)
    return RoPE(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        fraction=fraction if partial else 1.0,
        amplitude=float(amplitude),
        **scaling.settings,
    )


@rule
def rope_with(config: Mapping[str, Any], /, *, interleaved: bool = False, **defaults: Any) -> RoPE:
    """Return `read_rope` of `config` with `defaults` for keys that are missing or null.
    `interleaved`: rotated pairs are adjacent features. With a default for partial_rotary_factor, that key is applied. A
    default for rope_parameters applies only if the config has neither rope_parameters nor rope_scaling."""
    partial = "partial_rotary_factor" in defaults
    stated = {name: value for name, value in config.items() if value is not None}
    if stated.get("rope_scaling"):
        stated.setdefault("rope_parameters", stated["rope_scaling"])
    return replace(read_rope({**defaults, **stated}, partial), interleaved=interleaved)


@rule
def build_ropes(
    config: Mapping[str, Any],
    /,
    local: Rule,
    partial: bool = False,
    bases: tuple[Rule, Rule] | None = None,
    near_scaled: bool = False,
    **defaults: Any,
) -> tuple[RoPE, ...]:
    """Return the RoPE of each layer, for models whose local and global layers have different RoPE.

    A layer is local if `local(config)` has a window for it, not None. If rope_parameters has entries for the types of
    global and local layers, each type uses its entry; else the config's RoPE scaling applies to global layers, and to
    local ones if `near_scaled` and it is in rope_scaling. `bases`: rules for the base of global and of local layers; by
    default the base is rope_theta. `partial` as in `read_rope`; `defaults` are values for missing config keys.
    """
    parameters, local_config = config.get("rope_parameters") or {}, {**defaults, **config}
    global_config = dict(local_config)
    if isinstance(parameters, Mapping) and {"full_attention", "sliding_attention"} & set(parameters):
        global_config["rope_parameters"], local_config["rope_parameters"] = (
            parameters.get(f"{k}_attention") for k in ("full", "sliding")
        )
    else:
        local_config["rope_parameters"] = None
    if not near_scaled:
        local_config["rope_scaling"] = None
    if bases is not None:
        global_config["rope_theta"], local_config["rope_theta"] = (base(config) for base in bases)
    ropes = read_rope(global_config, partial), read_rope(local_config, partial)
    return tuple(ropes[window is not None] for window in local(config))


def write_rope(rope: RoPE, head: int, partial: bool) -> dict[str, Any]:
    """Return the rope_parameters that `read_rope` reads as `rope`; `head` is the width of a head. They state
    partial_rotary_factor if it is not 1, and with `partial` always, as the family's default is not 1."""
    fraction = (rope.dim or head) / head
    kind = next((kind for kind, scaling in _KINDS.items() if scaling == rope.scaling), rope.scaling)
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.theta}
    if partial or fraction != 1:
        parameters["partial_rotary_factor"] = fraction
    if rope.scaling in _TEMPERED:
        parameters["attention_factor"] = rope.amplitude
    for name in rope.used_settings:
        if name in _NAMES and (name, kind) != ("original", "dynamic"):
            value = getattr(rope, name)
            parameters[_NAMES[name]] = list(value) if isinstance(value, tuple) else value
    return parameters


def find_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return rope_parameters of `config`, or else rope_scaling; {} without either. Raise WeftError if it is not a
    mapping, or has settings per layer type."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise WeftError(f"rope_parameters={rope!r} must be a mapping")
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise WeftError("rope_parameters that differ by layer type are not supported for this family")
    return rope


def read_context(config: Mapping[str, Any]) -> int | None:
    """Return max_position_embeddings (None if missing); with LongRoPE, the context before its extension."""
    context = config.get("max_position_embeddings")
    settings = find_rope(config)
    if _read_kind(settings) == "longrope":
        return _read_original(config, settings)
    return None if context is None else int(context)


def _cast_like(default: Any, value: Any) -> Any:
    return tuple(map(float, value)) if default == () else type(default)(value)


def _read_kind(settings: Mapping[str, Any]) -> str:
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    kind = "default" if kind == "mrope" else kind  # of Qwen2-VL, whose three positions are equal for text tokens
    is_longrope = kind == "su" or (kind == "yarn" and "short_factor" in settings)  # its first names
    return "longrope" if is_longrope else kind


def _read_original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    for name in ("original_max_position_embeddings", "max_position_embeddings"):
        for mapping in (rope, config):
            if mapping.get(name):
                return int(mapping[name])
    raise WeftError("RoPE scaling needs the config key 'original_max_position_embeddings'")


# -- GGUF


def read_gguf_rope(config: Mapping[str, Any]) -> RoPE:
    """Return the `RoPE` that `config` states: llama.cpp's metadata keys without the architecture's prefix.

    LongRoPE's factors are tensors in the file; `config` has their values under the names of these tensors.

    Raises:
        WeftError: if rope.scaling.type is unknown.
    """
    kind = "none" if config.get(_GGUF["factor"], 1.0) in (0, 1) else config.get("rope.scaling.type", "none")
    if SHORT in config and LONG in config:
        kind = "longrope"
    elif kind not in ("none", "linear", "yarn"):
        raise WeftError(f"rope.scaling.type={kind!r} is not supported; known are none, linear, yarn")
    plain = RopeScaling(scaling=kind)
    settings = {name: config[key] for name, key in _GGUF.items() if name in plain.used_settings and config.get(key)}
    if "original" in plain.used_settings:
        settings["original"] = int(settings.get("original") or config.get("context_length") or 0)
    settings |= {
        name: float(config[key]) for name, key in _BETAS.items() if name in plain.used_settings and key in config
    }
    scaling = replace(plain, **settings)
    amplitude = config.get(_ATTENTION, 1.0) * scaling.attention_factor() if kind in _TEMPERED else 1.0
    if kind == "yarn":
        amplitude = config.get("rope.scaling.yarn_attn_factor", amplitude)
    theta, dim = config.get("rope.freq_base", 10_000.0), config.get("rope.dimension_count")
    return RoPE(theta, dim, amplitude=amplitude, **scaling.settings)


def write_gguf_rope(rope: RoPE) -> dict[str, Any]:
    """Return the keys that `read_gguf_rope` reads as `rope`, without rope.dimension_count and scalings GGUF lacks."""
    settings: dict[str, Any] = {"rope.freq_base": rope.theta}
    if rope.scaling in ("linear", "yarn"):
        settings["rope.scaling.type"] = rope.scaling
    if rope.scaling in _TEMPERED:
        settings[_ATTENTION] = rope.amplitude / rope.attention_factor()
    if rope.scaling in ("linear", *_TEMPERED):
        settings |= {_GGUF[name]: getattr(rope, name) for name in rope.used_settings if name in _GGUF}
    return settings
