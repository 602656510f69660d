"""Rotary settings of Hugging Face configs: rope_parameters, or the older rope_theta and rope_scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.frequencies import longrope_amplitude, yarn_amplitude

from ..dsl import RoPE


def rope_of(config: Mapping[str, Any]) -> RoPE:
    """The `RoPE` of a config, of every type that transformers knows for text models.

    ``dynamic`` does nothing up to the trained context and is taken as plain; ``longrope`` takes the factors for short
    texts, right up to the original context (see `context_of`).

    Raises:
        WeftError: if the type is unknown or lacks a number.
    """
    given = _given(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    plain: dict[str, Any] = {
        "theta": float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "fraction": float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
    }

    def number(name: str) -> float:
        if given.get(name) is None:
            raise WeftError(f"RoPE of type {kind} needs {name!r}")
        return float(given[name])

    if kind in ("default", "dynamic"):
        return RoPE(**plain)
    if kind == "linear":
        return RoPE(**plain, scaling="linear", factor=number("factor"))
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
    if kind in ("longrope", "su"):
        if not given.get("short_factor"):
            raise WeftError(f"RoPE of type {kind} needs 'short_factor'")
        factor = float(given.get("factor") or config["max_position_embeddings"] / original)
        amplitude = float(longrope_amplitude(factor, original) if amplitude is None else amplitude)
        factors = tuple(float(f) for f in given["short_factor"])
        return RoPE(**plain, scaling="longrope", original=original, factors=factors, amplitude=amplitude)
    raise WeftError(f"unknown RoPE type {kind!r}; known are default, linear, dynamic, llama3, yarn, longrope")


def context_of(config: Mapping[str, Any]) -> int | None:
    """The longest text that the imported model is right for."""
    context = config.get("max_position_embeddings")
    given = _given(config)
    if (given.get("rope_type") or given.get("type")) in ("longrope", "su"):
        return _original(config, given)
    return None if context is None else int(context)


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
