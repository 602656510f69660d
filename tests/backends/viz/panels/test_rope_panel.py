"""Wavelengths of rotary positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weft import (
    Attention,
    Block,
    Decoder,
    GatedMLP,
    RMSNorm,
    RoPE,
    load_source,
)
from weft.backends.viz.panels.rope_panel import compute_wavelengths
from weft.ir.recipes.frequencies import RopeFrequencies

from ..pages import model_of
from .graphs import panels_of


@pytest.mark.parametrize(
    ("scaling", "config"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("llama3", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}),
    ],
)
def test_wavelengths_equal_those_of_transformers(scaling: str, config: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = RoPE(10_000, scaling=scaling, factor=config["factor"], original=2048)
    block = Block(Attention(2, head_dim=64, rope=rope), GatedMLP(48), RMSNorm())
    (found,) = panels_of(load_source(Decoder(50, 128, block=block, layers=1, context=8192)).graph)["positions"]
    parameters = {**config, "rope_theta": 10_000.0, "original_max_position_embeddings": 2048}
    known = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=8192, rope_parameters=parameters
    )
    theirs, _ = ROPE_INIT_FUNCTIONS[scaling](known, "cpu")
    np.testing.assert_allclose(found["after"], 2 * math.pi / theirs.double().numpy(), rtol=1e-5)
    np.testing.assert_allclose(found["before"], 2 * math.pi * 10_000 ** (np.arange(32) / 32), rtol=1e-5)
    assert (found["original"], found["context"], found["scaling"]) == (2048, 8192, scaling)


def test_plain_rotary_positions_have_one_curve() -> None:
    (found,) = panels_of(model_of("smollm2-135m").graph)["positions"]
    assert found["after"] is None and found["before"][0] == pytest.approx(2 * math.pi, rel=1e-5)
    assert "positions" not in panels_of(model_of("gpt2").graph)


def test_wavelengths_are_two_pi_over_the_frequencies() -> None:
    """θ = 10,000 over 2 pairs: frequencies 1 and 1/100; linear scaling by 4 makes waves 4 times as long."""
    plain = RopeFrequencies(dim=4, theta=10_000.0)
    waves = np.array([2 * math.pi, 200 * math.pi])
    np.testing.assert_allclose(np.array(compute_wavelengths(plain), float), waves, rtol=1e-5)
    scaled = replace(plain, scaling="linear", factor=4.0)
    np.testing.assert_allclose(np.array(compute_wavelengths(scaled), float), 4 * waves, rtol=1e-5)


def test_pairs_that_are_not_rotated_have_no_wavelength() -> None:
    partial = RopeFrequencies(dim=4, theta=10_000.0, scaling="proportional", factor=1.0, rotated=1)
    assert compute_wavelengths(partial) == [pytest.approx(2 * math.pi, rel=1e-5), None]
