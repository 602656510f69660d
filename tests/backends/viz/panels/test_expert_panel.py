"""Routing rules of mixtures, and idle parameters."""

from __future__ import annotations

import pytest

from weft.frontends.app.api.inspect.counting import inspect

from ..pages import model_of
from .graphs import panels_of


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "switch-base-8"])
def test_idle_parameters_equal_weft_inspect(preset: str) -> None:
    source = model_of(preset)
    found, counted = panels_of(source.graph)["experts"], inspect(source)
    assert sum(rule["idle"] for rule in found) == counted.parameters - counted.active_parameters
    for rule in found:
        for example in rule["examples"]:
            assert len(example) == rule["k"] and all(0 <= e < rule["experts"] for e, _ in example)
    if preset == "deepseek-v3":
        groups = [{e // 32 for e, _ in example} for example in found[0]["examples"]]
        assert found[0]["shared"] and max(map(len, groups)) <= 4 and len(groups) > 9
    assert not any(rule["shared"] for rule in found) or preset == "deepseek-v3"
