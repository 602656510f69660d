"""The gated delta rule."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.dsl import GatedDeltaNet, RMSNorm

from .formulas.recurrences import gated_delta_net
from .harness import RUNNERS, Row, check


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2, "v_head_dim": 5, "conv": 2, "norm": RMSNorm(1e-2), "negative": True},
        {"gate": "sigmoid", "per_key": True, "rank": 7},
    ],
    ids=str,
)
def test_gated_delta_net(options: dict[str, Any], runner: str) -> None:
    module = GatedDeltaNet(4, 3, **options)
    check(Row(module, gated_delta_net(module)), runner)
