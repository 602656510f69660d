"""Rotary position embeddings with every extension of the context."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import RoPE, module
from weft.ir import Value, ops
from weft.ir.recipes.frequencies import compute_yarn_amplitude
from weft.ir.types import dtypes

from .formulas.elementary import Array, Formula, head_slices
from .formulas.positions import dynamic_ntk, frequencies, in_float32, ntk, rotate, yarn
from .harness import RUNNERS, Row, check

POSITIONS = np.array([0, 1, 2, 3, 7, 50, 99, 100, 101, 250, 399])
HEADS, HEAD = 2, 12


@module
class Rotated:
    """Both heads of x rotated by `rope`."""

    rope: RoPE

    def __call__(self, x: Value) -> Value:
        return self.rope(x, HEADS)


@module
class DynamicNTK:
    """Both heads of x rotated by frequencies that follow the length of the sequence."""

    factor: float
    original: int

    def __call__(self, x: Value) -> Value:
        at, frequencies = RoPE().angles(x, HEAD)
        length = ops.cast(ops.max(at, axes=(0, 1), keepdims=True), to=dtypes.f32) + 1.0
        growth = ops.reshape(length * (self.factor / self.original) + (1 - self.factor), shape=(1,))
        growth = ops.maximum(growth, ops.affine(growth, by=0.0, plus=1.0))
        # θ^(−2k/d) becomes θ'^(−2k/d), that is f · growth^(−2k/(d−2)), and −2k/d is log f / log θ.
        power = ops.log(frequencies) * (HEAD / ((HEAD - 2) * math.log(10_000.0)))
        return ops.rope(x, at, frequencies * ops.exp(power * ops.log(growth)), heads=HEADS)


def rotated(angles: Array, positions: Array = POSITIONS, **settings: Any) -> Formula:
    """Return the rotation of both heads by position · angles."""
    slices = head_slices(HEADS, HEAD)
    return lambda x, w: np.concatenate([rotate(x[:, s], positions, angles, **settings) for s in slices], 1)


PLAIN, YARN = frequencies(HEAD), {"factor": 8.0, "original": 64, "beta_fast": 8.0, "beta_slow": 1.0}
TEMPERATURE = 0.1 * math.log(8) + 1  # √(1/t) of YaRN (equation 22)
ROTARY: dict[str, tuple[RoPE, Array, dict[str, Any]]] = {
    "half": (RoPE(), PLAIN, {}),
    "interleaved": (RoPE(interleaved=True), PLAIN, {"interleaved": True}),
    "partial": (RoPE(dim=8), frequencies(8), {}),
    "partial, interleaved": (RoPE(fraction=1 / 3, interleaved=True), frequencies(4), {"interleaved": True}),
    "base of 1,000,000": (RoPE(1e6), frequencies(HEAD, 1e6), {}),
    "interpolation (Chen 2023)": (RoPE(scaling="linear", factor=4), PLAIN / 4, {}),
    "NTK-aware": (RoPE(scaling="ntk", factor=4), ntk(HEAD, 4), {}),
    "dynamic NTK, long": (
        RoPE(scaling="dynamic", factor=2, original=100, length=400),
        *(dynamic_ntk(HEAD, 2, 100, 400), {}),
    ),
    "dynamic NTK, short": (RoPE(scaling="dynamic", factor=2, original=400, length=100), PLAIN, {}),
    "YaRN": (
        RoPE(scaling="yarn", amplitude=compute_yarn_amplitude(8.0), **YARN),
        *(yarn(HEAD, 8, 64, 8, 1), {"amplitude": TEMPERATURE}),
    ),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embedding(name: str, runner: str) -> None:
    rope, angles, settings = ROTARY[name]
    formula = rotated(in_float32(angles), **settings)
    check(Row(Rotated(rope), formula, HEADS * HEAD, len(POSITIONS), POSITIONS), runner)


def test_yarn_blends_by_wavelength() -> None:
    """Fast pairs stay, pairs that do not complete a rotation are interpolated, and some are between."""
    blend, rotations = yarn(64, 8, 64, 8, 1) / frequencies(64), 64 * frequencies(64) / (2 * math.pi)
    assert (blend[rotations > 10] == 1).all()
    np.testing.assert_allclose(blend[rotations < 0.7], 1 / 8)
    assert (np.diff(blend) <= 0).all() and ((blend > 0.2) & (blend < 0.9)).any()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("original", [5, 40])
def test_dynamic_ntk_follows_the_length(original: int, runner: str) -> None:
    positions = np.arange(3, 20)
    formula = rotated(dynamic_ntk(HEAD, 3, original, 20), positions)
    check(Row(DynamicNTK(3.0, original), formula, HEADS * HEAD, 17, positions, exact=False), runner)
