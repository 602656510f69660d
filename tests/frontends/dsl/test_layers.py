"""Normalizations and absolute positions."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import LayerNorm, LearnedPositions, RMSNorm, Sinusoidal, trace
from weft.ir import TensorType, WeftError
from weft.ir.types import dtypes

from .formulas.elementary import layer_norm
from .formulas.positions import sinusoids
from .harness import RUNNERS, Row, check, trace_checked

POSITIONS = np.array([0, 1, 2, 3, 7, 50, 99, 100, 101, 250, 399])


@pytest.mark.parametrize("runner", RUNNERS)
def test_layer_norm(runner: str) -> None:
    def formula(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
        return layer_norm(x, w["layer_norm.weight"], w["layer_norm.bias"], 1e-3)

    check(Row(LayerNorm(1e-3), formula), runner)


def test_norms_without_weights_have_no_parameters() -> None:
    for norm in (LayerNorm(weight=False, bias=False), RMSNorm(weight=False)):
        assert not trace_checked(norm).params


@pytest.mark.parametrize("runner", RUNNERS)
def test_learned_positions(runner: str) -> None:
    check(Row(LearnedPositions(13), lambda x, w: x + w["learned_positions.weight"][:11]), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_sinusoidal_positions(runner: str) -> None:
    row = Row(Sinusoidal(400), lambda x, w: x + sinusoids(POSITIONS, x.shape[1]), positions=POSITIONS)
    check(row, runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_inclusive_sinusoids_with_an_offset(runner: str) -> None:
    """Those of fairseq: rates from 1 to 1/10000, all sines first, the first token not at position 0."""
    angles = np.outer(np.arange(2, 13), 10_000 ** -np.linspace(0, 1, 8))
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    check(Row(Sinusoidal(14, interleaved=False, offset=2, inclusive=True), lambda x, w: x + table), runner)


def test_inclusive_sinusoids_need_four_features() -> None:
    with pytest.raises(WeftError, match="inclusive=True needs a width of at least 4, not 2"):
        trace(Sinusoidal(9, inclusive=True), {"x": TensorType(dtypes.f32, (1, 4, 2))})
