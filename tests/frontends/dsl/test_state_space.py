"""Mamba and Mamba-2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import Block, Decoder, Mamba, Mamba2, RMSNorm

from .formulas.elementary import Array, softplus
from .formulas.recurrences import mamba, mamba2
from .harness import RUNNERS, Row, check


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"dt_rank": 3, "conv": 2, "conv_bias": False, "bias": True}, {"norms": RMSNorm(1e-3)}],
    ids=str,
)
def test_mamba(options: dict[str, Any], runner: str) -> None:
    module = Mamba(12, state=5, **options)
    check(Row(module, mamba(module)), runner)


NORM_FIRST = {"norm_groups": 2, "norm_first": True, "out_bias": True, "least_step": 0.4}  # Falcon-H1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2, "norm_groups": 2, "norm": RMSNorm(1e-2), "bias": True},
        {"norm": None, **NORM_FIRST},
        {"norm": RMSNorm(1e-2), **NORM_FIRST},
    ],
    ids=str,
)
def test_mamba2(options: dict[str, Any], runner: str) -> None:
    module = Mamba2(12, 4, state=5, **options)
    check(Row(module, mamba2(module)), runner)


def test_initial_values_of_state_spaces() -> None:
    """A of −1, −2, … (Mamba) or uniform in −1 to −16 (Mamba-2); steps log-uniform in 0.001 to 0.1."""
    graph = Decoder(10, 16, [Block(Mamba(4000, state=3, dt_rank=4)), Block(Mamba2(4000, 2000, state=5))]).graph()

    def value(name: str) -> Array:
        return np.asarray(graph.params[f"layers.{name}"].recipe.evaluate(graph.reader))

    def spread(x: Array, low: float, high: float) -> None:
        assert low <= x.min() < low + 0.01 * (high - low) and high - 0.01 * (high - low) < x.max() <= high
        assert abs(x.mean() - (low + high) / 2) < 0.03 * (high - low)

    np.testing.assert_allclose(np.exp(value("0.attn.a_log")), np.tile([1.0, 2.0, 3.0], (4000, 1)), rtol=1e-6)
    spread(np.exp(value("1.attn.a_log")), 1, 16)
    for i in range(2):
        spread(np.log(softplus(value(f"{i}.attn.dt.bias"))), np.log(1e-3) - 1e-3, np.log(0.1) + 1e-3)
        spread(value(f"{i}.attn.conv.weight"), -0.5, 0.5)
    spread(value("0.attn.dt.weight"), -0.5, 0.5)
