"""RoPE frequencies of every scaling against Transformers; sinusoids and slopes against their formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.ir.recipes.frequencies import (
    AlibiSlopes,
    RopeFrequencies,
    RopeTable,
    Sinusoid,
    compute_longrope_amplitude,
    compute_yarn_amplitude,
)
from weft.ir.recipes.readers import EMPTY
from weft.ir.types import dtypes

DIM, THETA, CONTEXT = 16, 10_000.0, 64
LONG = tuple(np.linspace(1.0, 9.0, DIM // 2).tolist())
SHORT = tuple(np.linspace(1.0, 1.5, DIM // 2).tolist())
SCALINGS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "linear": [({"factor": 4.0}, {"factor": 4.0})],
    "dynamic": [],  # depends on the length: see test_frequencies_for_the_longest_text
    "yarn": [
        ({"factor": 8.0, "original_max_position_embeddings": n, **given}, {"factor": 8.0, "original": n, **ours})
        for n in (64, 4096)
        for given, ours in (
            ({}, {}),
            ({"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 16, "beta_slow": 2}),
            ({"truncate": False}, {"truncate": False}),
        )
    ],
    "longrope": [
        (
            {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": CONTEXT, "factor": 32.0},
            {"factors": SHORT},
        )
    ],
    "llama3": [
        (
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": h, "original_max_position_embeddings": n},
            {"factor": 8.0, "high_freq": h, "original": n},
        )
        for h, n in ((4.0, 8192), (3.0, 64))
    ],
    "proportional": [({"factor": 2.0, "partial_rotary_factor": 0.25}, {"factor": 2.0, "rotated": 2})],
}


def config(rope_type: str, **settings: Any) -> LlamaConfig:
    parameters = {"rope_type": rope_type, "rope_theta": THETA, **settings}
    return LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=parameters
    )


def theirs(rope_type: str, seq_len: int | None = None, **settings: Any) -> tuple[np.ndarray, float]:
    made, amplitude = ROPE_INIT_FUNCTIONS[rope_type](config(rope_type, **settings), "cpu", seq_len=seq_len)
    return made.numpy(), amplitude


def test_every_scaling_is_compared() -> None:
    assert set(SCALINGS) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize(
    ("kind", "given", "ours"), [(kind, *pair) for kind, pairs in SCALINGS.items() for pair in pairs]
)
def test_scaling(kind: str, given: dict[str, Any], ours: dict[str, Any]) -> None:
    wanted, _ = theirs(kind, **given)
    found = RopeFrequencies(DIM, THETA, scaling=kind, **ours).evaluate(EMPTY)
    np.testing.assert_allclose(found, wanted, rtol=20 * dtypes.f32.eps)


def test_unscaled_and_ntk() -> None:
    k = np.arange(1, DIM // 2 + 1)
    plain = THETA ** (-2 * (k - 1) / DIM)
    np.testing.assert_allclose(RopeFrequencies(DIM, THETA).frequencies(), plain, rtol=1e-14)
    base = THETA * 4 ** (DIM / (DIM - 2))
    ntk = RopeFrequencies(DIM, THETA, scaling="ntk", factor=4.0).frequencies()
    np.testing.assert_allclose(ntk, base ** (-2 * (k - 1) / DIM), rtol=1e-13)
    # highest frequency untouched, lowest interpolated by the whole factor (that is what the exponent is for)
    np.testing.assert_allclose(ntk[[0, -1]], [1, plain[-1] / 4], rtol=1e-13)
    # Transformers' dynamic form at length L equals the static one at s·L/original − s + 1
    grown, _ = theirs("dynamic", seq_len=160, factor=2.0)
    static = RopeFrequencies(DIM, THETA, scaling="ntk", factor=2.0 * 160 / CONTEXT - 1)
    np.testing.assert_allclose(static.frequencies(), grown, rtol=20 * dtypes.f32.eps)


@pytest.mark.parametrize(("mscale", "all_dim"), [(None, None), (0.707, 0.707), (1.0, 0.5)])
def test_yarn_amplitude(mscale: float | None, all_dim: float | None) -> None:
    given = {} if mscale is None else {"mscale": mscale, "mscale_all_dim": all_dim}
    _, wanted = theirs("yarn", factor=16.0, original_max_position_embeddings=CONTEXT, **given)
    found = (
        compute_yarn_amplitude(16.0)
        if mscale is None or all_dim is None
        else compute_yarn_amplitude(16.0, mscale, all_dim)
    )
    assert math.isclose(found, wanted)
    assert compute_yarn_amplitude(1.0) == 1


@pytest.mark.parametrize("length", [0, 10, CONTEXT, CONTEXT + 1, 150])
def test_frequencies_for_the_longest_text(length: int) -> None:
    wanted, _ = theirs("dynamic", seq_len=max(length, 1), factor=4.0)
    grown = RopeFrequencies(DIM, THETA, scaling="dynamic", factor=4.0, original=CONTEXT, length=length)
    np.testing.assert_allclose(grown.frequencies(), wanted, rtol=30 * dtypes.f32.eps)
    wanted, _ = theirs("longrope", seq_len=length, **SCALINGS["longrope"][0][0])
    factors = {"factors": SHORT, "long_factors": LONG}
    chosen = RopeFrequencies(DIM, THETA, scaling="longrope", original=CONTEXT, length=length, **factors)
    np.testing.assert_allclose(chosen.frequencies(), wanted, rtol=20 * dtypes.f32.eps)


def test_longrope_amplitude() -> None:
    _, wanted = theirs("longrope", **SCALINGS["longrope"][0][0])
    assert math.isclose(compute_longrope_amplitude(32.0, CONTEXT), wanted)
    assert compute_longrope_amplitude(0.5, CONTEXT) == 1


def test_table_angles_are_exact_far_out() -> None:
    recipe = RopeFrequencies(DIM, 500_000.0)
    row = RopeTable(recipe, 131_072, "sin").read(EMPTY, 131_071, 131_072)
    exact = [math.sin(131_071 * 500_000.0 ** (-2 * k / DIM)) for k in range(DIM // 2)]
    np.testing.assert_allclose(row[0], exact, atol=1e-7)
    assert abs(torch.sin(torch.tensor(131_071.0) * torch.tensor(recipe.evaluate(EMPTY)[1])) - exact[1]) > 1e-4


@pytest.mark.parametrize("interleaved", [True, False])
def test_sinusoid(interleaved: bool) -> None:
    table = Sinusoid(50, 6, interleaved).evaluate(EMPTY)
    for pos in (0, 1, 49):
        for i in range(3):
            angle = pos / 10_000 ** (2 * i / 6)
            sin_at, cos_at = (2 * i, 2 * i + 1) if interleaved else (i, 3 + i)
            assert math.isclose(table[pos, sin_at], math.sin(angle), abs_tol=1e-7)
            assert math.isclose(table[pos, cos_at], math.cos(angle), abs_tol=1e-7)


@pytest.mark.parametrize("heads", [1, 4, 8, 12, 7, 112])
def test_alibi_slopes(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    wanted = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]  # bias of key position 1
    np.testing.assert_allclose(AlibiSlopes(heads).evaluate(EMPTY), wanted, rtol=1e-6)
