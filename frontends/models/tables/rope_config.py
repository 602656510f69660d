"""Rotary settings of Hugging Face configs: rope_parameters, or the older rope_theta and rope_scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.frequencies import RopeFrequencies, longrope_amplitude, yarn_amplitude

from ...dsl import RoPE


def rope_of(config: Mapping[str, Any]) -> RoPE:
    """The `RoPE` of a config, of every type that transformers knows for text models.

    ``dynamic`` and ``longrope`` are those of texts up to the original context, until `at_length` says more.

    Raises:
        WeftError: if the type is unknown or lacks a number.
    """
    given = _given(config)
    kind = _kind(given)
    plain: dict[str, Any] = {
        "theta": float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "fraction": float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
    }

    def number(name: str) -> float:
        if given.get(name) is None:
            raise WeftError(f"RoPE of type {kind} needs {name!r}")
        return float(given[name])

    if kind == "default":
        return RoPE(**plain)
    if kind == "linear":
        return RoPE(**plain, scaling="linear", factor=number("factor"))
    if kind == "dynamic":
        return RoPE(
            **plain, scaling="dynamic", factor=number("factor"), original=int(config["max_position_embeddings"])
        )
    original = _original(config, given)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RoPE(**plain, scaling="llama3", factor=number("factor"), original=original, low_freq=low, high_freq=high)
    amplitude = given.get("attention_factor")
    if kind == "yarn":
        scales = given.get("mscale") or 1.0, given.get("mscale_all_dim") or 0.0
        factor = float(given.get("factor") or config["max_position_embeddings"] / original)
        return RoPE(
            **plain,
            scaling="yarn",
            factor=factor,
            original=original,
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
            amplitude=float(yarn_amplitude(factor, *scales) if amplitude is None else amplitude),
        )
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if not given.get(name):
                raise WeftError(f"RoPE of type {kind} needs {name!r}")
        factor = float(given.get("factor") or config["max_position_embeddings"] / original)
        amplitude = float(longrope_amplitude(factor, original) if amplitude is None else amplitude)
        plain |= {"original": original, "amplitude": amplitude}
        short, long = (tuple(map(float, given[name])) for name in ("short_factor", "long_factor"))
        return RoPE(**plain, scaling="longrope", factors=short, long_factors=long)
    raise WeftError(f"unknown RoPE type {kind!r}; known are default, linear, dynamic, llama3, yarn, longrope")


def rope_with(*, interleaved: bool = False, **defaults: Any) -> Callable[[Mapping[str, Any]], RoPE]:
    """`rope_of` for a family with other `defaults` of the config's keys, or whose pairs are neighbours."""
    return lambda config: replace(rope_of({**defaults, **config}), interleaved=interleaved)


def at_length(graph: Graph, length: int) -> bool:
    """Fix the rotary frequencies that depend on the longest text (dynamic, longrope) for texts of up to `length`.

    Returns whether they are others than those of the original context.
    """
    others = False
    for param in graph.params.values():
        if isinstance(param.recipe, RopeFrequencies) and param.recipe.scaling in ("dynamic", "longrope"):
            param.recipe = replace(param.recipe, length=length)
            others |= length > param.recipe.original
    return others


def context_of(config: Mapping[str, Any]) -> int | None:
    """The longest text meant: the original context where longer ones need other frequencies (see `at_length`)."""
    context = config.get("max_position_embeddings")
    given = _given(config)
    if _kind(given) == "longrope":
        return _original(config, given)
    return None if context is None else int(context)


def _kind(given: Mapping[str, Any]) -> str:
    kind = str(given.get("rope_type") or given.get("type") or "default")
    older = kind == "su" or (kind == "yarn" and "short_factor" in given)  # the first names of longrope
    return "longrope" if older else kind


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise WeftError(f"rope parameters must be a mapping, not {given!r}")
    if any(isinstance(v, Mapping) for v in given.values()):
        raise WeftError("rope parameters that differ by layer type are not supported for this family")
    return given


def _original(config: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    found = next(
        (
            c[k]
            for k in ("original_max_position_embeddings", "max_position_embeddings")
            for c in (given, config)
            if c.get(k)
        ),
        None,
    )
    if found is None:
        raise WeftError("RoPE scaling needs 'original_max_position_embeddings'")
    return int(found)
