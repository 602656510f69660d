"""Routing rules of mixtures, and idle parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.backends.viz.model.network import Network, Vertex, Weight
from weft.backends.viz.panels.expert_panel import RoutingRule, build_panel, route_examples
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


RULE = RoutingRule(4, 2, "softmax", True, 1.0, 1, 1, "top2", "", False)


def test_examples_choose_the_largest_scores_and_sum_to_one() -> None:
    logits = np.random.default_rng(0).standard_normal((12, 4))
    for row, example in zip(logits, route_examples(RULE), strict=True):
        best = sorted(np.argsort(row)[-2:].tolist())
        chosen = np.exp(row[best])
        assert [int(e) for e, _ in example] == best
        np.testing.assert_allclose([w for _, w in example], chosen / chosen.sum(), rtol=1e-3)
    assert route_examples(replace(RULE, k=None)) == []


def build_moe(limit: str = "", **attrs: str) -> Network:
    """Return a router of the op `route`, an optional limit, and four experts of 10 parameters."""
    moe = Vertex("l.0.moe", "moe", "l.0", (), ("m",), weights=(Weight("w", "[4, 10]", "f32", 160, "", 40),))
    moe = replace(moe, attrs={"active": "2"} if limit != "expert_choice" else {})
    limits = (Vertex("l.0.limit", limit, "l.0", (), ("c",), attrs=attrs),) if limit else ()
    return Network("net", (Vertex("l.0.route", "route", "l.0", (), ("r",), attrs={"k": "2"}), *limits, moe), {}, {})


@pytest.mark.parametrize(
    ("network", "idle", "sentence"),
    [
        (build_moe(), 20, "Each token is routed to 2 of 4 experts."),
        (
            build_moe("limit_capacity", capacity="8"),
            20,
            "An expert takes at most 8 tokens; further tokens skip it (residual only).",
        ),
        (
            build_moe("expert_choice", factor="1.5"),
            0,
            "Every expert takes the 1.5 times its share of tokens that score highest (Zhou 2022).",
        ),
    ],
)
def test_rules_state_routing_and_capacity(network: Network, idle: int, sentence: str) -> None:
    (rule,) = build_panel(network) or []
    assert sentence in rule["sentences"]
    assert (rule["experts"], rule["parameters"], rule["idle"], rule["where"]) == (4, 40, idle, "l 0")


def test_network_without_experts_has_no_panel() -> None:
    assert build_panel(Network("net", (), {}, {})) is None
