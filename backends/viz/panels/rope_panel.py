"""Rotary positions: the wavelength of every pair of a head in tokens, before and after scaling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from weft.ir.recipes.frequencies import RopeFrequencies

from ..model.network import Network
from .kinds import abbreviate_layers


def build_panel(network: Network) -> list[dict[str, Any]] | None:
    """Return the data of every distinct set of RoPE frequencies in `network`; None if there are none."""
    uses: dict[RopeFrequencies, list[tuple[str, str, float]]] = {}
    for v in network.vertices:
        for rotary in (w.rotary for w in v.weights):
            if rotary is not None:
                amplitude = float(str(v.weft_op.attrs.get("amplitude", 1.0)))
                uses.setdefault(rotary, []).append((v.scope or v.name, v.name, amplitude))
    return [_to_dict(f, places, network.context) for f, places in uses.items()] or None


def _to_dict(rotary: RopeFrequencies, places: list[tuple[str, str, float]], context: int | None) -> dict[str, Any]:
    after, before = (compute_wavelengths(r) for r in (rotary, replace(rotary, scaling="none")))
    return {
        "where": abbreviate_layers(scope for scope, _, _ in places),
        "at": places[0][1],
        "scaling": rotary.scaling,
        "sentences": _describe_rotation(rotary, places[0][2]),
        "before": before,
        "after": after if rotary.scaling != "none" else None,
        "original": rotary.original or None,
        "context": context,
    }


def compute_wavelengths(rotary: RopeFrequencies) -> list[float | None]:
    """Return the wavelength of every rotary pair in tokens (2π/frequency); None for a pair that is not rotated."""
    frequencies = np.asarray(rotary.frequencies(), np.float64)
    return [None if f == 0 else float(f"{2 * math.pi / f:.6g}") for f in frequencies]


def _describe_rotation(rotary: RopeFrequencies, amplitude: float) -> list[str]:
    sentences = [f"{rotary.dim // 2} rotary pairs per head; base {rotary.theta:,.10g}."]
    if rotary.scaling != "none":
        sentences.append(rotary.describe())
    if amplitude != 1:
        sentences.append(f"Rotated components are scaled by {amplitude:.6g}.")
    return sentences
